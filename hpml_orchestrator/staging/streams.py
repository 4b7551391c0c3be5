"""The bytes of a compressed archive: opened once, watched, decompressed, read in order."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import importlib
import io
import lzma
import os
import shutil
import subprocess
import zlib
from typing import IO, TYPE_CHECKING, Any, cast

from hpml_orchestrator.errors import StagingError
from hpml_orchestrator.staging.capacity import readers_for
from hpml_orchestrator.staging.extents import Blocks, Stamp, open_archive, stamp_of
from hpml_orchestrator.staging.faults import SourceChangedError, shown, why
from hpml_orchestrator.staging.source import BLOCK_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Self

    from hpml_orchestrator.staging.faults import Retry

__all__ = ["FileBytes", "Stream", "compression_of"]

_MAGIC = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\0": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x04\x22\x4d\x18": "lz4",
    b"\x1f\x9d": "compress",
}
_NEAR_BYTES = 1 << 13
_SERVED_NEAR_BYTES = 1 << 17
_HEADER_BYTES = 512
_LARGEST_WINDOW_LOG = 31  # `zstd --long=31`: 2 GiB
_DAMAGED = (EOFError, zlib.error, lzma.LZMAError, ValueError)


def compression_of(start: bytes) -> str:
    """Return how a file is compressed, by its first bytes; "" where it is not.

    >>> compression_of(b"BZh91AY")
    'bzip2'
    """
    return next((name for magic, name in _MAGIC.items() if start.startswith(magic)), "")


class FileBytes:
    """The bytes of a plain archive, for `scan_members`.

    Headers are read one by one, or all data between them too where that takes less time: where
    they are near each other, the more where each read waits for a server.
    """

    def __init__(self, stamp: Stamp, retry: Retry) -> None:
        self._size = stamp.size
        self._near = _SERVED_NEAR_BYTES if readers_for(stamp.path) > 1 else _NEAR_BYTES
        self._retry = retry
        self._blocks = Blocks([stamp], retry)

    def at(self, offset: int, count: int) -> bytes:
        """Return so many bytes at an offset; fewer where the archive ends."""
        blocks = self._blocks
        if offset < blocks.start or offset + count > blocks.end:
            count = min(count, self._size - offset)
            if count <= 0:
                return b""
            self._retry.check_stop()
            if offset - blocks.end < self._near:
                blocks.fill(0, offset)
            else:
                blocks.fill(0, offset, _HEADER_BYTES)
            if offset + count > blocks.end:
                return blocks.exactly(0, offset, count)
        at = offset - blocks.start
        return bytes(blocks.view[at : at + count])

    def reaches(self, offset: int) -> bool:
        """Say whether the archive has so many bytes."""
        return offset <= self._size

    def close(self) -> None:
        """Close the archive."""
        self._blocks.close()


class Stream:
    """The decompressed bytes of an archive, from front to back.

    Args:
        path: the archive.
        retry: calls again after faults that pass.
        stamp: what the archive has to be; None: whatever it is now.

    Raises:
        StagingError: its compression is not known, or needs a program that is not there.
        SourceChangedError: it is not what the stamp says.
        OSError: it cannot be opened.
    """

    def __init__(self, path: str, retry: Retry, stamp: Stamp | None = None) -> None:
        self._path = path
        self._retry = retry
        self._fd = open_archive(path, retry)
        self._stream: Any = None
        try:
            self.stamp = stamp or stamp_of(path, self._fd)
            self._check_same()
            self._stream = self._opened(compression_of(os.pread(self._fd, 8, 0)))
        except BaseException:
            self.close()
            raise
        self._data = b""
        self._start = self.end = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _opened(self, kind: str) -> Any:
        if kind == "zstd":
            return _zstd(self._path, self._fd, self._retry)
        if kind in {"lz4", "compress"}:
            raise StagingError(
                f"{shown(self._path)}: is compressed with {kind}, which is not read here",
                hint="repack it, best as tar.zst or plain tar",
            )
        raw = io.BufferedReader(_Raw(self._fd, self._retry), BLOCK_BYTES)
        if kind == "gzip":
            return gzip.GzipFile(fileobj=cast("IO[bytes]", raw))
        if kind == "bzip2":
            return bz2.BZ2File(raw)
        return lzma.LZMAFile(raw) if kind == "xz" else raw

    def at(self, offset: int, count: int) -> bytes:
        """Return so many bytes at an offset, not before the last one; fewer at the end."""
        return b"".join([bytes(piece) for piece in self.pieces(offset, offset + count)])

    def reaches(self, offset: int) -> bool:
        """Say whether there are so many bytes; goes on to there."""
        while self.end < offset:
            if not self._more():
                return False
        return True

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
        self._check_same()
        if not data:
            return False
        self._start, self._data = self.end, data
        self.end += len(data)
        return True

    def _check_same(self) -> None:
        if stamp_of(self._path, self._fd) != self.stamp:
            raise SourceChangedError

    def close(self) -> None:
        """Close the archive; may be called again."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class _Raw(io.RawIOBase):
    """A file that is read with retries."""

    def __init__(self, fd: int, retry: Retry) -> None:
        super().__init__()
        self._fd = fd
        self._retry = retry
        self._at = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        count = self._retry(lambda: os.preadv(self._fd, [buffer], self._at))
        self._at += count
        return count


def _zstd(path: str, fd: int, retry: Retry) -> Any:
    """Return a reader of zstd: the program, which works beside this process, or a module."""
    program = shutil.which("zstd")
    if program is not None:
        return _Program([program, "-dcq", f"--long={_LARGEST_WINDOW_LOG}"], fd)
    raw = io.BufferedReader(_Raw(fd, retry), BLOCK_BYTES)
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
