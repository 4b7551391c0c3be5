"""The RAM file system /dev/shm: its size and use, and what of it is which job's.

A job's are the directories that hpml staged for it (`hpml-{uid}/{cluster}-{job id}`, by the sizes
in their manifests, so that a million files cost one read; a cached dataset counts with each job
that uses it), and all other files of its user, where that user has no other job here. The exporter
of a single job cannot know of others, and only counts what hpml staged. The kernel's own word on a
job is `hpml_job_memory_bytes{kind="shmem"}`, of its control group, which also knows files that are
deleted but open; it does not know whose a dataset is that another job brought. Where Slurm gives
each job a /dev/shm of its own (job_container/tmpfs), the exporter of the node sees none of them.

/dev/shm may hold millions of files: at each sample some entries are looked at, and the
next one goes on there. Shown is the last walk that came to its end. Users can put anything there:
nothing is followed, no other file system is entered, no file is opened that might wait.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field

from hpml_exporters.collector import NotHereError
from hpml_exporters.collectors.rawfile import mounted, plain_path, read
from hpml_exporters.context import Context
from hpml_exporters.metric import Family, MetricSpec, Sample
from hpml_exporters.metrics import node

__all__ = ["Shm", "Walk", "make"]

ENTRIES = 1500
"""Entries that are looked at in a sample, about 5 ms."""

_BLOCK_BYTES = 512  # of st_blocks, whatever the file system's own
_MAX_DEPTH = 32
_MANIFEST_BYTES = 65536
_ROOT = "hpml-"
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CACHED = "../.cache/"
_CACHED_DEPTH = 4  # ../.cache/{key}/data


def make(context: Context) -> Shm:
    """Return the collector of /dev/shm."""
    return Shm(context)


@dataclass
class _Found:
    """Bytes of jobs, by job id, and of other files, by user."""

    of_job: dict[tuple[int, str], int] = field(default_factory=dict)
    of_user: dict[int, int] = field(default_factory=dict)


class Shm:
    """The collector `shm`."""

    name = "shm"
    specs: Sequence[MetricSpec] = (node.SHM_SIZE, node.SHM_USED, node.JOB_SHM)

    def __init__(self, context: Context) -> None:
        self.interval = context.options.node_interval
        self._root = context.options.roots.shm
        self._mountinfo = f"{context.options.roots.proc}/self/mountinfo"
        self._jobs = context.jobs
        self._own = context.options.job is not None
        self._walk: Walk | None = None
        self._found: _Found | None = None

    def sample(self, now: float) -> tuple[Family, ...]:  # noqa: ARG002
        """Return the families as they are now; see `Collector.sample`."""
        try:
            told = os.statvfs(self._root)
        except OSError as error:
            raise NotHereError(f"no {self._root}") from error
        size = told.f_blocks * told.f_frsize
        used = (told.f_blocks - told.f_bfree) * told.f_frsize
        if self._walk is None:
            self._walk = Walk(self._root, self._mounts(), size, staged_only=self._own)
        if self._walk.go_on(ENTRIES):
            self._found, self._walk = self._walk.found, None
        return (
            Family(node.SHM_SIZE, (Sample((), size),)),
            Family(node.SHM_USED, (Sample((), used),)),
            Family(node.JOB_SHM, tuple(self._of_jobs())),
        )

    def close(self) -> None:
        """Give up a walk that is under way."""
        if self._walk is not None:
            self._walk.close()
            self._walk = None

    def _of_jobs(self) -> Iterator[Sample]:
        """Yield what is known of each job that is here, once a walk came to its end."""
        jobs = self._jobs.now.by_id
        if self._found is None:
            return
        of_user: dict[int, int] = {}
        for job in jobs.values():
            of_user[job.facts.uid] = of_user.get(job.facts.uid, 0) + 1
        for jobid, job in jobs.items():
            uid = job.facts.uid if job.facts.uid >= 0 or not self._own else os.getuid()
            if uid < 0:
                continue  # not known whose it is: no figure, which is not 0
            total = self._found.of_job.get((uid, jobid), 0)
            if of_user[job.facts.uid] == 1 and not self._own:
                total += self._found.of_user.get(uid, 0)
            yield Sample((jobid,), total)

    def _mounts(self) -> frozenset[str]:
        """Return where other file systems are mounted below: they are not even looked at."""
        try:
            mountinfo = read(self._mountinfo).decode("utf-8", "surrogateescape")
        except OSError:
            return frozenset()
        paths = (plain_path(one.path) for one in mounted(mountinfo))
        below = f"{self._root}/"
        return frozenset(path for path in paths if path.startswith(below))


class Walk:
    """One walk through /dev/shm, in pieces.

    Args:
        root: where it is.
        mounts: paths below it that are not entered.
        size: bytes that no manifest can exceed.
        staged_only: leave out what hpml did not stage.
    """

    def __init__(
        self, root: str, mounts: frozenset[str], size: int, *, staged_only: bool = False
    ) -> None:
        self.found = _Found()
        self._staged_only = staged_only
        self._mounts = mounts
        self._size = size
        self._steps = self._top(root)

    def go_on(self, entries: int) -> bool:
        """Look at so many entries; True once all were looked at."""
        return any(next(self._steps, self) is self for _ in range(entries))

    def close(self) -> None:
        """Close the directories that are open."""
        self._steps.close()

    def _top(self, root: str) -> Generator[None, None, None]:
        for fd, entry in _entries(root, -1):
            yield
            path = f"{root}/{entry.name}"
            told = self._stat(entry, path)
            if told is None:
                continue
            uid = told.st_uid
            is_root = entry.name == f"{_ROOT}{uid}"
            if is_root and stat.S_ISDIR(told.st_mode):
                yield from self._staged(entry.name, fd, path, uid)
            elif not self._staged_only:
                yield from self._other(entry.name, fd, path, told, 1)

    def _staged(self, name: str, parent: int, path: str, uid: int) -> Iterator[None]:
        """Look at the directory of a user, which holds one of each job."""
        for fd, entry in _entries(name, parent):
            yield
            jobid = entry.name.rpartition("-")[2]
            if entry.name.startswith(".") or not (jobid.isascii() and jobid.isdigit()):
                continue
            place = f"{path}/{entry.name}"
            if place in self._mounts:
                continue
            key = uid, jobid
            for inner, one in _entries(entry.name, fd):
                yield
                amount = self._published(inner, one)
                if amount is None:
                    amount = 0
                    for size in self._tree(one, inner, f"{place}/{one.name}", 3):
                        yield
                        amount += size
                self.found.of_job[key] = self.found.of_job.get(key, 0) + amount

    def _published(self, fd: int, entry: os.DirEntry[str]) -> int | None:
        """Return the size of published data; None of what is none, or not published yet."""
        name = entry.name
        if name.startswith("."):
            return None
        if entry.is_symlink():
            try:
                target = os.readlink(name, dir_fd=fd)
            except OSError:
                return 0
            if not target.startswith(_CACHED) or target.count("/") + 1 != _CACHED_DEPTH:
                return 0
            amount = _cached_bytes(target.split("/")[2], fd)
        else:
            amount = _manifest_bytes(f".{name}.manifest", fd)
        return None if amount is None else min(amount, self._size)

    def _other(
        self, name: str, parent: int, path: str, told: os.stat_result, depth: int
    ) -> Iterator[None]:
        """Add what no job staged to its user's."""
        mine = self.found.of_user
        mine[told.st_uid] = mine.get(told.st_uid, 0) + told.st_blocks * _BLOCK_BYTES
        if not stat.S_ISDIR(told.st_mode) or depth >= _MAX_DEPTH:
            return
        for fd, entry in _entries(name, parent):
            yield
            place = f"{path}/{entry.name}"
            inner = self._stat(entry, place)
            if inner is not None:
                yield from self._other(entry.name, fd, place, inner, depth + 1)

    def _tree(self, entry: os.DirEntry[str], parent: int, path: str, depth: int) -> Iterator[int]:
        """Yield the sizes of a file, or of all that a directory holds."""
        told = self._stat(entry, path)
        if told is None:
            return
        yield told.st_blocks * _BLOCK_BYTES
        if stat.S_ISDIR(told.st_mode) and depth < _MAX_DEPTH:
            for fd, one in _entries(entry.name, parent):
                yield from self._tree(one, fd, f"{path}/{one.name}", depth + 1)

    def _stat(self, entry: os.DirEntry[str], path: str) -> os.stat_result | None:
        """Return what an entry is, unless it is another file system, or gone."""
        if path in self._mounts:
            return None
        try:
            return entry.stat(follow_symlinks=False)
        except OSError:
            return None


def _entries(name: str, parent: int) -> Iterator[tuple[int, os.DirEntry[str]]]:
    """Yield a directory's entries with its descriptor; none where it cannot be read."""
    try:
        fd = os.open(name, _DIRECTORY, dir_fd=None if parent < 0 else parent)
    except OSError:
        return
    try:
        with os.scandir(fd) as entries:
            for entry in entries:
                yield fd, entry
    except OSError:
        return
    finally:
        os.close(fd)


def _cached_bytes(key: str, job: int) -> int | None:
    """Return the size of a cached dataset; `job` is the directory of a job that uses it.

    Each directory is opened by itself: a user may have put a link in the place of any, to a file
    system that waits for its server or mounts itself when it is looked at.
    """
    if key in {"", ".", ".."}:
        return None
    folder = job
    with contextlib.ExitStack() as opened:
        for name in ("..", ".cache", key):
            try:
                folder = os.open(name, _DIRECTORY, dir_fd=folder)
            except OSError:
                return None
            opened.callback(os.close, folder)
        return _manifest_bytes(".data.manifest", folder)


def _manifest_bytes(path: str, parent: int) -> int | None:
    """Return the size in a manifest's first line; None where there is none."""
    try:
        fd = os.open(path, _FILE, dir_fd=parent)
    except OSError:
        return None
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return None
        line = os.read(fd, _MANIFEST_BYTES).partition(b"\n")[0]
    except OSError:
        return None
    finally:
        os.close(fd)
    with contextlib.suppress(ValueError, RecursionError):
        told = json.loads(line)
        amount = told.get("bytes") if isinstance(told, dict) else None
        if type(amount) is int and amount >= 0:
            return amount
    return None
