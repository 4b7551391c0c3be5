"""File contents in a chain: the end that sends them, and the end that writes.

A message is a sequence of chunks: file number, offset, length, bytes. Chunks of a file come in
order; offset 0 starts the file again (a read that was repeated).
"""

from __future__ import annotations

import os
import struct
import threading
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import StagingError
from hpml_orchestrator.staging.copy import CREATE
from hpml_orchestrator.staging.faults import FULL, NO_ROOM_LEFT, shown, why
from hpml_orchestrator.staging.link import DATA
from hpml_orchestrator.staging.source import BLOCK_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hpml_orchestrator.staging.hashing import Buffer, Digest, Hashing
    from hpml_orchestrator.staging.plan import CopyPlan, TreeEntry
    from hpml_orchestrator.staging.source import Source, SourceReader

_HEAD = struct.Struct(">QQI")
_GATHERED_BYTES = 256 << 10  # small files share a message
_AGAIN = os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW
_MOST_OPEN = 1024
_ZEROS = bytes(BLOCK_BYTES)


class SendingSource:
    """A `Source` and its only `SourceReader` that sends everything it reads.

    Args:
        source: is read.
        send: sends a message; called by several threads, one at a time.
    """

    def __init__(self, source: Source, send: Callable[[Buffer], object]) -> None:
        self._source = source
        self._send = send
        self._gathered = bytearray(DATA)
        self._lock = threading.Lock()
        self.kind = source.kind
        self.ordered = source.ordered
        self.plan = source.plan

    def reader(self, plan: CopyPlan) -> SourceReader:
        """Open for reading."""
        self._reader = self._source.reader(plan)
        return self

    def read(self, number: int) -> Iterator[Buffer]:
        """Yield the bytes of a file, after they were sent."""
        at = 0
        for data in self._reader.read(number):
            if len(data):
                # One lock around both steps: chunks of one file must leave in order, and many small
                # files share a message, so that a file does not cost a message of its own.
                with self._lock:
                    self._gathered += _HEAD.pack(number, at, len(data)) + data
                    if len(self._gathered) >= _GATHERED_BYTES:
                        self.flush()
            at += len(data)
            yield data

    def flush(self) -> None:
        """Send the gathered chunks."""
        message, self._gathered = self._gathered, bytearray(DATA)
        if len(message) > len(DATA):
            self._send(message)

    def close(self) -> None:
        """Close the reader; the source stays open."""
        self._reader.close()


class _OpenFile:
    """A file of which some chunks have arrived."""

    def __init__(self, fd: int, digest: Digest) -> None:
        self.fd = fd
        self.at = 0
        self.digest = digest


class ChunkWriter:
    """Writes chunks as they arrive.

    Args:
        plan: the expected files.
        dir_fd: the directory to fill; -1 writes nothing, for a node that has the data already.
        how: the hash of the files.

    Attributes:
        digests: of the complete files, by number.
        bytes: how many have arrived.
    """

    def __init__(self, plan: CopyPlan, dir_fd: int, how: Hashing) -> None:
        self._files = plan.files
        self._dir_fd = dir_fd
        self._how = how
        self._open: dict[int, _OpenFile] = {}
        self._made: set[int] = set()
        self.digests: dict[int, bytes] = {}
        self.bytes = 0
        for number, entry in enumerate(plan.files):
            if not entry.size:  # no chunk will come for it
                self._open[number] = _OpenFile(self._create(number, entry), how.new())
                self._finish(number, entry)

    def take(self, message: memoryview) -> None:
        """Write the chunks of a message.

        Raises:
            StagingError: one has no place or does not follow the one before, or cannot be written.
        """
        while message:
            if len(message) < _HEAD.size:
                raise StagingError("a chunk that came over the network is damaged")
            number, offset, length = _HEAD.unpack(message[: _HEAD.size])
            end = _HEAD.size + length
            data, message = message[_HEAD.size : end], message[end:]
            if number >= len(self._files) or not length or len(data) < length:
                raise StagingError("a chunk that came over the network is damaged")
            entry = self._files[number]
            try:
                self._chunk(number, entry, offset, data)
            except OSError as error:
                raise StagingError(
                    f"cannot write {shown(entry.path)}: {why(error)}",
                    hint=NO_ROOM_LEFT if error.errno in FULL else "",
                ) from error

    def _chunk(self, number: int, entry: TreeEntry, offset: int, data: memoryview) -> None:
        # The reader repeats a file from the start after a passing read error, so offset 0 discards
        # the chunks that came before.
        if offset == 0:
            self._forget(number)
            if len(self._open) >= _MOST_OPEN:
                raise StagingError(f"chunks of more than {_MOST_OPEN} files came at once")
            self._open[number] = _OpenFile(self._create(number, entry), self._how.new())
        file = self._open.get(number)
        if file is None or file.at != offset or offset + len(data) > entry.size:
            raise StagingError(f"chunks of {shown(entry.path)} came out of order")
        # The sender reads holes as zeros. Skipping the write keeps them holes, which the check
        # of free space relied on; `stored` says whether the source has any.
        if file.fd >= 0 and (entry.stored == entry.size or data != _ZEROS[: len(data)]):
            at, view = offset, data
            while view:
                count = os.pwrite(file.fd, view, at)
                at, view = at + count, view[count:]
        file.digest.update(data)
        file.at += len(data)
        self.bytes += len(data)
        if file.at == entry.size:
            self._finish(number, entry)

    def _create(self, number: int, entry: TreeEntry) -> int:
        if self._dir_fd < 0:
            return -1
        # O_EXCL the first time, so that nothing planted in the directory is written through. A
        # repeated file exists already, made by this writer.
        flags = _AGAIN if number in self._made else CREATE
        self._made.add(number)
        return os.open(entry.path, flags, (entry.mode & 0o777) | 0o600, dir_fd=self._dir_fd)

    def _finish(self, number: int, entry: TreeEntry) -> None:
        file = self._open[number]
        if file.fd >= 0:
            # A hole at the end was never written, so the file does not have its size yet.
            os.ftruncate(file.fd, entry.size)
            os.utime(file.fd, ns=(entry.mtime_ns, entry.mtime_ns))
        self.digests[number] = file.digest.digest()
        self._forget(number)

    def _forget(self, number: int) -> None:
        file = self._open.pop(number, None)
        if file is not None and file.fd >= 0:
            os.close(file.fd)
