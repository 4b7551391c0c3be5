"""Files in chunks on a data connection, each with its digest, and the end that sends them.

    chunk   kind u8, length u32, number of the file u64, offset u64, digest of the payload
            16 bytes, CRC-32 of the head so far u32, payload

A chunk lies in one piece of PIECE_BYTES of its file. The chunks of a piece come in order on one
connection; one that begins its piece again takes back what came of it before (a read that was
tried again).
"""

from __future__ import annotations

import contextlib
import hashlib
import socket
import struct
import threading
import zlib
from typing import TYPE_CHECKING, NamedTuple

from hpml_orchestrator.errors import StagingError
from hpml_orchestrator.staging.hashing import DIGEST_BYTES, PIECE_BYTES, Hashing, hashing_named
from hpml_orchestrator.staging.source import BLOCK_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hpml_orchestrator.staging.hashing import Buffer
    from hpml_orchestrator.staging.many.handshake import Caller
    from hpml_orchestrator.staging.plan import Plan
    from hpml_orchestrator.staging.source import Reader, Source

__all__ = [
    "CHUNK",
    "END_OF_STREAM",
    "HEAD_BYTES",
    "ChainLostError",
    "Head",
    "Sender",
    "SendingReader",
    "SendingSource",
    "chunk_hashing",
    "hashing_of_first",
    "lost",
    "pack_head",
    "unpack_head",
]

CHUNK, END_OF_STREAM = 1, 2
_HEAD = struct.Struct(">BIQQ16s")
_CRC = struct.Struct(">I")
HEAD_BYTES = _HEAD.size + _CRC.size
_COPIED_BYTES = 64 << 10  # smaller chunks are gathered: one system call for many
_GATHERED_BYTES = 256 << 10


class ChainLostError(StagingError):
    """A data connection broke; the control connection may know why."""


class Head(NamedTuple):
    """What stands before a chunk's bytes."""

    kind: int
    length: int
    number: int
    offset: int
    digest: bytes


def pack_head(head: Head) -> bytes:
    """Return a head as bytes."""
    packed = _HEAD.pack(*head)
    return packed + _CRC.pack(zlib.crc32(packed))


def unpack_head(data: Buffer, at: int) -> Head:
    """Return the head at a place of a buffer.

    Raises:
        StagingError: it is damaged.
    """
    packed = bytes(data[at : at + HEAD_BYTES])
    head = Head(*_HEAD.unpack_from(packed))
    if _CRC.unpack_from(packed, _HEAD.size)[0] != zlib.crc32(packed[: _HEAD.size]):
        raise StagingError("a chunk's head was damaged on its way")
    if head.kind not in {CHUNK, END_OF_STREAM} or head.length > BLOCK_BYTES:
        raise StagingError("a chunk's head makes no sense")
    return head


def chunk_hashing(name: str, secret: bytes) -> Callable[[Buffer], bytes]:
    """Return what makes a chunk's digest: XXH3-128, or BLAKE2b keyed with the job's secret."""
    if name == "blake2b_128":
        key = hashlib.sha256(b"chunks" + secret).digest()
        return lambda data: hashlib.blake2b(data, digest_size=DIGEST_BYTES, key=key).digest()
    new = hashing_of_first(name).new

    def digest(data: Buffer) -> bytes:
        made = new()
        made.update(data)
        return made.digest()

    return digest


def hashing_of_first(name: str) -> Hashing:
    """Return the hashing that the first node named.

    Raises:
        StagingError: this node does not have it.
    """
    found = hashing_named(name)
    if found is None:
        raise StagingError(
            f"this node cannot hash with {name}, as the first node does",
            hint="install xxhash for this node's interpreter, or use distribution: shared",
        )
    return found


class Sender:
    """Sends chunks to the next node; one per worker, safe from several of its threads.

    Args:
        connect: opens the data connection; called for the first chunk.
        digest: see `chunk_hashing`.
        peer: what to call the next node in errors.
        timeout: seconds after which a node that takes nothing counts as hung.
    """

    def __init__(
        self,
        connect: Callable[[], Caller],
        digest: Callable[[Buffer], bytes],
        peer: str,
        timeout: float,
    ) -> None:
        self._connect = connect
        self._digest = digest
        self._peer = peer
        self._timeout = timeout
        self._sock: socket.socket | None = None
        self._gathered = bytearray()
        self._lock = threading.Lock()

    def send(self, number: int, offset: int, data: Buffer) -> None:
        """Send the bytes of a file from an offset on.

        Raises:
            ChainLostError: the next node is gone or hangs.
        """
        view = memoryview(data)
        while view:
            room = PIECE_BYTES - offset % PIECE_BYTES
            part = view[: min(BLOCK_BYTES, room)]
            self._chunk(number, offset, part)
            offset += len(part)
            view = view[len(part) :]

    def close(self) -> None:
        """Send what was gathered and the end, if anything was sent at all.

        Raises:
            ChainLostError: the next node is gone or hangs.
        """
        with self._lock:
            if self._sock is None and not self._gathered:
                return
            self._gathered += pack_head(Head(END_OF_STREAM, 0, 0, 0, bytes(DIGEST_BYTES)))
            try:
                self._write(b"")
            finally:
                if self._sock is not None:
                    self._sock.close()
                self._sock = None

    def _chunk(self, number: int, offset: int, part: memoryview) -> None:
        head = pack_head(Head(CHUNK, len(part), number, offset, self._digest(part)))
        with self._lock:
            self._gathered += head
            if len(part) < _COPIED_BYTES:
                self._gathered += part
                if len(self._gathered) >= _GATHERED_BYTES:
                    self._write(b"")
            else:
                self._write(part)

    def _write(self, part: Buffer) -> None:
        """Send what was gathered and then the part."""
        try:
            if self._sock is None:
                self._sock = self._connect().sock
                self._sock.settimeout(self._timeout)
            self._sock.sendall(self._gathered)
            self._gathered.clear()
            if part:
                self._sock.sendall(part)
        except OSError as error:
            raise lost(self._peer, self._timeout, error) from error


def lost(peer: str, timeout: float, error: OSError) -> ChainLostError:
    """Return what to say of a data connection that failed."""
    if isinstance(error, socket.timeout):
        return ChainLostError(f"{peer} hangs: it took no bytes for {timeout:.0f} s")
    return ChainLostError(f"{peer} was lost: {error.strerror or error}")


class SendingReader:
    """A `Reader` that sends on whatever is read."""

    def __init__(self, reader: Reader, sender: Sender) -> None:
        self._reader = reader
        self._sender = sender

    def read(self, number: int, start: int, end: int) -> Iterator[Buffer]:
        """Yield the bytes [start, end) of a file; they are on their way by then."""
        at = start
        for buffer in self._reader.read(number, start, end):
            self._sender.send(number, at, buffer)
            at += len(buffer)
            yield buffer

    def close(self) -> None:
        """Close both."""
        with contextlib.closing(self._reader):
            self._sender.close()


class SendingSource:
    """A `Source` whose readers send on whatever they read."""

    def __init__(self, source: Source, sender: Callable[[], Sender]) -> None:
        self._source = source
        self._sender = sender
        self.kind = "sent"  # the engine reads trees and files past their readers
        self.ordered = source.ordered

    def plan(self) -> Plan:
        """Return the source's plan."""
        return self._source.plan()

    def reader(self, plan: Plan) -> SendingReader:
        """Open for reading and sending."""
        return SendingReader(self._source.reader(plan), self._sender())

    def close(self) -> None:
        """Close the source."""
        self._source.close()
