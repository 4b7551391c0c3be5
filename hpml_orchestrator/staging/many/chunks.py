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
import os
import socket
import struct
import threading
import zlib
from typing import TYPE_CHECKING, NamedTuple

from hpml_orchestrator.errors import StagingError
from hpml_orchestrator.staging.faults import shown
from hpml_orchestrator.staging.hashing import DIGEST_BYTES, PIECE_BYTES, Hashing, hashing_named
from hpml_orchestrator.staging.source import BLOCK_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hpml_orchestrator.staging.hashing import Buffer, Digest
    from hpml_orchestrator.staging.many.link import Caller
    from hpml_orchestrator.staging.plan import Entry, Plan
    from hpml_orchestrator.staging.source import Reader, Source

__all__ = [
    "CHUNK",
    "END_OF_STREAM",
    "HEAD_BYTES",
    "ChainLostError",
    "ChunkHead",
    "Landed",
    "Landing",
    "Sender",
    "SendingReader",
    "SendingSource",
    "chunk_hashing",
    "hashing_of_first",
    "lost",
    "make_large_and_empty",
    "pack_head",
    "pieces_of",
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


class ChunkHead(NamedTuple):
    """What stands before a chunk's bytes."""

    kind: int
    length: int
    number: int
    offset: int
    digest: bytes


def pack_head(head: ChunkHead) -> bytes:
    """Return a head as bytes."""
    packed = _HEAD.pack(*head)
    return packed + _CRC.pack(zlib.crc32(packed))


def unpack_head(data: Buffer, at: int) -> ChunkHead:
    """Return the head at a place of a buffer.

    Raises:
        StagingError: it is damaged.
    """
    packed = bytes(data[at : at + HEAD_BYTES])
    head = ChunkHead(*_HEAD.unpack_from(packed))
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
            self._gathered += pack_head(ChunkHead(END_OF_STREAM, 0, 0, 0, bytes(DIGEST_BYTES)))
            try:
                self._write(b"")
            finally:
                if self._sock is not None:
                    self._sock.close()
                self._sock = None

    def _chunk(self, number: int, offset: int, part: memoryview) -> None:
        head = pack_head(ChunkHead(CHUNK, len(part), number, offset, self._digest(part)))
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


_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_AGAIN = os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW
_MOST_OPEN = 1024
_ZEROS = bytes(BLOCK_BYTES)


class Landed(NamedTuple):
    """A piece of a file that is there: of which file, from where, and its digest."""

    number: int
    start: int
    digest: bytes


class _Open:
    """A piece that has begun to come."""

    def __init__(self, fd: int, at: int, digest: Digest) -> None:
        self.fd = fd
        self.at = at
        self.digest = digest


def pieces_of(entry: Entry) -> int:
    """Return of how many pieces a file's contents come; an empty file needs none."""
    return -(-entry.size // PIECE_BYTES)


def make_large_and_empty(plan: Plan, dir_fd: int) -> None:
    """Create the files that several workers write together, and those that nobody sends.

    Raises:
        OSError: one cannot be made.
    """
    for entry in plan.files:
        if 0 < entry.size <= PIECE_BYTES:
            continue
        fd = os.open(entry.path, _CREATE, _mode(entry), dir_fd=dir_fd)
        try:
            if entry.size:
                os.ftruncate(fd, entry.size)
            os.utime(fd, ns=(entry.mtime_ns, entry.mtime_ns))
        finally:
            os.close(fd)


class Landing:
    """Takes the chunks of one data connection.

    Args:
        plan: what may come.
        dir_fd: the directory to fill; -1 writes nothing, for a node that has the data already.
        how: how files are hashed.
        same: whether a chunk's digest is what `how` makes of its bytes.
    """

    def __init__(self, plan: Plan, dir_fd: int, how: Hashing, *, same: bool) -> None:
        self._files = plan.files
        self.dir_fd = dir_fd
        self._how = how
        self._same = same
        self._open: dict[tuple[int, int], _Open] = {}
        self._made = bytearray(len(plan.files))

    def check(self, head: ChunkHead) -> None:
        """Refuse a chunk that the plan has no place for.

        Raises:
            StagingError: there is no such file, or no such place in it.
        """
        if head.number >= len(self._files):
            raise StagingError(f"a chunk came for file {head.number}, which is not in the plan")
        entry = self._files[head.number]
        end = head.offset + head.length
        if head.length == 0 or end > entry.size:
            raise StagingError(f"a chunk came for a place that {shown(entry.path)} does not have")
        if head.offset // PIECE_BYTES != (end - 1) // PIECE_BYTES:
            raise StagingError(f"a chunk of {shown(entry.path)} lies in two pieces")

    def take(self, head: ChunkHead, data: Buffer) -> Landed | None:
        """Write a chunk that was checked; returns its piece when that is complete.

        Raises:
            StagingError: it does not follow the one before.
            OSError: it cannot be written.
        """
        entry = self._files[head.number]
        start = head.offset - head.offset % PIECE_BYTES
        end = min(start + PIECE_BYTES, entry.size)
        key = (head.number, start)
        if head.offset == start:
            self._forget(key)
            if head.length == end - start:
                return self._whole(head, entry, data, start)
            if len(self._open) >= _MOST_OPEN:
                raise StagingError(f"chunks of more than {_MOST_OPEN} files came at once")
            self._open[key] = _Open(self._create(head.number, entry), start, self._how.new())
        piece = self._open.get(key)
        if piece is None or piece.at != head.offset:
            raise StagingError(f"chunks of {shown(entry.path)} came out of order")
        self._write(piece.fd, entry, data, head.offset)
        piece.digest.update(data)
        piece.at += head.length
        if piece.at < end:
            return None
        self._finish(piece.fd, entry)
        piece.fd = -1
        del self._open[key]
        return Landed(head.number, start, piece.digest.digest())

    def close(self) -> None:
        """Close what is open."""
        for key in list(self._open):
            self._forget(key)

    def _whole(self, head: ChunkHead, entry: Entry, data: Buffer, start: int) -> Landed:
        fd = self._create(head.number, entry)
        try:
            self._write(fd, entry, data, head.offset)
        except BaseException:
            if fd >= 0:
                os.close(fd)
            raise
        self._finish(fd, entry)
        if self._same:
            return Landed(head.number, start, head.digest)
        digest = self._how.new()
        digest.update(data)
        return Landed(head.number, start, digest.digest())

    def _create(self, number: int, entry: Entry) -> int:
        if self.dir_fd < 0:
            return -1
        if entry.size > PIECE_BYTES or self._made[number]:
            return os.open(entry.path, _AGAIN, dir_fd=self.dir_fd)
        fd = os.open(entry.path, _CREATE, _mode(entry), dir_fd=self.dir_fd)
        self._made[number] = 1
        return fd

    def _write(self, fd: int, entry: Entry, data: Buffer, offset: int) -> None:
        if fd < 0 or (entry.stored < entry.size and data == _ZEROS[: len(data)]):
            return  # a hole stays one
        view = memoryview(data)
        while view:
            count = os.pwrite(fd, view, offset)
            offset += count
            view = view[count:]

    def _finish(self, fd: int, entry: Entry) -> None:
        if fd >= 0:
            try:
                if entry.stored < entry.size:
                    os.ftruncate(fd, entry.size)
                os.utime(fd, ns=(entry.mtime_ns, entry.mtime_ns))
            finally:
                os.close(fd)

    def _forget(self, key: tuple[int, int]) -> None:
        piece = self._open.pop(key, None)
        if piece is not None and piece.fd >= 0:
            with contextlib.suppress(OSError):
                os.close(piece.fd)


def _mode(entry: Entry) -> int:
    return (entry.mode & 0o777) | 0o600
