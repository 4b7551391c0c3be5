"""The bytes of a tar archive: opened once, watched, decompressed, read in order."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import stat
from typing import IO, TYPE_CHECKING, cast

from hpml_orchestrator.errors import StagingError
from hpml_orchestrator.staging.faults import shown

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from hpml_orchestrator.staging.faults import Retry

__all__ = ["ArchiveStream"]

_BUFFER_BYTES = 1 << 20
_LARGEST_READ_BYTES = 64 << 20  # headers are small: a larger one is an attempt to eat memory
_BLOCK_BYTES = 512


class ArchiveStream:
    """What tarfile reads from: retries, stops when told to, and remembers the last block.

    Use as a context manager; leaving it without an error checks that the source did not change.
    """

    def __init__(self, path: str, retry: Retry) -> None:
        self._path = path
        self._raw = _Source(path, retry)
        self._last = b""
        buffered = io.BufferedReader(self._raw, _BUFFER_BYTES)
        magic = buffered.peek(6)[:6]
        stream: object = buffered
        if magic.startswith(b"\x1f\x8b"):
            stream = gzip.GzipFile(fileobj=buffered)
        elif magic.startswith(b"BZh"):
            stream = bz2.BZ2File(buffered)
        elif magic.startswith(b"\xfd7zXZ\0"):
            stream = lzma.LZMAFile(buffered)  # noqa: SIM115 - as above
        self._stream = cast("IO[bytes]", stream)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        changed = self._raw.changed()
        self._stream.close()
        self._raw.close()
        if error is None and changed:
            raise StagingError(f"{shown(self._path)}: changed while it was read")

    def read(self, count: int = -1) -> bytes:
        """Return up to count decompressed bytes."""
        if not 0 <= count <= _LARGEST_READ_BYTES:
            raise StagingError(f"{shown(self._path)}: holds a header of absurd size")
        self._last = self._stream.read(count)
        return self._last

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go on to an offset; going back in compressed data would read it all again."""
        return self._stream.seek(offset, whence)

    def tell(self) -> int:
        """Return the offset in the decompressed data."""
        return self._stream.tell()

    def finish(self) -> None:
        """Check the end-of-archive mark, then read to the end so that checksums are verified.

        tarfile takes a damaged or missing header behind the first as the end of the archive.
        """
        if self._last != bytes(_BLOCK_BYTES):
            raise StagingError(
                f"{shown(self._path)}: no end-of-archive mark where the members end",
                hint="the archive is cut short or damaged: make or copy it again",
            )
        while self.read(_BUFFER_BYTES):
            pass


class _Source(io.RawIOBase):
    """A regular file that is read with retries and can say whether it changed."""

    def __init__(self, path: str, retry: Retry) -> None:
        super().__init__()
        self._retry = retry
        self._fd = retry(lambda: os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
        self._at = 0
        self._before = os.fstat(self._fd)
        if not stat.S_ISREG(self._before.st_mode):
            os.close(self._fd)
            raise StagingError(f"{shown(path)}: is no regular file")

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        self._retry.check_stop()
        count = self._retry(lambda: os.preadv(self._fd, [buffer], self._at))
        self._at += count
        return count

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at}.get(whence, self._before.st_size)
        self._at = start + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def changed(self) -> bool:
        now, then = os.fstat(self._fd), self._before
        return (now.st_size, now.st_mtime_ns) != (then.st_size, then.st_mtime_ns)

    def close(self) -> None:
        if not self.closed:
            os.close(self._fd)
        super().close()
