"""Files in chunks on a data connection, each with its digest, and the end that sends them.

    chunk   kind u8, length u32, number of the file u64, offset u64, digest of the payload
            16 bytes, CRC-32 of the head so far u32, payload

The chunks of a file come in order on one connection; one that begins the file again takes back
what came of it before (a read that was tried again).
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
from hpml_orchestrator.staging.copy import CREATE
from hpml_orchestrator.staging.faults import shown
from hpml_orchestrator.staging.hashing import DIGEST_BYTES, Hashing, hashing_named
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
    "make_empty",
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
            part = view[:BLOCK_BYTES]
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

    def read(self, number: int) -> Iterator[Buffer]:
        """Yield the bytes of a file; they are on their way by then."""
        at = 0
        for buffer in self._reader.read(number):
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
        self.kind = source.kind
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


_AGAIN = os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW
_MOST_OPEN = 1024
_ZEROS = bytes(BLOCK_BYTES)


class Landed(NamedTuple):
    """A file that is there, and its digest."""

    number: int
    digest: bytes


class _Open:
    """A file that has begun to come."""

    def __init__(self, fd: int, digest: Digest) -> None:
        self.fd = fd
        self.at = 0
        self.digest = digest


def make_empty(plan: Plan, dir_fd: int) -> None:
    """Create the files that nobody sends, because they are empty.

    Raises:
        OSError: one cannot be made.
    """
    for entry in plan.files:
        if entry.size:
            continue
        fd = os.open(entry.path, CREATE, _mode(entry), dir_fd=dir_fd)
        try:
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
        self._open: dict[int, _Open] = {}
        self._made = bytearray(len(plan.files))

    def check(self, head: ChunkHead) -> None:
        """Refuse a chunk that the plan has no place for.

        Raises:
            StagingError: there is no such file, or no such place in it.
        """
        if head.number >= len(self._files):
            raise StagingError(f"a chunk came for file {head.number}, which is not in the plan")
        entry = self._files[head.number]
        if head.length == 0 or head.offset + head.length > entry.size:
            raise StagingError(f"a chunk came for a place that {shown(entry.path)} does not have")

    def take(self, head: ChunkHead, data: Buffer) -> Landed | None:
        """Write a chunk that was checked; returns its file when that is complete.

        Raises:
            StagingError: it does not follow the one before.
            OSError: it cannot be written.
        """
        number, entry = head.number, self._files[head.number]
        if head.offset == 0:
            self._forget(number)
            if head.length == entry.size:
                return self._whole(head, entry, data)
            if len(self._open) >= _MOST_OPEN:
                raise StagingError(f"chunks of more than {_MOST_OPEN} files came at once")
            self._open[number] = _Open(self._create(number, entry), self._how.new())
        file = self._open.get(number)
        if file is None or file.at != head.offset:
            raise StagingError(f"chunks of {shown(entry.path)} came out of order")
        self._write(file.fd, entry, data, head.offset)
        file.digest.update(data)
        file.at += head.length
        if file.at < entry.size:
            return None
        self._finish(file.fd, entry)
        file.fd = -1
        del self._open[number]
        return Landed(number, file.digest.digest())

    def close(self) -> None:
        """Close what is open."""
        for number in list(self._open):
            self._forget(number)

    def _whole(self, head: ChunkHead, entry: Entry, data: Buffer) -> Landed:
        fd = self._create(head.number, entry)
        try:
            self._write(fd, entry, data, head.offset)
        except BaseException:
            if fd >= 0:
                os.close(fd)
            raise
        self._finish(fd, entry)
        if self._same:
            return Landed(head.number, head.digest)
        digest = self._how.new()
        digest.update(data)
        return Landed(head.number, digest.digest())

    def _create(self, number: int, entry: Entry) -> int:
        if self.dir_fd < 0:
            return -1
        if self._made[number]:
            return os.open(entry.path, _AGAIN, dir_fd=self.dir_fd)
        fd = os.open(entry.path, CREATE, _mode(entry), dir_fd=self.dir_fd)
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

    def _forget(self, number: int) -> None:
        file = self._open.pop(number, None)
        if file is not None and file.fd >= 0:
            with contextlib.suppress(OSError):
                os.close(file.fd)


def _mode(entry: Entry) -> int:
    return (entry.mode & 0o777) | 0o600
