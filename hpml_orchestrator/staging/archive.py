"""Unpack tar archives without trusting them.

Two passes: the first reads every header and plans, the second writes what was planned. tarfile's
own extraction and its filters are not used: every name is checked here and created through a
descriptor of its directory, and symbolic links are made last, when nothing is written any more.
"""

from __future__ import annotations

import contextlib
import lzma
import os
import tarfile
import zlib
from typing import IO, TYPE_CHECKING, cast

from hpml_orchestrator.errors import StagingError
from hpml_orchestrator.staging.faults import Problems, Retry, shown, why
from hpml_orchestrator.staging.plan import DEEPEST, Entry, HardLink, Plan, Symlink, link_fault
from hpml_orchestrator.staging.tarsource import ArchiveStream
from hpml_orchestrator.staging.transfer import CHUNK_BYTES, make_directories, make_links, new_file

if TYPE_CHECKING:
    from collections.abc import Generator
    from typing import Self

    from hpml_orchestrator.staging.progress import Progress

__all__ = ["DAMAGED", "members_of", "scan_archive", "unpack_archive"]

MOST_MEMBERS = 10_000_000
DAMAGED = (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, ValueError, OverflowError)
"""What reading a damaged archive raises, beside OSError."""

_LATEST_SECONDS = 1 << 34
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW


class _RefusedError(Exception):
    """A member of an archive is not unpacked."""


def scan_archive(source: str, retry: Retry, *, most_bytes: int) -> Plan:
    """Plan the unpacking of an archive from its headers; stop once it holds over most_bytes.

    Raises:
        StagingError: it is no tar archive, is cut short or damaged, or holds what is refused.
            Names the first 20 members and the count.
        OSError: it cannot be opened.
    """
    scan = _Scan(source)
    with contextlib.closing(_members(source, retry)) as members:
        for _, member in members:
            scan.take(member)
            if scan.total_bytes > most_bytes:
                scan.plan.at_least = True
                break
    scan.problems.raise_any("repack the archive with plain relative names")
    return scan.plan


def unpack_archive(source: str, plan: Plan, target: str, retry: Retry, progress: Progress) -> None:
    """Fill an existing empty directory with what was planned.

    Raises:
        StagingError: the archive is damaged, changed since the scan, or the target is full.
        StagingStopped: should_stop said so.
    """
    wanted = {entry.path: entry for entry in plan.files}
    with contextlib.ExitStack() as stack:
        top = os.open(target, _DIRECTORY)
        stack.callback(os.close, top)
        make_directories(plan, top, retry)
        tree = stack.enter_context(_Tree(top))
        members = stack.enter_context(contextlib.closing(_members(source, retry)))
        for tar, member in members:
            if not member.isreg():
                continue
            entry = wanted.pop(_plain_name(member.name), None)
            data = tar.extractfile(member)
            if entry is None or data is None or entry.size != member.size:
                raise StagingError(f"{shown(source)}: changed while it was unpacked")
            try:
                _write(entry, data, tree, retry, progress)
            except OSError as error:
                raise _cannot(source, entry.path, error) from error
        if wanted:
            raise StagingError(f"{shown(source)}: changed while it was unpacked")
        make_links(plan, top, retry)


def members_of(source: str, retry: Retry) -> Generator[tuple[str, int, IO[bytes]], None, None]:
    """Yield (path, size, data) of the regular files in order; read each before the next.

    Raises:
        StagingError: the archive is damaged or changed since it was opened.
    """
    with contextlib.closing(_members(source, retry)) as members:
        for tar, member in members:
            data = tar.extractfile(member) if member.isreg() else None
            if data is not None:
                yield _plain_name(member.name), member.size, data


def _members(
    source: str, retry: Retry
) -> Generator[tuple[tarfile.TarFile, tarfile.TarInfo], None, None]:
    """Yield the members in order; nothing of those before is kept in memory."""
    with ArchiveStream(source, retry) as stream:
        try:
            with tarfile.open(
                fileobj=cast("IO[bytes]", stream),
                mode="r:",
                encoding="utf-8",
                errors="surrogateescape",
            ) as tar:
                member = tar.next()
                while member is not None:
                    retry.check_stop()
                    yield tar, member
                    tar.members.clear()  # type: ignore[attr-defined]
                    member = tar.next()
                stream.finish()
        except DAMAGED as error:
            raise StagingError(
                f"{shown(source)}: not a whole tar archive: {why(error)}",
                hint="the archive is cut short or damaged: make or copy it again",
            ) from error
        except OSError as error:  # gzip and bz2 report damage so
            raise StagingError(f"cannot read {shown(source)}: {why(error)}") from error


class _Scan:
    """Checks members one by one and builds the plan."""

    def __init__(self, source: str) -> None:
        self.plan = Plan(source, Entry("", 0o755, int(os.stat(source).st_mtime_ns)))
        self.problems = Problems(f"cannot unpack {shown(source)}")
        self.total_bytes = 0
        self._source = source
        self._members = 0
        self._kinds = {"": "directory"}
        self._at: dict[str, int] = {}

    def take(self, member: tarfile.TarInfo) -> None:
        """Plan one member or note why it is refused."""
        self._members += 1
        if self._members > MOST_MEMBERS:
            raise StagingError(f"{shown(self._source)}: holds more than {MOST_MEMBERS} members")
        if member.size < 0:
            raise StagingError(f"{shown(self._source)}: holds a header with a negative size")
        try:
            path = _plain_name(member.name)
            self._parents(path)
            self._place(path, member)
        except _RefusedError as error:
            self.problems.add(member.name, str(error))

    def _parents(self, path: str) -> None:
        parent = os.path.dirname(path)
        missing = []
        while parent not in self._kinds:
            missing.append(parent)
            parent = os.path.dirname(parent)
        if self._kinds[parent] != "directory":
            raise _RefusedError(f"lies below {shown(parent)}, which is no directory")
        for name in reversed(missing):
            self._add_directory(Entry(name, 0o755, self.plan.top.mtime_ns))

    def _place(self, path: str, member: tarfile.TarInfo) -> None:
        there = self._kinds.get(path)
        mtime_ns = _time_ns(member)
        if member.isdir() and there in {None, "directory"}:
            self._directory(path, Entry(path, member.mode, mtime_ns), new=there is None)
            return
        if there is not None:
            raise _RefusedError("is in the archive twice")
        if member.isreg():
            self.total_bytes += member.size
            self._kinds[path] = "file"
            self.plan.files.append(Entry(path, member.mode, mtime_ns, member.size, member.size))
        elif member.issym():
            fault = "NUL in a link" if "\0" in member.linkname else ""
            fault = fault or link_fault(path, member.linkname)
            if fault or not member.linkname:
                raise _RefusedError(fault or "symbolic link to nothing")
            self._kinds[path] = "link"
            self.plan.symlinks.append(Symlink(path, member.linkname, mtime_ns))
        elif member.islnk():
            first = _plain_name(member.linkname)
            if self._kinds.get(first) != "file":
                raise _RefusedError(f"hard link to {shown(first)}, which is no file before it")
            self._kinds[path] = "file"
            self.plan.hard_links.append(HardLink(path, first))
        else:
            raise _RefusedError("is a device, a fifo or of unknown type")

    def _directory(self, path: str, entry: Entry, *, new: bool) -> None:
        """Add a directory, or set the mode and time of one that a member below it implied."""
        if new:
            self._add_directory(entry)
        elif path:
            self.plan.directories[self._at[path]] = entry
        else:
            self.plan.top = entry

    def _add_directory(self, entry: Entry) -> None:
        self._kinds[entry.path] = "directory"
        self._at[entry.path] = len(self.plan.directories)
        self.plan.directories.append(entry)


class _Tree:
    """Descriptors of the directories that are written into, the last one kept open."""

    def __init__(self, top: int) -> None:
        self._top = top
        self._path = ""
        self._fd = top

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def parent(self, path: str) -> int:
        """Return a descriptor of the directory that holds a path, reached through no link."""
        parent = os.path.dirname(path)
        if parent != self._path:
            self._close()
            fd = self._top
            for part in parent.split("/") if parent else ():
                try:
                    below = os.open(part, _DIRECTORY, dir_fd=fd)
                finally:
                    if fd != self._top:
                        os.close(fd)
                fd = below
            self._fd, self._path = fd, parent
        return self._fd

    def _close(self) -> None:
        if self._fd != self._top:
            os.close(self._fd)
        self._fd, self._path = self._top, ""


def _write(entry: Entry, data: IO[bytes], tree: _Tree, retry: Retry, progress: Progress) -> None:
    with new_file(entry, tree.parent(entry.path), os.path.basename(entry.path)) as target:
        left = entry.size
        while left:
            retry.check_stop()
            chunk = data.read(min(left, CHUNK_BYTES))
            if not chunk:
                raise EOFError(f"{shown(entry.path)} is cut short")
            view = memoryview(chunk)
            while view:
                view = view[os.write(target, view) :]
            left -= len(chunk)
            progress.add(len(chunk))
    progress.add(0, 1)


def _plain_name(name: str) -> str:
    """Return a member's name without `.` and empty parts, "" for the top.

    Raises:
        _RefusedError: it is absolute, climbs out, or holds a NUL.
    """
    if not name:
        raise _RefusedError("has no name")
    if "\0" in name:
        raise _RefusedError("NUL in the name")
    if name.startswith("/"):
        raise _RefusedError("absolute name")
    parts = [part for part in name.split("/") if part not in {"", "."}]
    if ".." in parts:
        raise _RefusedError("`..` in the name")
    if len(parts) > DEEPEST:
        raise _RefusedError(f"nested deeper than {DEEPEST} directories")
    return "/".join(parts)


def _time_ns(member: tarfile.TarInfo) -> int:
    seconds = float(member.mtime)
    return int(seconds * 1_000_000_000) if 0 <= seconds < _LATEST_SECONDS else 0


def _cannot(source: str, path: str, error: OSError) -> StagingError:
    return StagingError(f"cannot unpack {shown(path)} of {shown(source)}: {why(error)}")
