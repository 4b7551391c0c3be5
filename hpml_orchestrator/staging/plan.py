"""What a copy will make, found by looking at the source; nothing is written here."""

from __future__ import annotations

import builtins
import contextlib
import errno
import functools
import hashlib
import os
import queue
import stat
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from hpml_orchestrator.staging.faults import OUTSIDE_LINKS, Problems, shown, why
from hpml_orchestrator.staging.rate_limit import TokenBucket
from hpml_orchestrator.staging.space import Need, readers_for, round_up

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpml_orchestrator.staging.faults import Retry

    Row = tuple[str, os.stat_result | None, str]
    # (name, status, fault) of an entry; either the status or the fault is set

__all__ = [
    "DEEPEST",
    "NO_FILE",
    "Entry",
    "Lister",
    "Plan",
    "data_ranges",
    "link_fault",
    "scan_file",
    "scan_tree",
]

NO_FILE = "is a device, fifo or socket"
"""Why neither a regular file nor a directory or link is copied."""

DEEPEST = 256
_NAMES_AT_ONCE = 512
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_STAT_BLOCK_BYTES = 512
_KEY_BYTES = 16
_ROWS_AT_ONCE = 1000
_MANIFEST_BYTES_PER_FILE = 24
_STAGER_BYTES_PER_FILE = 650  # of Python, while a million files of short names are staged
_S_IFMT, _S_IFREG, _S_IFDIR = 0o170000, 0o100000, 0o040000


class Entry(NamedTuple):
    """A directory or a regular file; `path` is relative to the top, `stored` without holes."""

    path: str
    mode: int
    mtime_ns: int
    size: int = 0
    stored: int = 0
    inode: int = 0


class HardLink(NamedTuple):
    """A further name of a file of the same plan."""

    path: str
    first: str


class Symlink(NamedTuple):
    """A symbolic link and its text."""

    path: str
    target: str
    mtime_ns: int


@dataclass
class Plan:
    """Everything that will be made below one directory.

    Attributes:
        source_root: directory that the entries' paths start from (not used for an archive).
        top: the directory itself.
        directories: parents before children.
        origins: source name of an entry that changes its name.
        stamps: size, time and inode of each archive; empty where there is none.
        at_least: scanning stopped early because it cannot fit.
        told: what the source is called in messages, where that is not `source_root`.
    """

    source_root: str
    top: Entry
    directories: list[Entry] = field(default_factory=list)
    files: list[Entry] = field(default_factory=list)
    hard_links: list[HardLink] = field(default_factory=list)
    symlinks: list[Symlink] = field(default_factory=list)
    origins: dict[str, str] = field(default_factory=dict)
    stamps: list[tuple[int, int, int]] = field(default_factory=list)
    at_least: bool = False
    told: str = ""

    @property
    def name(self) -> str:
        """What the source is called in messages."""
        return shown(self.told or self.source_root)

    @property
    def bytes(self) -> int:
        """Sum of the sizes of the regular files, each inode counted once."""
        return sum(entry.size for entry in self.files)

    @property
    def file_count(self) -> int:
        """Number of names of regular files."""
        return len(self.files) + len(self.hard_links)

    @functools.cached_property
    def fingerprint(self) -> builtins.bytes:
        """BLAKE2b over names, sizes, times, modes and links of a plan, 16 bytes.

        Not XXH3, which not every interpreter has: whoever looks finds the same. Archives tell times
        in whole seconds: their own tell that they were written anew.
        """
        digest = hashlib.blake2b(digest_size=_KEY_BYTES)
        digest.update(b"%d:" % self.top.mode)
        for entries in (self.directories, self.files):
            _add_many(digest, entries, 4)  # without what only the file system knows
        for links in (self.hard_links, self.symlinks):
            _add_many(digest, links, 2)
        digest.update(repr(self.stamps).encode())
        return digest.digest()

    def need(self, block_bytes: int, inode_bytes: int = 0) -> Need:
        """Return what the plan takes on a file system, manifest included.

        Args:
            block_bytes: files take a multiple of this.
            inode_bytes: what each file, directory and link takes by itself; not 0 where memory is
                what limits, which the stager itself then takes from, too.
        """
        others = len(self.directories) + len(self.symlinks) + 2
        stored = sum(round_up(entry.stored, block_bytes) for entry in self.files)
        stored += round_up(self._manifest_bytes(), block_bytes)
        inodes = len(self.files) + others
        each = inode_bytes + _STAGER_BYTES_PER_FILE if inode_bytes else 0
        total = stored + (others - 1) * block_bytes + inodes * each
        return Need(total, inodes, self.at_least)

    def _manifest_bytes(self) -> int:
        """Return about how much the manifest takes: names, sizes, digests."""
        lists = (self.directories, self.files, self.hard_links, self.symlinks)
        names = [entry[0] for entries in lists for entry in entries]
        names += [link[1] for links in (self.hard_links, self.symlinks) for link in links]
        text = "\0".join(names).encode("utf-8", "surrogateescape")
        return len(text) + len(names) + _MANIFEST_BYTES_PER_FILE * len(self.files)


def _add_many(digest: hashlib.blake2b, rows: Sequence[tuple[object, ...]], columns: int) -> None:
    """Hash rows of text and numbers, as every Python writes them, with few calls."""
    digest.update(b"%d:" % len(rows))
    for at in range(0, len(rows), _ROWS_AT_ONCE):
        some = [row[:columns] for row in rows[at : at + _ROWS_AT_ONCE]]
        digest.update(ascii(some).encode("ascii"))


class Lister:
    """Lists directories below a root; entries come sorted by name.

    On a file system that is served to this node, where each look waits for a server, the whole tree
    is listed ahead by many threads.

    Args:
        root: the top.
        retry: calls again after faults that pass.
        rate: entries that may be looked at per second; 0 for any.
    """

    def __init__(self, root: str, retry: Retry, rate: float = 0.0) -> None:
        self._root = root
        self._take = TokenBucket(rate, check_stop=retry.check_stop).take
        self._retry = retry
        self._threads = readers_for(root)
        self._ready: dict[str, list[Row]] = {}
        self._tasks: queue.SimpleQueue[tuple[str, list[str] | None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._open = 0
        self._failed: list[BaseException] = []

    def rows(self, directory: str) -> list[Row]:
        """Return the entries of a directory, relative to the root; of the root itself first."""
        self._retry.check_stop()
        if not directory and self._threads > 1:
            self._list_ahead()
        ready = self._ready.pop(directory, None)
        if ready is not None:
            ready.sort(key=_name)  # once: its parts came one by one
            return ready
        names = self._names(directory)
        if isinstance(names, str):
            return [(".", None, names)]
        try:
            fd = os.open(f"{self._root}/{directory}", _DIRECTORY)
        except OSError:
            return self._rows_of(directory, names)
        rows: list[Row] = []
        try:
            for start in range(0, len(names), _NAMES_AT_ONCE):
                self._retry.check_stop()
                some = names[start : start + _NAMES_AT_ONCE]
                self._take(len(some))
                try:
                    rows += [
                        (name, os.stat(name, dir_fd=fd, follow_symlinks=False), "") for name in some
                    ]
                except OSError:
                    rows += self._rows_of(directory, some)
        finally:
            os.close(fd)
        return rows

    def _names(self, directory: str) -> list[str] | str:
        """Return the sorted names in a directory, or what is wrong with it."""
        if directory.count("/") >= DEEPEST:
            return f"nested deeper than {DEEPEST} directories"
        try:
            full = f"{self._root}/{directory}"
            return sorted(self._retry(functools.partial(os.listdir, full)))
        except OSError as error:
            return why(error)

    def _rows_of(self, directory: str, names: list[str]) -> list[Row]:
        """Look at each of some names, with retries."""
        rows: list[Row] = []
        full = f"{self._root}/{directory}/" if directory else f"{self._root}/"
        for name in names:
            try:
                rows.append((name, self._retry(functools.partial(os.lstat, full + name)), ""))
            except OSError as error:
                rows.append((name, None, why(error)))
        return rows

    def _list_ahead(self) -> None:
        """List everything with threads."""
        self._put("", None)
        threads = []
        with contextlib.suppress(RuntimeError):  # the job may have no more: those that are do it
            for _ in range(self._threads):
                one = threading.Thread(target=self._work, daemon=True)
                one.start()
                threads.append(one)
        if not threads:
            self._work()
        for one in threads:
            one.join()
        if self._failed:
            raise self._failed[0]

    def _put(self, directory: str, names: list[str] | None) -> None:
        with self._lock:
            self._open += 1
        self._tasks.put((directory, names))

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                if not self._failed:
                    self._retry.check_stop()
                    self._list(*task)
            except BaseException as error:  # noqa: BLE001 - raised again by who runs this
                self._failed.append(error)
            with self._lock:
                self._open -= 1
                last = self._open == 0
            if last:
                for _ in range(self._threads):
                    self._tasks.put(None)

    def _list(self, directory: str, names: list[str] | None) -> None:
        """List a directory, or look at some of its names."""
        if names is None:
            found = self._names(directory)
            if isinstance(found, str):
                self._ready[directory] = [(".", None, found)]
                return
            self._ready[directory] = []
            for start in range(0, len(found), _NAMES_AT_ONCE):
                self._put(directory, found[start : start + _NAMES_AT_ONCE])
            return
        self._take(len(names))
        rows = self._rows_of(directory, names)
        with self._lock:
            self._ready[directory] += rows
        for name, info, _ in rows:
            if info is not None and info.st_mode & _S_IFMT == _S_IFDIR:
                self._put(f"{directory}/{name}" if directory else name, None)


def _name(row: Row) -> str:
    return row[0]


def scan_file(source: str, retry: Retry) -> Plan:
    """Plan a directory that holds one file by the name that the source has.

    Raises:
        OSError: the file cannot be looked at.
    """
    real = os.path.realpath(source)
    info = retry(lambda: os.stat(real))
    name, origin = os.path.basename(source), os.path.basename(real)
    plan = Plan(os.path.dirname(real), Entry("", 0o755, info.st_mtime_ns), told=source)
    plan.files.append(_file_entry(name, real, info))
    plan.origins[name] = origin
    return plan


def scan_tree(
    source: str,
    retry: Retry,
    *,
    verb: str = "stage",
    outside_links: bool = False,
    rate: float = 0.0,
    problems: Problems | None = None,
) -> Plan:
    """Plan a copy of everything below a directory.

    Args:
        source: the directory.
        retry: calls again after faults that pass.
        verb: what is to be done with the tree, for the error.
        outside_links: take symbolic links that leave the tree as they are.
        rate: entries that may be looked at per second; 0 for any.
        problems: told what cannot be copied, which the plan then leaves out; an error when not
            given.

    Raises:
        StagingError: something there cannot be read or is not copied: devices, fifos, sockets,
            symbolic links that leave the tree. Names the first 20 paths and the count.
        OSError: the directory itself cannot be looked at.
    """
    real = os.path.realpath(source)
    info = retry(lambda: os.stat(real))
    plan = Plan(real, Entry("", info.st_mode, info.st_mtime_ns))
    is_strict = problems is None
    problems = Problems(f"cannot {verb} {shown(source)}") if problems is None else problems
    first_names: dict[tuple[int, int], str] = {}
    lister = Lister(real, retry, rate)
    todo = [""]
    while todo:
        directory = todo.pop()
        prefix = f"{directory}/" if directory else ""
        below = []
        for name, found, fault in lister.rows(directory):
            path = prefix + name
            if found is None:
                problems.add(path, fault)
                continue
            mode = found.st_mode
            kind = mode & _S_IFMT
            if kind == _S_IFREG and found.st_nlink == 1 and not has_holes(found):
                size = found.st_size
                plan.files.append(Entry(path, mode, found.st_mtime_ns, size, size, found.st_ino))
            elif kind == _S_IFDIR:
                plan.directories.append(Entry(path, mode, found.st_mtime_ns))
                below.append(path)
            else:
                _add(plan, path, found, first_names, problems, outside_links=outside_links)
        todo.extend(reversed(below))
    if is_strict:
        problems.raise_any()
    return plan


def _add(
    plan: Plan,
    path: str,
    info: os.stat_result,
    first_names: dict[tuple[int, int], str],
    problems: Problems,
    *,
    outside_links: bool,
) -> None:
    full = f"{plan.source_root}/{path}"
    if stat.S_ISLNK(info.st_mode):
        try:
            target = os.readlink(full)
        except OSError as error:
            problems.add(path, why(error), error)
            return
        fault = "" if outside_links else link_fault(path, target, plan.source_root)
        if fault:
            problems.add(path, fault, hint=OUTSIDE_LINKS)
        else:
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
    """Return why a symbolic link is refused, "" when it stays below the top.

    A `..` behind a name could climb out through another link: then the text alone cannot tell, and
    only a link of a real tree below `root` may pass, by where it really leads.
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
            if error.errno == errno.ENXIO:  # nothing but a hole from here on
                break
            if error.errno != errno.EINVAL:
                raise
            return [(0, size)]
        ranges.append((start, min(end, size)))
    return ranges


def has_holes(info: os.stat_result) -> bool:
    """Say whether a file takes less than its size; compressing file systems say so too."""
    return info.st_blocks * _STAT_BLOCK_BYTES < info.st_size


def _file_entry(path: str, full: str, info: os.stat_result) -> Entry:
    stored = info.st_size
    if has_holes(info):
        fd = os.open(full, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            stored = sum(end - start for start, end in data_ranges(fd, info.st_size))
        finally:
            os.close(fd)
    return Entry(path, info.st_mode, info.st_mtime_ns, info.st_size, stored, info.st_ino)
