"""Builds the plan of an archive from its members, none of which is trusted.

All kinds of archives use this. It refuses names that are absolute, lead out, contain a NUL or occur
twice, members below a file or a link, and links that leave the root. Files are later created
relative to a descriptor of the target, and symbolic links are made last.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import StagingError
from hpml_orchestrator.records.texts import exact_bytes, human_bytes
from hpml_orchestrator.staging.faults import OUTSIDE_LINKS, Problems, shown
from hpml_orchestrator.staging.plan import (
    DEEPEST,
    CopyPlan,
    HardLink,
    Symlink,
    TreeEntry,
    link_fault,
)

if TYPE_CHECKING:
    from collections.abc import Callable

MOST_MEMBERS = 10_000_000
_HARMLESS_BYTES = 512 << 20
_HONEST_RATIO = 250
"""Text shrinks to a tenth, label masks to a hundredth; zeros to 1/1030 (gzip) or 1/30000 (zstd)."""

_LATEST_NS = (1 << 34) * 1_000_000_000
_FILE, _DIRECTORY, _LINK = 1, 2, 3

_REPACK = "repack the archive with plain relative names"
_TWICE = (
    "the archive holds several states of a file, as `tar -r` and `tar -u` make it: unpack it, "
    "which leaves the last of them, and stage the directory or a new archive of it"
)
_SHARDS = (
    "kind: tree (as an option --kind tree) leaves the shards packed, for a program that reads them "
    "itself, as webdataset does"
)


class RefusedError(Exception):
    """A member of an archive is refused; `hint` is advice."""

    def __init__(self, reason: str, hint: str = "") -> None:
        super().__init__(reason)
        self.hint = hint


class Members:
    """Checks members one by one and builds the plan.

    Args:
        source: the archive, for errors.
        mtime_ns: of the top and of directories that are only implied.
        outside_links: take symbolic links that leave the root as they are.
        shard_of: returns the name of the shard of a file of the plan, by its number.

    Attributes:
        shard: name of the shard whose members come; "" if there is one archive.
    """

    shard = ""

    def __init__(
        self,
        source: str,
        mtime_ns: int,
        *,
        outside_links: bool = False,
        shard_of: Callable[[int], str] = lambda _: "",
    ) -> None:
        self.shard_of = shard_of
        self.plan = CopyPlan(source, TreeEntry("", 0o755, mtime_ns))
        self.problems = Problems(f"cannot unpack {shown(source)}")
        self.total_bytes = 0
        self._source = source
        self._outside_links = outside_links
        self._kinds = {"": _DIRECTORY}
        self._at: dict[str, int] = {}
        self._links: dict[str, Symlink] = {}
        self._parent = ""  # the last one that was found to be a directory

    def check_count(self, count: int) -> None:
        """Refuse an archive with an absurd number of members.

        Raises:
            StagingError: there are too many.
        """
        if count > MOST_MEMBERS:
            raise StagingError(f"{shown(self._source)}: holds more than {MOST_MEMBERS} members")

    def check_bytes(self, packed: int) -> None:
        """Refuse an archive that unpacks to absurdly more bytes than it has.

        Args:
            packed: the archive's own bytes.

        Raises:
            StagingError: it does.
        """
        if self.total_bytes > honest_bytes(packed):
            raise StagingError(
                f"{shown(self._source)}: {exact_bytes(packed)} would become "
                f"{human_bytes(self.total_bytes)} or more: that is how an archive is made that is "
                "to fill a disk",
                hint="if it is honest, unpack it and stage the directory",
            )

    def file(self, name: str, mode: int, mtime_ns: int, size: int) -> bool:
        """Plan a regular file; False when it is refused, which is noted."""
        try:
            path = self._new(name)
        except RefusedError as error:
            self.problems.add(name, str(error), hint=error.hint)
            return False
        self._kinds[path] = _FILE
        self.total_bytes += size
        self.plan.files.append(TreeEntry(path, mode, _time(mtime_ns), size, 0, 0, size))
        return True

    def directory(self, name: str, mode: int, mtime_ns: int) -> None:
        """Plan a directory, or set the mode and time of one that a member below it implied."""
        try:
            path = plain_name(name)
            there = self._kinds.get(path)
            if there == _DIRECTORY:
                self._again(TreeEntry(path, mode, _time(mtime_ns)))
                return
            if there is not None:
                raise self._twice(path)
            self._below(path)
            self._add_directory(TreeEntry(path, mode, _time(mtime_ns)))
        except RefusedError as error:
            self.problems.add(name, str(error), hint=error.hint)

    def symlink(self, name: str, target: str, mtime_ns: int) -> None:
        """Plan a symbolic link."""
        try:
            path = self._new(name)
            if not target:
                raise RefusedError("symbolic link to nothing")
            fault, hint = "NUL in a link" if "\0" in target else "", ""
            if not fault and not self._outside_links:
                fault, hint = link_fault(path, target), OUTSIDE_LINKS
            if fault:
                raise RefusedError(fault, hint)
        except RefusedError as error:
            self.problems.add(name, str(error), hint=error.hint)
            return
        self._kinds[path] = _LINK
        self._links[path] = Symlink(path, target, _time(mtime_ns))
        self.plan.symlinks.append(self._links[path])

    def hard_link(self, name: str, target: str) -> None:
        """Plan a further name of an earlier file or symbolic link.

        tar stores further names of a symbolic link in the same way; they become links with the
        same text, as when a tree is copied.
        """
        try:
            path = self._new(name)
            first = plain_name(target)
            if first in self._links:
                self.symlink(name, *self._links[first][1:])
                return
            if self._kinds.get(first) != _FILE:
                raise RefusedError(f"hard link to {shown(first)}, which is not a file before it")
        except RefusedError as error:
            self.problems.add(name, str(error), hint=error.hint)
            return
        self._kinds[path] = _FILE
        self.plan.hard_links.append(HardLink(path, first))

    def refuse(self, name: str, reason: str = "is a device, a fifo or of unknown type") -> None:
        """Note a member that cannot be unpacked."""
        self.problems.add(name, reason)

    def _new(self, name: str) -> str:
        # Most of the millions of names in an archive need no cleaning, so test for that first.
        path = name if is_plain(name) else plain_name(name)
        if path in self._kinds:
            raise self._twice(path)
        if path.rpartition("/")[0] != self._parent:
            self._below(path)
        return path

    def _twice(self, path: str) -> RefusedError:
        at = next((n for n, one in enumerate(self.plan.files) if one.path == path), -1)
        first = self.shard_of(at) if at >= 0 else self.shard
        if first == self.shard:
            return RefusedError("is in the archive twice", _TWICE)
        reason = f"is in {shown(first)} and in {shown(self.shard)}"
        return RefusedError(reason, _SHARDS)

    def _below(self, path: str) -> None:
        parent = path.rpartition("/")[0]
        self._parent = ""
        if path.count("/") >= DEEPEST:
            raise RefusedError(f"nested deeper than {DEEPEST} directories")
        if parent not in self._kinds:
            missing = []
            above = parent
            while above not in self._kinds:
                missing.append(above)
                above = os.path.dirname(above)
            self._check_directory(above)
            for name in reversed(missing):
                self._add_directory(TreeEntry(name, 0o755, self.plan.top.mtime_ns))
        self._check_directory(parent)
        # Members of one directory usually follow each other, so its parents are checked once.
        self._parent = parent

    def _check_directory(self, path: str) -> None:
        if self._kinds[path] != _DIRECTORY:
            raise RefusedError(f"is below {shown(path)}, which is not a directory")

    def _again(self, entry: TreeEntry) -> None:
        if entry.path:
            self.plan.directories[self._at[entry.path]] = entry
        else:
            self.plan.top = entry

    def _add_directory(self, entry: TreeEntry) -> None:
        self._kinds[entry.path] = _DIRECTORY
        self._at[entry.path] = len(self.plan.directories)
        self.plan.directories.append(entry)


def honest_bytes(packed: int) -> int:
    """Return the limit of uncompressed bytes for a compressed archive of that size."""
    return max(_HARMLESS_BYTES, _HONEST_RATIO * packed)


def is_plain(name: str) -> bool:
    """Return whether a name certainly needs no cleaning; names of hidden files may be clean too."""
    return (
        "/." not in name
        and "//" not in name
        and "\0" not in name
        and name[:1] not in {"", "/", "."}
        and name[-1:] != "/"
    )


def plain_name(name: str) -> str:
    """Return a member's name without `.` and empty parts, "" for the top.

    Raises:
        RefusedError: it is absolute, climbs out, or holds a NUL.
    """
    if not name:
        raise RefusedError("has no name", _REPACK)
    if "\0" in name:
        raise RefusedError("NUL in the name", _REPACK)
    if name.startswith("/"):
        raise RefusedError("absolute name", _REPACK)
    parts = [part for part in name.split("/") if part not in {"", "."}]
    if ".." in parts:
        raise RefusedError("`..` in the name", _REPACK)
    if len(parts) > DEEPEST:
        raise RefusedError(f"nested deeper than {DEEPEST} directories")
    return "/".join(parts)


def _time(mtime_ns: int) -> int:
    return mtime_ns if -_LATEST_NS < mtime_ns < _LATEST_NS else 0
