"""Files on a data connection: the end that sends them, the one that passes them on and writes.

A message is a row of chunks, each of a file: its number, the offset, the length, the bytes. The
chunks of a file come in order on one connection; one that begins the file again takes back what
came of it before (a read that was tried again). An empty message is the end.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
import time
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import StagingError
from hpml_orchestrator.staging.copy import CREATE
from hpml_orchestrator.staging.faults import FULL, shown, why
from hpml_orchestrator.staging.link import lost
from hpml_orchestrator.staging.source import BLOCK_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection

    from hpml_orchestrator.staging.hashing import Buffer, Digest, Hashing
    from hpml_orchestrator.staging.plan import Entry, Plan
    from hpml_orchestrator.staging.source import Reader, Source

__all__ = ["ChainLostError", "Landing", "Sender", "SendingSource", "make_empty"]

_HEAD = struct.Struct(">QQI")
_GATHERED_BYTES = 256 << 10  # small files go together: one message for many
MOST_BYTES = _GATHERED_BYTES + BLOCK_BYTES + 2 * _HEAD.size
_AGAIN = os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW
_MOST_OPEN = 1024
_ZEROS = bytes(BLOCK_BYTES)
_TOLD_EVERY_SECONDS = 0.2


class ChainLostError(StagingError):
    """A data connection broke; the neighbour may say why."""


class Sender:
    """Sends chunks to the next node; one per worker, safe from several of its threads.

    Args:
        connect: opens the data connection; called for the first chunk.
        peer: what to call the next node in errors.
        timeout: seconds after which a node that takes nothing counts as hung.
    """

    def __init__(self, connect: Callable[[], Connection], peer: str, timeout: float) -> None:
        self._connect = connect
        self._peer = peer
        self._timeout = timeout
        self._connection: Connection | None = None
        self._gathered = bytearray()
        self._lock = threading.Lock()

    def send(self, number: int, offset: int, data: Buffer) -> None:
        """Send at most BLOCK_BYTES of a file.

        Raises:
            ChainLostError: the next node is gone or hangs.
        """
        with self._lock:
            self._gathered += _HEAD.pack(number, offset, len(data)) + data
            if len(self._gathered) >= _GATHERED_BYTES:
                self._flush()

    def _flush(self) -> None:
        try:
            if self._connection is None:
                self._connection = self._connect()
            self._connection.send_bytes(self._gathered)
        except OSError as error:
            raise ChainLostError(lost(self._peer, self._timeout, error)) from error
        self._gathered = bytearray()

    def close(self) -> None:
        """Send what was gathered and the end, if anything was sent at all.

        Raises:
            ChainLostError: the next node is gone or hangs.
        """
        with self._lock:
            if self._gathered:
                self._flush()
            if self._connection is not None:
                self._flush()
                self._connection.close()
                self._connection = None


class SendingSource:
    """A `Source` whose readers send on whatever they read; each worker has one `Reader`."""

    def __init__(self, source: Source, sender: Callable[[], Sender]) -> None:
        self._source = source
        self._new_sender = sender
        self.kind = source.kind
        self.ordered = source.ordered
        self.plan = source.plan

    def reader(self, plan: Plan) -> Reader:
        """Open for reading and sending."""
        self._reader, self._sender = self._source.reader(plan), self._new_sender()
        return self

    def read(self, number: int) -> Iterator[Buffer]:
        """Yield the bytes of a file; they are on their way by then."""
        at = 0
        for buffer in self._reader.read(number):
            if len(buffer):
                self._sender.send(number, at, buffer)
            at += len(buffer)
            yield buffer

    def close(self) -> None:
        """Close the reader; the source stays open."""
        with contextlib.closing(self._reader):
            self._sender.close()


def make_empty(plan: Plan, dir_fd: int) -> None:
    """Create the files that nobody sends, because they are empty.

    Raises:
        OSError: one cannot be made.
    """
    for entry in plan.files:
        if not entry.size:
            fd = os.open(entry.path, CREATE, _mode(entry), dir_fd=dir_fd)
            try:
                os.utime(fd, ns=(entry.mtime_ns, entry.mtime_ns))
            finally:
                os.close(fd)


class _Open:
    """A file that has begun to come."""

    def __init__(self, fd: int, digest: Digest) -> None:
        self.fd = fd
        self.at = 0
        self.digest = digest


class Landing:
    """What one process does with a data connection: pass chunks on, and write them.

    Args:
        plan: what may come.
        dir_fd: the directory to fill; -1 writes nothing, for a node that has the data already.
        how: how files are hashed.
    """

    def __init__(self, plan: Plan, dir_fd: int, how: Hashing) -> None:
        self._files = plan.files
        self.dir_fd = dir_fd
        self._how = how
        self._open: dict[int, _Open] = {}
        self._made = bytearray(len(plan.files))
        self._landed: list[tuple[int, bytes]] = []  # since it was told
        self._bytes = 0

    def relay(
        self,
        connection: Connection,
        onward: Callable[[], Connection] | None,
        names: tuple[str, str],
        timeout: float,
        tell: Callable[..., None],
    ) -> None:
        """Work until the end of the stream.

        Args:
            connection: to the node before.
            onward: opens the one to the node after; None on the last node.
            names: of the nodes before and after, for errors.
            timeout: seconds after which a node that takes or sends nothing counts as hung.
            tell: called a few times a second with the files that landed, the bytes that came, and
                at last perhaps why a neighbour was lost.

        Raises:
            StagingError: a chunk has no place, or a file cannot be written.
        """
        told_at = time.monotonic()
        following: Connection | None = None
        data = b"?"
        while data:
            try:
                peer = names[0]
                data = connection.recv_bytes(MOST_BYTES)
                if onward is not None:
                    peer = names[1]
                    following = following or onward()
                    following.send_bytes(data)
            except (OSError, EOFError) as error:
                tell([], 0, lost(peer, timeout, error))
                return
            self.take(data)
            if not data or time.monotonic() - told_at >= _TOLD_EVERY_SECONDS:
                tell(self._landed, self._bytes, "")
                self._landed, self._bytes, told_at = [], 0, time.monotonic()

    def take(self, message: bytes) -> None:
        """Write the chunks of a message.

        Raises:
            StagingError: one has no place or does not follow the one before, or cannot be written.
        """
        view = memoryview(message)
        while view:
            head, view = view[: _HEAD.size], view[_HEAD.size :]
            number, offset, length = _HEAD.unpack(head) if len(head) == _HEAD.size else (0, 0, 0)
            data, view = view[:length], view[length:]
            if number >= len(self._files) or not length or len(data) < length:
                raise StagingError("a chunk that came over the network is damaged")
            entry = self._files[number]
            try:
                self._chunk(number, entry, offset, data)
            except OSError as error:
                hint = "something else took the room that was free before; choose another target"
                raise StagingError(
                    f"cannot write {shown(entry.path)}: {why(error)}",
                    hint=hint if error.errno in FULL else "",
                ) from error

    def _chunk(self, number: int, entry: Entry, offset: int, data: Buffer) -> None:
        if offset == 0:
            self._forget(number)
            if len(self._open) >= _MOST_OPEN:
                raise StagingError(f"chunks of more than {_MOST_OPEN} files came at once")
            self._open[number] = _Open(self._create(number, entry), self._how.new())
        file = self._open.get(number)
        if file is None or file.at != offset or offset + len(data) > entry.size:
            raise StagingError(f"chunks of {shown(entry.path)} came out of order")
        # what is a hole in the source stays one
        if file.fd >= 0 and (entry.stored == entry.size or data != _ZEROS[: len(data)]):
            at, view = offset, memoryview(data)
            while view:
                count = os.pwrite(file.fd, view, at)
                at, view = at + count, view[count:]
        file.digest.update(data)
        file.at += len(data)
        self._bytes += len(data)
        if file.at == entry.size:
            if file.fd >= 0:
                os.ftruncate(file.fd, entry.size)
                os.utime(file.fd, ns=(entry.mtime_ns, entry.mtime_ns))
            self._landed.append((number, file.digest.digest()))
            self._forget(number)

    def _create(self, number: int, entry: Entry) -> int:
        if self.dir_fd < 0:
            return -1
        flags = _AGAIN if self._made[number] else CREATE
        fd = os.open(entry.path, flags, _mode(entry), dir_fd=self.dir_fd)
        self._made[number] = 1
        return fd

    def _forget(self, number: int) -> None:
        file = self._open.pop(number, None)
        if file is not None and file.fd >= 0:
            os.close(file.fd)


def _mode(entry: Entry) -> int:
    return (entry.mode & 0o777) | 0o600
