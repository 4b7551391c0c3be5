"""Zip archives as sources: `zipfile` lists and inflates their members.

Nothing in an archive is trusted: members.py decides what may be written.
"""

from __future__ import annotations

import contextlib
import io
import stat
import struct
import time
import zipfile
import zlib
from typing import IO, TYPE_CHECKING, cast

from hpml_orchestrator.errors import StagingError
from hpml_orchestrator.staging.faults import SourceChangedError, shown, why
from hpml_orchestrator.staging.members import Members
from hpml_orchestrator.staging.source import BLOCK_BYTES
from hpml_orchestrator.staging.streams import ArchiveFile, drop_pages, look_at_archive, not_whole

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpml_orchestrator.staging.faults import Retry
    from hpml_orchestrator.staging.hashing import Buffer
    from hpml_orchestrator.staging.plan import CopyPlan
    from hpml_orchestrator.staging.source import SourceReader

_NANO = 1_000_000_000
_BUFFER_BYTES = 1 << 13
_LONGEST_LINK_BYTES = 4096
_UNIX_HOSTS = frozenset({3, 19})  # 19: macOS
_ENCRYPTED, _UTF8, _DOS_DIRECTORY = 0x1, 0x800, 0x10
_EXTRA_TIME = 0x5455  # Info-ZIP, extrafld.txt: a byte of flags, then seconds since the epoch, UTC
_TIME = struct.Struct("<l")
_DAMAGED = (zipfile.BadZipFile, struct.error, ValueError, EOFError, zlib.error, OverflowError)


class ZipSource:
    """A zip archive; its checksums cover whole members, which are read from front to back.

    Args:
        path: the archive.
        retry: calls again after faults that pass.
        outside_links: take symbolic links that leave the root as they are.

    Raises:
        StagingError: it is not a regular file.
        OSError: it cannot be opened.
    """

    kind = "zip"
    ordered = False

    def __init__(self, path: str, retry: Retry, *, outside_links: bool = False) -> None:
        self._path = path
        self._retry = retry
        self._outside_links = outside_links
        self._stamp, _ = look_at_archive(path, retry)
        self._archive: zipfile.ZipFile | None = None
        self._infos: list[zipfile.ZipInfo] = []

    def _opened(self) -> IO[bytes]:
        return io.BufferedReader(ArchiveFile(self._path, self._retry, self._stamp), _BUFFER_BYTES)

    def plan(self) -> CopyPlan:
        """Read the central directory; see `Source.plan`."""
        members = Members(self._path, self._stamp.mtime_ns, outside_links=self._outside_links)
        self._infos = []
        try:
            with self._opened() as stream:
                self._archive = zipfile.ZipFile(stream)
                members.check_count(len(self._archive.infolist()))
                # In the order of the file, whatever the central directory says: it is read from
                # front to back.
                for info in sorted(self._archive.infolist(), key=lambda one: one.header_offset):
                    self._retry.check_stop()
                    self._take(info, members)
        except _DAMAGED as error:  # names, times
            raise not_whole(self._path, "zip", str(error)) from error
        except SourceChangedError as error:
            raise StagingError(f"{shown(self._path)}: changed while it was read") from error
        finally:
            drop_pages(self._path)
        members.problems.raise_any()
        members.check_bytes(self._stamp.size)
        members.plan.stamps = [self._stamp[1:]]
        return members.plan

    def _take(self, info: zipfile.ZipInfo, members: Members) -> None:
        on_unix = info.create_system in _UNIX_HOSTS
        # `filename` ends at a NUL, which would hide a name that has to be refused.
        name = info.orig_filename
        if on_unix and not info.flag_bits & _UTF8:  # zipfile decodes these bytes as cp437
            name = name.encode("cp437").decode("utf-8", "surrogateescape")
        mode = info.external_attr >> 16 if on_unix else 0
        kind = stat.S_IFMT(mode)
        is_directory = name.endswith("/") or kind == stat.S_IFDIR
        is_directory |= not on_unix and bool(info.external_attr & _DOS_DIRECTORY)
        mode = mode or (0o755 if is_directory else 0o644)  # 0 with a file type is intended
        mtime_ns = _mtime(info) * _NANO
        size = info.file_size
        if info.flag_bits & _ENCRYPTED:
            members.refuse(name, "is encrypted")
        elif info.compress_type not in {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}:
            method = f"is compressed by method {info.compress_type}"
            members.refuse(name, f"{method}; only stored and deflated ones are read")
        elif is_directory:
            members.directory(name, mode & 0o7777, mtime_ns)
        elif kind == stat.S_IFLNK:
            if size > _LONGEST_LINK_BYTES:
                members.refuse(name, "symbolic link of absurd length")
            else:
                target = b"".join(map(bytes, self._contents(info)))
                members.symlink(name, target.decode("utf-8", "surrogateescape"), mtime_ns)
        elif kind not in {0, stat.S_IFREG}:
            members.refuse(name)
        elif members.file(name, mode & 0o7777, mtime_ns, size):
            self._infos.append(info)

    def _contents(self, info: zipfile.ZipInfo) -> Iterator[bytes]:
        size = 0
        try:
            with cast("zipfile.ZipFile", self._archive).open(info) as stream:
                while data := stream.read(BLOCK_BYTES):
                    size += len(data)
                    yield data
            if size != info.file_size:
                raise EOFError("it is shorter than announced")
        except _DAMAGED as error:
            raise StagingError(
                f"{shown(self._path)}: {shown(info.filename)} is damaged: {why(error)}",
                hint="make or copy the archive again; `unzip -t` lists what is damaged",
            ) from error

    def reader(self, plan: CopyPlan) -> SourceReader:  # noqa: ARG002 - the members are known since `plan`
        """Open for reading what `plan` returned: each worker has its own descriptor."""
        # Planning has closed its descriptor. Each worker opens one of its own: one from before the
        # fork would share its position with those of the other workers.
        cast("zipfile.ZipFile", self._archive).fp = self._opened()
        return self

    def read(self, number: int) -> Iterator[Buffer]:
        """Yield a file; see `SourceReader`."""
        return self._contents(self._infos[number])

    def close(self) -> None:
        """Close the archive; see `drop_pages`."""
        if self._archive is not None:
            with contextlib.suppress(OSError):
                cast("IO[bytes]", self._archive.fp).close()
            drop_pages(self._path)


def _mtime(info: zipfile.ZipInfo) -> int:
    """Return the time in seconds: Info-ZIP's, in UTC, or else the DOS time, which is local."""
    extra, at = info.extra, 0
    while at + 4 <= len(extra):
        key, length = struct.unpack_from("<2H", extra, at)
        told = extra[at + 4 : at + 4 + length]
        if key == _EXTRA_TIME and len(told) > _TIME.size and told[0] & 1:
            return int(_TIME.unpack_from(told, 1)[0])
        at += 4 + length
    try:
        return int(time.mktime((*info.date_time, 0, 0, -1)))
    except (OverflowError, ValueError):
        return 0
