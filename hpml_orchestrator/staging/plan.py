"""The plan of a copy: made by scanning a tree, or from an archive's members. Writes nothing."""

from __future__ import annotations

import builtins
import contextlib
import errno
import functools
import hashlib
import os
import stat
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from hpml_orchestrator.errors import StagingError
from hpml_orchestrator.records.texts import exact_bytes, human_bytes
from hpml_orchestrator.staging.request import OUTSIDE_LINKS, Problems, links_hint, shown, why
from hpml_orchestrator.staging.space import Need, readers_for, round_up
from hpml_orchestrator.staging.workers import TokenBucket

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hpml_orchestrator.staging.request import Retry

if TYPE_CHECKING:
    Row = tuple[str, os.stat_result | None, str]
    # (name, status, fault) of an entry; either the status or the fault is set

NO_FILE = "is a device, fifo or socket"
"""Why something other than a file, directory or link is not copied."""

CIRCLE = "symbolic link to a directory above it"
"""Why a directory is not copied when following links."""

T = TypeVar("T")
R = TypeVar("R")

DEEPEST = 256
_NAMES_AT_ONCE = 512
_STAT_BLOCK_BYTES = 512
_KEY_BYTES = 16
_ROWS_AT_ONCE = 1000
_MANIFEST_BYTES_PER_FILE = 34
_STAGER_BYTES_PER_FILE = 690  # in Python, measured with a million short names
_S_IFMT, _S_IFREG, _S_IFDIR = 0o170000, 0o100000, 0o040000


class TreeEntry(NamedTuple):
    """A directory or a regular file; `path` is relative to the top, `stored` excludes holes."""

    path: str
    mode: int
    mtime_ns: int
    size: int = 0
    inode: int = 0
    ctime_ns: int = 0
    stored: int = 0


class HardLink(NamedTuple):
    """An additional name of a file of the same plan."""

    path: str
    first: str


class Symlink(NamedTuple):
    """A symbolic link and its text."""

    path: str
    target: str
    mtime_ns: int


@dataclass
class CopyPlan:
    """Everything that a copy creates in one directory.

    Attributes:
        source_root: directory that the entries' paths are relative to (unused for archives).
        top: the directory itself.
        directories: parents before children.
        origins: source names of renamed entries.
        stamps: size, times and inode of each archive.
        at_least: scanning stopped early because the data cannot fit.
        label: name of the source in messages, if it is not `source_root`.
    """

    source_root: str
    top: TreeEntry
    directories: list[TreeEntry] = field(default_factory=list)
    files: list[TreeEntry] = field(default_factory=list)
    hard_links: list[HardLink] = field(default_factory=list)
    symlinks: list[Symlink] = field(default_factory=list)
    origins: dict[str, str] = field(default_factory=dict)
    stamps: list[tuple[int, int, int, int]] = field(default_factory=list)
    at_least: bool = False
    label: str = ""

    @property
    def name(self) -> str:
        """Name of the source in messages."""
        return shown(self.label or self.source_root)

    @property
    def bytes(self) -> int:
        """Total size of the regular files, each inode counted once."""
        return sum(entry.size for entry in self.files)

    @property
    def file_count(self) -> int:
        """Number of names of regular files."""
        return len(self.files) + len(self.hard_links)

    @functools.cached_property
    def fingerprint(self) -> builtins.bytes:
        """BLAKE2b (16 bytes) over the names, sizes, times, inodes, modes and links of a plan.

        Not XXH3, which not every interpreter has. ctime and inode reveal a rewritten file with its
        old time (`cp -p`, `rsync -t`, `tar -x`), and the stamps a rewritten archive.
        """
        digest = hashlib.blake2b(digest_size=_KEY_BYTES)
        digest.update(b"%d:" % self.top.mode)
        for entries in (self.directories, self.files):
            _add_many(digest, entries, 6)  # excludes `stored`, which file systems may change
        for links in (self.hard_links, self.symlinks):
            _add_many(digest, links, 2)
        digest.update(repr(self.stamps).encode())
        return digest.digest()

    def need(self, block_bytes: int, inode_bytes: int = 0) -> Need:
        """Return the bytes and inodes that the plan takes on a file system, including the manifest.

        Args:
            block_bytes: block size of the file system.
            inode_bytes: kernel memory per file, directory and link. If it is not 0, memory is the
                limit, and the stager's own memory counts as well.
        """
        others = len(self.directories) + len(self.symlinks) + 2
        stored = sum(round_up(entry.stored, block_bytes) for entry in self.files)
        stored += round_up(self._manifest_bytes(), block_bytes)
        inodes = len(self.files) + others
        each = inode_bytes + _STAGER_BYTES_PER_FILE if inode_bytes else 0
        total = stored + (others - 1) * block_bytes + inodes * each
        return Need(total, inodes, self.at_least)

    def _manifest_bytes(self) -> int:
        """Estimate the size of the manifest: names, sizes, digests."""
        lists = (self.directories, self.files, self.hard_links, self.symlinks)
        names = [entry[0] for entries in lists for entry in entries]
        names += [link[1] for links in (self.hard_links, self.symlinks) for link in links]
        text = "".join(names).encode("utf-8", "surrogateescape")
        sizes = sum(len(str(entry.size)) for entry in self.files)
        return len(text) + 4 * len(names) + sizes + _MANIFEST_BYTES_PER_FILE * len(self.files)


def _add_many(digest: hashlib.blake2b, rows: Sequence[tuple[object, ...]], columns: int) -> None:
    digest.update(b"%d:" % len(rows))
    for at in range(0, len(rows), _ROWS_AT_ONCE):
        some = [row[:columns] for row in rows[at : at + _ROWS_AT_ONCE]]
        digest.update(ascii(some).encode("ascii"))


class _Looker:
    """Lists directories below a root, with the status of each entry.

    On a network file system it uses many threads, because each call waits for the server.
    """

    def __init__(self, root: str, retry: Retry, rate: float, *, follow_links: bool) -> None:
        self._root = root
        self._stat = _stat_through if follow_links else os.lstat
        self._retry = retry
        self._take = TokenBucket(rate, check_stop=retry.check_stop).take
        self._threads = readers_for(root)

    def level(self, directories: list[str]) -> Iterator[tuple[str, list[Row]]]:
        """Yield (directory, some of its entries), sorted by name within each directory."""
        parts: list[tuple[str, list[str] | str]] = []
        for directory, names in zip(directories, self._map(self._names, directories)):
            if isinstance(names, str):
                parts.append((directory, names))
                continue
            # Split the list, so that several threads share a directory of a million files.
            each = range(0, len(names), _NAMES_AT_ONCE)
            parts += [(directory, names[at : at + _NAMES_AT_ONCE]) for at in each]
        for (directory, _), rows in zip(parts, self._map(self._rows, parts)):
            yield directory, rows

    def _map(self, call: Callable[[T], R], items: Sequence[T]) -> Iterator[R]:
        if self._threads > 1 and len(items) > 1:
            from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415 - takes time

            with ThreadPoolExecutor(self._threads) as pool, contextlib.suppress(RuntimeError):
                results = pool.map(call, items)  # raises if the job's limit of threads is reached
                return (yield from results)
        yield from map(call, items)

    def _names(self, directory: str) -> list[str] | str:
        if directory.count("/") >= DEEPEST:
            return f"nested deeper than {DEEPEST} directories"
        self._retry.check_stop()
        try:
            full = f"{self._root}/{directory}"
            return sorted(self._retry(functools.partial(os.listdir, full)))
        except OSError as error:
            return why(error)

    def _rows(self, part: tuple[str, list[str] | str]) -> list[Row]:
        directory, names = part
        if isinstance(names, str):
            return [(".", None, names)]
        self._retry.check_stop()
        self._take(len(names))
        rows: list[Row] = []
        full = f"{self._root}/{directory}/" if directory else f"{self._root}/"
        for name in names:
            try:
                # Try without `Retry` first: its closure would slow down the scan of millions of
                # files.
                rows.append((name, self._stat(full + name), ""))
            except OSError:
                try:
                    rows.append((name, self._retry(functools.partial(self._stat, full + name)), ""))
                except OSError as error:
                    rows.append((name, None, why(error)))
        return rows


def _stat_through(path: str) -> os.stat_result:
    """Return the status of a link's target, or of the link itself if it is broken."""
    try:
        return os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return os.lstat(path)


def scan_file(source: str, retry: Retry) -> CopyPlan:
    """Plan a directory with a single file, named like the source.

    Raises:
        OSError: the file's status cannot be read.
    """
    real = os.path.realpath(source)
    info = retry(lambda: os.stat(real))
    name, origin = os.path.basename(source), os.path.basename(real)
    plan = CopyPlan(os.path.dirname(real), TreeEntry("", 0o755, info.st_mtime_ns), label=source)
    plan.files.append(_file_entry(name, real, info))
    plan.origins[name] = origin
    return plan


def scan_tree(
    source: str,
    retry: Retry,
    *,
    verb: str = "stage",
    outside_links: bool = False,
    follow_links: bool = False,
    rate: float = 0.0,
    problems: Problems | None = None,
) -> CopyPlan:
    """Plan a copy of everything in a directory.

    Args:
        source: the directory.
        retry: retries calls after transient faults.
        verb: the caller's action, for the error message.
        outside_links: accept symbolic links that leave the tree, and copy them unchanged.
        follow_links: copy the targets of symbolic links; broken links stay links.
        rate: limit of entries examined per second; 0 for none.
        problems: collects what cannot be copied and is left out of the plan; by default this is an
            error.

    Raises:
        StagingError: something cannot be read or is not copied: devices, fifos, sockets, symbolic
            links that leave the tree. Names the first 20 paths and the count.
        OSError: the directory itself cannot be read.
    """
    real = os.path.realpath(source)
    info = retry(lambda: os.stat(real))
    plan = CopyPlan(real, TreeEntry("", info.st_mode, info.st_mtime_ns))
    above = {"": {(info.st_dev, info.st_ino)}}  # ancestors of each directory, to detect cycles
    is_strict = problems is None
    problems = Problems(f"cannot {verb} {shown(source)}") if problems is None else problems
    first_names: dict[tuple[int, int], str] = {}
    looker = _Looker(real, retry, rate, follow_links=follow_links)
    level = [""]
    while level:
        below = []
        for directory, rows in looker.level(level):
            prefix = os.path.join(directory, "")
            for name, found, fault in rows:
                path = prefix + name
                if found is None:
                    problems.add(path, fault)
                    continue
                mode = found.st_mode
                kind = mode & _S_IFMT
                # Fast path for the common case; the rest is in `_add`.
                if kind == _S_IFREG and found.st_nlink == 1 and not has_holes(found):
                    plan.files.append(_entry(path, found, found.st_size))
                elif kind == _S_IFDIR:
                    if follow_links:
                        identity = (found.st_dev, found.st_ino)
                        if identity in above[directory]:
                            problems.add(path, CIRCLE)
                            continue
                        above[path] = {*above[directory], identity}
                    plan.directories.append(TreeEntry(path, mode, found.st_mtime_ns))
                    below.append(path)
                else:
                    _add(plan, path, found, first_names, problems)
        level = below
    links = [] if outside_links or follow_links else plan.symlinks
    _refuse_outside(real, links, problems, verb)
    if is_strict:
        problems.raise_any()
    return plan


def _refuse_outside(root: str, links: list[Symlink], problems: Problems, verb: str) -> None:
    found = [(*link[:2], link_fault(*link[:2], root)) for link in links]
    faults = [(path, target, fault) for path, target, fault in found if fault]
    targets = [os.path.join(os.path.dirname(path), target) for path, target, _ in faults]
    hint = links_hint(root, targets) if verb == "stage" else OUTSIDE_LINKS
    for path, _, fault in faults:
        problems.add(path, fault, hint=hint)


def _add(
    plan: CopyPlan,
    path: str,
    info: os.stat_result,
    first_names: dict[tuple[int, int], str],
    problems: Problems,
) -> None:
    full = f"{plan.source_root}/{path}"
    if stat.S_ISLNK(info.st_mode):
        try:
            target = os.readlink(full)
        except OSError as error:
            problems.add(path, why(error), error)
            return
        plan.symlinks.append(Symlink(path, target, info.st_mtime_ns))
    elif not stat.S_ISREG(info.st_mode):
        problems.add(path, NO_FILE)
    elif info.st_nlink > 1 and (info.st_dev, info.st_ino) in first_names:
        plan.hard_links.append(HardLink(path, first_names[info.st_dev, info.st_ino]))
    else:
        if info.st_nlink > 1:
            first_names[info.st_dev, info.st_ino] = path
        try:
            plan.files.append(_file_entry(path, full, info))
        except OSError as error:
            problems.add(path, why(error), error)


def link_fault(path: str, target: str, root: str = "") -> str:
    """Return why a symbolic link is refused; "" if it stays below the top.

    A `..` after a name could climb out through another link, which the text alone does not show. So
    such a link is accepted only in a real tree below `root`, by its resolved target.
    """
    parts = [part for part in target.split("/") if part not in {"", "."}]
    leading = 0
    while leading < len(parts) and parts[leading] == "..":
        leading += 1
    if target.startswith("/"):
        return f"symbolic link to an absolute path ({shown(target)})"
    leaves = f"symbolic link that leaves the tree ({shown(target)})"
    if leading > path.count("/"):
        return leaves
    if not root:
        return leaves if ".." in parts[leading:] else ""
    real = os.path.realpath(os.path.join(root, os.path.dirname(path), target))
    return "" if (real + "/").startswith(root.rstrip("/") + "/") else leaves


def data_ranges(fd: int, size: int) -> list[tuple[int, int]]:
    """Return (start, end) of the parts of an open file that are not holes."""
    ranges = []
    end = 0
    while end < size:
        try:
            start = os.lseek(fd, end, os.SEEK_DATA)
            end = os.lseek(fd, start, os.SEEK_HOLE)
        except OSError as error:
            if error.errno == errno.ENXIO:  # only a hole from here on
                break
            if error.errno != errno.EINVAL:
                raise
            # The file system does not report holes: treat the file as data throughout.
            return [(0, size)]
        ranges.append((start, min(end, size)))
    return ranges


def has_holes(info: os.stat_result) -> bool:
    """Return whether a file occupies less than its size; also true for compressed files."""
    return info.st_blocks * _STAT_BLOCK_BYTES < info.st_size


def _file_entry(path: str, full: str, info: os.stat_result) -> TreeEntry:
    stored = info.st_size
    if has_holes(info):
        # O_NONBLOCK: if a fifo replaced the file since `lstat`, opening it must not hang.
        fd = os.open(full, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            stored = sum(end - start for start, end in data_ranges(fd, info.st_size))
        finally:
            os.close(fd)
    return _entry(path, info, stored)


def _entry(path: str, info: os.stat_result, stored: int) -> TreeEntry:
    size, inode, changed = info.st_size, info.st_ino, info.st_ctime_ns
    return TreeEntry(path, info.st_mode, info.st_mtime_ns, size, inode, changed, stored)


# Plan an archive from its untrusted members.
#
# All kinds of archives use this. It refuses names that are absolute, lead out, contain a NUL or
# occur twice, members below a file or a link, and links that leave the root. Files are later
# created relative to a descriptor of the target, and symbolic links are made last.

MOST_MEMBERS = 10_000_000
_HARMLESS_BYTES = 512 << 20
_HONEST_RATIO = 250
"""Text compresses to a tenth, label masks to a hundredth; zeros to 1/1030 (gzip), 1/30000
(zstd)."""

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
        source: the archive, for error messages.
        mtime_ns: time of the top and of directories without their own member.
        outside_links: accept symbolic links that leave the root, and copy them unchanged.
        shard_of: returns the name of the shard of a file of the plan, given its number.

    Attributes:
        shard: name of the shard that is being read; "" for a single archive.
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
        self._parent = ""  # the directory that was checked last

    def check_count(self, count: int) -> None:
        """Refuse an archive with an absurd number of members.

        Raises:
            StagingError: there are too many.
        """
        if count > MOST_MEMBERS:
            raise StagingError(f"{shown(self._source)}: holds more than {MOST_MEMBERS} members")

    def check_bytes(self, packed: int) -> None:
        """Refuse an archive that unpacks to an absurd multiple of its size.

        Args:
            packed: size of the archive in bytes.

        Raises:
            StagingError: it unpacks to too much.
        """
        if self.total_bytes > honest_bytes(packed):
            raise StagingError(
                f"{shown(self._source)}: {exact_bytes(packed)} would become "
                f"{human_bytes(self.total_bytes)} or more: that is how an archive is made that is "
                "to fill a disk",
                hint="if it is honest, unpack it and stage the directory",
            )

    def file(self, name: str, mode: int, mtime_ns: int, size: int) -> bool:
        """Plan a regular file; if it is refused, record that and return False."""
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
        """Plan a directory, or set the mode and time of one that an earlier member implied."""
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
        """Plan an additional name of an earlier file or symbolic link.

        tar stores additional names of a symbolic link in the same way; they become links with the
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
        """Record a member that cannot be unpacked."""
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
        # Members of one directory usually follow each other, so check its parents only once.
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
    """Return whether a name needs no cleaning; False for some clean names of hidden files."""
    return (
        "/." not in name
        and "//" not in name
        and "\0" not in name
        and name[:1] not in {"", "/", "."}
        and name[-1:] != "/"
    )


def plain_name(name: str) -> str:
    """Return a member's name without `.` and empty parts; "" for the top.

    Raises:
        RefusedError: it is absolute, climbs out, or contains a NUL.
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
