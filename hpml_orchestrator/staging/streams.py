"""The bytes of an archive: opened once, watched, decompressed and read in order where need be."""

from __future__ import annotations

import bz2
import contextlib
import errno
import gzip
import importlib
import io
import lzma
import os
import shutil
import stat
import subprocess
import zlib
from typing import IO, TYPE_CHECKING, Any, NamedTuple, cast

from hpml_orchestrator.errors import StagingError
from hpml_orchestrator.staging.faults import SourceChangedError, shown, why
from hpml_orchestrator.staging.source import BLOCK_BYTES
from hpml_orchestrator.staging.space import readers_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Self

    from hpml_orchestrator.staging.faults import Retry

__all__ = [
    "ArchiveFile",
    "Stamp",
    "Stream",
    "compression_of",
    "drop_pages",
    "look_at_archive",
]

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
_DAMAGED = (EOFError, zlib.error, lzma.LZMAError, ValueError)


def compression_of(start: bytes) -> str:
    """Return how a file is compressed, by its first bytes; "" where it is not.

    >>> compression_of(b"BZh91AY")
    'bzip2'
    """
    return next((name for magic, name in _MAGIC.items() if start.startswith(magic)), "")


class Stamp(NamedTuple):
    """An archive as it was when it was planned."""

    path: str
    size: int
    mtime_ns: int
    inode: int


def stamp_of(path: str, fd: int) -> Stamp:
    """Return the stamp of an open file."""
    info = os.fstat(fd)
    return Stamp(path, info.st_size, info.st_mtime_ns, info.st_ino)


def open_archive(path: str, retry: Retry) -> int:
    """Open an archive for reading.

    Raises:
        StagingError: it is no regular file.
        OSError: it cannot be opened.
    """
    fd = retry(lambda: os.open(path, _READ))
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise StagingError(f"{shown(path)}: is no regular file")
    return fd


def look_at_archive(path: str, retry: Retry) -> tuple[Stamp, bytes]:
    """Return the stamp of an archive and its first bytes.

    Raises:
        StagingError: it is no regular file.
        OSError: it cannot be opened.
    """
    fd = open_archive(path, retry)
    try:
        return stamp_of(path, fd), retry(lambda: os.pread(fd, 8, 0))
    finally:
        os.close(fd)


def drop_pages(path: str) -> None:
    """Let the pages of a file that a server has leave the memory.

    The node has its own copy of the data then, and the source's pages would push out those of it.
    """
    if readers_for(path) > 1:
        with contextlib.suppress(OSError):
            fd = os.open(path, _READ)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


class Stream:
    """The decompressed bytes of an archive, from front to back.

    Besides, it is a file that `tarfile` reads headers from, going forward.

    Args:
        stamp: the archive, as it has to be.
        retry: calls again after faults that pass.

    Raises:
        StagingError: its compression is not known, or needs a program that is not there.
        SourceChangedError: it is not what the stamp says.
        OSError: it cannot be opened.
    """

    def __init__(self, stamp: Stamp, retry: Retry) -> None:
        self._path = stamp.path
        self._retry = retry
        self._raw = ArchiveFile(stamp, retry)
        self._stream: Any = None
        self._data = b""
        self._start = self.end = self._at = 0
        try:
            start = os.pread(self._raw.fileno(), 8, 0)
            self._stream = self._opened(compression_of(start))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _opened(self, kind: str) -> Any:
        if kind == "zstd":
            return _zstd(self._path, self._raw)
        if kind in {"lz4", "compress"}:
            raise StagingError(
                f"{shown(self._path)}: is compressed with {kind}, which is not read here",
                hint="repack it, best as tar.zst or plain tar",
            )
        raw = io.BufferedReader(self._raw, BLOCK_BYTES)
        if kind == "gzip":
            return gzip.GzipFile(fileobj=cast("IO[bytes]", raw))
        if kind == "bzip2":
            return bz2.BZ2File(raw)
        return lzma.LZMAFile(raw) if kind == "xz" else raw

    def seek(self, offset: int) -> int:
        """Read on from an offset, not more than a byte before what was read last."""
        self._at = offset
        return offset

    def tell(self) -> int:
        """Return the offset that is read next."""
        return self._at

    def read(self, count: int) -> bytes:
        """Return so many bytes; fewer where the archive ends."""
        data = b"".join([bytes(piece) for piece in self.pieces(self._at, self._at + count)])
        self._at += len(data)
        return data

    def pieces(self, start: int, stop: int) -> Iterator[memoryview]:
        """Yield the bytes [start, stop), fewer at the end of the stream.

        Raises:
            ValueError: start is before what is still known.
            SourceChangedError: the archive is not what it was.
            StagingError: it is damaged.
        """
        if start < self._start:
            raise ValueError(start)
        while start < stop:
            if start < self.end:
                until = min(stop, self.end)
                yield memoryview(self._data)[start - self._start : until - self._start]
                start = until
            elif not self._more():
                return

    def drain(self) -> None:
        """Read to the end, so that the checksums of the compression are compared.

        Raises:
            SourceChangedError: the archive is not what it was.
            StagingError: it is damaged.
        """
        while self._more():
            pass

    def _more(self) -> bool:
        self._retry.check_stop()
        try:
            data = self._stream.read(BLOCK_BYTES)
        except _DAMAGED as error:
            raise StagingError(
                f"{shown(self._path)}: not a whole archive: {why(error)}",
                hint="the archive is cut short or damaged: make or copy it again",
            ) from error
        except OSError as error:  # gzip and bz2 report damage so
            raise StagingError(f"cannot read {shown(self._path)}: {why(error)}") from error
        self._raw.check()
        if not data:
            return False
        kept = self._data[-1:]  # tarfile goes back by a byte
        self._start, self._data = self.end - len(kept), kept + data
        self.end += len(data)
        return True

    def close(self) -> None:
        """Close the archive; may be called again."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        self._raw.close()


class ArchiveFile(io.RawIOBase):
    """A file that is read with retries, and has to stay what it was.

    Args:
        stamp: what it has to be.
        retry: calls again after faults that pass, and says when to stop.

    Raises:
        StagingError: it is no regular file.
        SourceChangedError: it is another.
        OSError: it cannot be opened.
    """

    def __init__(self, stamp: Stamp, retry: Retry) -> None:
        super().__init__()
        self._stamp = stamp
        self._retry = retry
        self._at = 0
        self._fd = open_archive(stamp.path, retry)
        self.check()

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._fd

    def readable(self) -> bool:
        """Say yes."""
        return True

    def seekable(self) -> bool:
        """Say yes."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Read on from an offset."""
        begin = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._stamp.size}[whence]
        if begin + offset < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        self._at = begin + offset
        return self._at

    def tell(self) -> int:
        """Return the offset that is read next."""
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Read, and look whether the file is what it was.

        Raises:
            SourceChangedError: it is not.
        """
        self._retry.check_stop()
        count = self._retry(lambda: os.preadv(self._fd, [buffer], self._at))
        self.check()
        self._at += count
        return count

    def check(self) -> None:
        """Compare the open file with what it has to be.

        Raises:
            SourceChangedError: it is another.
        """
        if stamp_of(self._stamp.path, self._fd) != self._stamp:
            raise SourceChangedError

    def close(self) -> None:
        """Close the file; may be called again."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        super().close()


def _zstd(path: str, file: ArchiveFile) -> Any:
    """Return a reader of zstd: the program, which works beside this process, or a module."""
    program = shutil.which("zstd")
    if program is not None:
        return _Program([program, "-dcq", f"--long={_LARGEST_WINDOW_LOG}"], file.fileno())
    raw = io.BufferedReader(file, BLOCK_BYTES)
    with contextlib.suppress(ImportError):
        module = importlib.import_module("compression.zstd")
        window = {module.DecompressionParameter.window_log_max: _LARGEST_WINDOW_LOG}
        return module.ZstdFile(raw, options=window)
    with contextlib.suppress(ImportError):
        module = importlib.import_module("zstandard")
        zstd = module.ZstdDecompressor(max_window_size=1 << _LARGEST_WINDOW_LOG)
        return zstd.stream_reader(raw, read_across_frames=True)
    raise StagingError(
        f"{shown(path)}: nothing here can decompress zstd",
        hint="install the program zstd on the nodes (package zstd), or the Python module zstandard",
    )


class _Program:
    """A program that decompresses its standard input."""

    def __init__(self, words: list[str], fd: int) -> None:
        os.lseek(fd, 0, os.SEEK_SET)
        self._name = os.path.basename(words[0])
        self._process = subprocess.Popen(
            words, stdin=fd, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    def read(self, count: int) -> bytes:
        """Return up to count bytes; at the end, see whether the program is content.

        Raises:
            EOFError: it is not; says what it said.
        """
        assert self._process.stdout is not None  # noqa: S101 - given above
        assert self._process.stderr is not None  # noqa: S101
        data = self._process.stdout.read(count)
        if not data:
            said = self._process.stderr.read().decode("utf-8", "replace").strip()
            status = self._process.wait()
            if status:
                raise EOFError(said.rpartition("\n")[2] or f"{self._name} ended with {status}")
        return data

    def close(self) -> None:
        """End it; what it still had to say is lost."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()
