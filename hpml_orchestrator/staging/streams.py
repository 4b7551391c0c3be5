"""The bytes of an archive: a file that must not change while it is read, decompressed if needed."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import lzma
import os
import shutil
import stat
import subprocess
import zlib
from typing import IO, TYPE_CHECKING, NamedTuple, cast

from hpml_orchestrator.errors import StagingError
from hpml_orchestrator.staging.faults import SourceChangedError, shown
from hpml_orchestrator.staging.source import BLOCK_BYTES
from hpml_orchestrator.staging.space import readers_for

if TYPE_CHECKING:
    from hpml_orchestrator.staging.faults import Retry

DAMAGED = (EOFError, zlib.error, lzma.LZMAError, ValueError, gzip.BadGzipFile)
"""What the decompressors raise; bz2 raises a plain OSError without an errno."""

_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
_MAGIC = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\0": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x04\x22\x4d\x18": "lz4",
    b"\x1f\x9d": "compress",
}
_LARGEST_WINDOW_LOG = 31  # `zstd --long=31`: 2 GiB


def compression_of(start: bytes) -> str:
    """Return how a file is compressed, by its first bytes; "" if it is not.

    >>> compression_of(b"BZh91AY")
    'bzip2'
    """
    return next((name for magic, name in _MAGIC.items() if start.startswith(magic)), "")


def not_whole(path: str, kind: str, reason: str) -> StagingError:
    """Return the error for an archive that is cut short or damaged."""
    return StagingError(
        f"{shown(path)}: not a whole {kind} archive: {reason}",
        hint="the archive is cut short or damaged: make or copy it again",
    )


class Stamp(NamedTuple):
    """An archive as it was when it was planned."""

    path: str
    size: int
    mtime_ns: int
    inode: int
    ctime_ns: int  # not compared while reading: also a new hard link changes it


class ArchiveFile(io.FileIO):
    """A file that is read with retries and must not change.

    Args:
        path: of the file.
        retry: calls again after faults that pass, and has the condition to stop.
        stamp: what it has to be; as it is now if left out.

    Raises:
        StagingError: it is not a regular file.
        SourceChangedError: it has changed since the stamp.
        OSError: it cannot be opened.
    """

    def __init__(self, path: str, retry: Retry, stamp: Stamp | None = None) -> None:
        super().__init__(retry(lambda: os.open(path, _READ)), "rb")
        try:
            if not stat.S_ISREG(os.fstat(self.fileno()).st_mode):
                raise StagingError(f"{shown(path)}: is not a regular file")
            self._retry = retry
            self.stamp = stamp or self._stamp_now(path)
            self.check()
        except BaseException:
            self.close()
            raise

    def _stamp_now(self, path: str) -> Stamp:
        info = os.fstat(self.fileno())
        return Stamp(path, info.st_size, info.st_mtime_ns, info.st_ino, info.st_ctime_ns)

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Read, then check that the file has not changed.

        Raises:
            SourceChangedError: it has changed.
        """
        self._retry.check_stop()
        # Compare after each read: a file that is rewritten would give a mix of two archives.
        count = self._retry(lambda: os.readv(self.fileno(), [buffer]))
        self.check()
        return count

    def check(self) -> None:
        """Compare the open file with its stamp.

        Raises:
            SourceChangedError: it has changed.
        """
        if self._stamp_now(self.stamp.path)[:-1] != self.stamp[:-1]:
            raise SourceChangedError


def look_at_archive(path: str, retry: Retry) -> tuple[Stamp, bytes]:
    """Return the stamp of an archive and its first bytes; raises what `ArchiveFile` does."""
    with ArchiveFile(path, retry) as file:
        return file.stamp, retry(lambda: os.pread(file.fileno(), 8, 0))


def drop_pages(path: str) -> None:
    """Drop the pages of a file on a server from the page cache.

    The node has a copy of its own by then, and the source's pages would push out those of the copy.
    """
    if readers_for(path) > 1:
        with contextlib.suppress(OSError):
            fd = os.open(path, _READ)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def decompressed(file: ArchiveFile, raw: IO[bytes]) -> IO[bytes]:
    """Return a stream of the decompressed contents; seeking back restarts it, or is impossible.

    Args:
        file: the open file.
        raw: the same, buffered; the caller closes it.

    Raises:
        StagingError: its compression is unknown, or needs a program that is not installed.
    """
    kind = compression_of(os.pread(file.fileno(), 8, 0))
    opened: object = None
    if kind == "gzip":
        opened = gzip.GzipFile(fileobj=raw)
    elif kind == "bzip2":
        opened = bz2.BZ2File(raw)
    elif kind == "xz":
        opened = lzma.LZMAFile(raw)  # noqa: SIM115 - the caller closes it
    elif kind == "zstd":
        opened = _zstd(file)
    else:
        raise StagingError(
            f"{shown(file.stamp.path)}: is compressed with {kind}, which is not supported",
            hint="repack it, best as tar.zst or plain tar",
        )
    return cast("IO[bytes]", opened)


def _zstd(file: ArchiveFile) -> _Program:
    program = shutil.which("zstd")
    if program is None:
        raise StagingError(
            f"{shown(file.stamp.path)}: nothing here can decompress zstd",
            hint="install the program zstd on the nodes (package zstd)",
        )
    return _Program([program, "-dcq", f"--long={_LARGEST_WINDOW_LOG}"], file)


class _Program:
    """The output of a program that decompresses a file; it is read from front to back."""

    def __init__(self, words: list[str], file: ArchiveFile) -> None:
        self._name = os.path.basename(words[0])
        self._file = file
        self._at = 0
        self._process = subprocess.Popen(
            words, stdin=file.fileno(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    def read(self, count: int) -> bytes:
        """Return so many bytes, fewer at the end; EOFError has the message of a failure."""
        assert self._process.stdout is not None  # noqa: S101 - given above
        assert self._process.stderr is not None  # noqa: S101
        self._file.check()
        # A short read is the end of the output. Only then does the exit status tell a complete
        # archive from one that was cut.
        data = self._process.stdout.read(count)
        self._at += len(data)
        if len(data) < count:
            said = self._process.stderr.read().decode("utf-8", "replace").strip()
            status = self._process.wait()
            if status:
                raise EOFError(said.rpartition("\n")[2] or f"{self._name} ended with {status}")
        return data

    def tell(self) -> int:
        """Return the offset that is read next."""
        return self._at

    def seek(self, offset: int) -> int:
        """Read until an offset, which must not be read already."""
        if offset < self._at:
            raise ValueError("cannot go back")
        while self._at < offset and self.read(min(BLOCK_BYTES, offset - self._at)):
            pass
        return self._at

    def close(self) -> None:
        """End it; the rest of its output is lost."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()
