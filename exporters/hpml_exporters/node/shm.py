"""The RAM file system /dev/shm: its size, its use, and the share of each job.

A job's share is the data that hpml staged for it (data for later jobs counts for each job that uses
it now), and all other files of its user if that user has no other job here. The exporter of a
single job has no list of other jobs, and counts only staged data. The kernel's own figure is
`hpml_job_memory_bytes{kind="shmem"}`, of the job's control group: it includes files that are
deleted but open, and leaves out a dataset that another job brought. Where Slurm gives each job a
/dev/shm of its own (job_container/tmpfs), the exporter of the node sees none of them.

Users may put anything there. A FUSE file system whose server never answers, mounted on a directory
or file, would block any access by name (lstat, open). So each entry is opened with O_PATH, which
reaches no file system (open(2)); the kernel's record of that descriptor (/proc/PID/fdinfo, proc(5))
names its mount; and only entries on the mount of /dev/shm are read, through that descriptor, so
that no mount or rename can come in between. Links are not followed.

Staged data are entries of `hpml-{uid}`, each a directory with `data`, a manifest and `.lease`. One
whose name ends in `@{cluster}-{job id}` is that job's. Any other is used by the jobs whose
processes have a lock on its `.lease` (/proc/locks names process and inode), else it is a file of
its user's. Data count by the size in the manifest: a million files cost one read.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import islice

from prometheus_client.core import Metric

from hpml_exporters.core.collector import MetricSpec, NotHereError, Row, families, metric
from hpml_exporters.jobs.board import Jobs
from hpml_exporters.options import Context

_STATVFS = "statvfs(2) of /dev/shm"
_SIZE = metric("hpml_shm_size_bytes", "Size of /dev/shm.", source=_STATVFS)
_USED = metric("hpml_shm_used_bytes", "Memory that files in /dev/shm take.", source=_STATVFS)
_OF_JOB = metric(
    "hpml_job_shm_bytes",
    "Memory of files in /dev/shm that are a job's: the staged data that it uses,"
    " and files of its user if that user has no other job here.",
    "cluster jobid",
    source="a bounded walk of /dev/shm, manifests of hpml's staged data, /proc/locks",
)
_STAGED = metric(
    "hpml_shm_staged_bytes",
    "Memory of the data that hpml staged to /dev/shm, for running and later jobs.",
    source="a bounded walk of /dev/shm, manifests of hpml's staged data",
)
SPECS = (_SIZE, _USED, _STAGED, _OF_JOB)

ENTRIES = 500
"""Entries per sample, about 10 ms of work; the next sample continues where this one stopped.

The result of the last complete walk is shown.
"""

# {cluster}-{job id}; for runs of hpml's local backend all of it is the key, see JobFacts.key
_JOB = re.compile(r"(?:(local-[0-9a-f]{6}-)|[^.].*-)([0-9]+)", re.ASCII)
_HELD = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_BLOCK_BYTES = 512  # of st_blocks, whatever the file system's own
_MAX_DEPTH = 32
_MANIFEST_BYTES = 65536
_LOCKS_BYTES = 1 << 20  # some 18,000 locks: the kernel takes longer than linear to list them

Owner = tuple[int, str]
"""A user, and the key in `Jobs` of one of their jobs; empty: what is no certain job's."""

_OF_STORES: Owner = (-1, "staged")  # counts staged data once, for any number of jobs


class Shm:
    """The collector `shm`."""

    name = "shm"
    specs: Sequence[MetricSpec] = SPECS

    def __init__(self, context: Context) -> None:
        self.interval = context.options.node_interval
        self._root, self._proc = context.options.roots.shm, context.options.roots.proc
        self._jobs, self._cluster = context.jobs, context.options.cluster
        self._own = context.options.job is not None
        self._walk: _Walk | None = None
        self._found: Mapping[tuple[int, str], int] | None = None

    def sample(self, now: float) -> list[Metric]:  # noqa: ARG002
        """Return the families as they are now; see `Collector.sample`."""
        try:
            space = os.statvfs(self._root)
        except OSError as error:
            raise NotHereError(f"no {self._root}") from error
        size = space.f_blocks * space.f_frsize
        walk = self._walk or _Walk(self._root, self._proc, size, self._jobs.now)
        self._walk = None  # a failed walk is dropped
        if walk.go_on(ENTRIES):
            self._found = walk.bytes
        else:
            self._walk = walk
        used = (space.f_blocks - space.f_bfree) * space.f_frsize
        staged = [] if self._found is None else [((), min(used, self._found.get(_OF_STORES, 0)))]
        rows = {_SIZE: [((), size)], _USED: [((), used)], _STAGED: staged}
        return families(rows | {_OF_JOB: self._of_jobs()})

    def close(self) -> None:
        """Abandon a walk in progress."""
        if self._walk is not None:
            self._walk.close()
            self._walk = None

    def _of_jobs(self) -> Iterator[Row]:
        if self._found is None:
            return
        jobs = self._jobs.now.by_id
        users = {key: job.facts.uid for key, job in jobs.items()}
        if self._own:
            users = {key: os.getuid() if uid < 0 else uid for key, uid in users.items()}
        jobs_of = Counter(users.values())
        for key, uid in users.items():
            if uid >= 0:
                alone = jobs_of[uid] == 1 and not self._own
                others = self._found.get((uid, ""), 0) if alone else 0
                yield (self._cluster, key), self._found.get((uid, key), 0) + others


make = Shm


class _Walk:
    """One walk through /dev/shm, in pieces.

    Args:
        root: its directory.
        proc: mount point of procfs.
        size: bytes that no manifest can exceed.
        jobs: of the node.

    Attributes:
        bytes: found so far.
    """

    def __init__(self, root: str, proc: str, size: int, jobs: Jobs) -> None:
        self.bytes: Counter[Owner] = Counter()
        self._proc, self._size, self._jobs = proc, size, jobs
        self._users: Mapping[int, set[str]] = {}  # keys of jobs by the inode that they locked
        self._mount = b""
        self._probe = self._info = -1  # descriptors: of the entry looked at, of its fdinfo
        self._steps = self._walk(root)

    def go_on(self, entries: int) -> bool:
        """Process this many entries; returns whether the walk is complete.

        Raises:
            OSError: /dev/shm or procfs cannot be read.
        """
        return sum(1 for _ in islice(self._steps, entries)) < entries

    def close(self) -> None:
        """Close the directories that are open."""
        self._steps.close()

    def _walk(self, root: str) -> Generator[None, None, None]:
        with ExitStack() as opened:
            top = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            opened.callback(os.close, top)
            self._probe = os.dup(top)
            opened.callback(os.close, self._probe)
            self._info = os.open(f"/proc/self/fdinfo/{self._probe}", os.O_RDONLY | os.O_CLOEXEC)
            opened.callback(os.close, self._info)
            self._mount = self._mount_of(top)
            self._users = self._lock_holders(os.fstat(top).st_dev)
            for name in _names(top):
                yield from self._count(name, top)

    def _lock_holders(self, device: int) -> Mapping[int, set[str]]:
        """Return which jobs have a flock on a file of a device, by its inode."""
        place = f"{os.major(device):02x}:{os.minor(device):02x}"
        # 1: FLOCK  ADVISORY  READ 4711 00:1b:2547527 0 EOF
        lock = re.compile(rf"^\d+: FLOCK +\S+ +\S+ +(\d+) {place}:(\d+) ".encode(), re.MULTILINE)
        found: dict[int, set[str]] = {}
        with suppress(OSError), open(f"{self._proc}/locks", "rb") as stream:
            for pid, inode in lock.findall(stream.read(_LOCKS_BYTES)):
                key = self._jobs.job_of(int(pid))
                if key is not None:
                    found.setdefault(int(inode), set()).add(key)
        return found

    def _count(
        self, name: str, parent: int, depth: int = 1, owners: Sequence[Owner] = ()
    ) -> Iterator[None]:
        yield
        with suppress(OSError), self._held(name, parent) as (fd, info):
            is_directory = stat.S_ISDIR(info.st_mode)
            if depth == 1 and is_directory and name == f"hpml-{info.st_uid}":
                yield from self._count_store(fd, info.st_uid)
                return
            # Each of several names of a file counts as its share, so that the file counts once.
            names = 1 if is_directory else max(1, info.st_nlink)
            for owner in owners or [(info.st_uid, "")]:
                self.bytes[owner] += info.st_blocks * _BLOCK_BYTES // names
            if is_directory and depth < _MAX_DEPTH:
                for inner in _names(fd):
                    yield from self._count(inner, fd, depth + 1, owners)

    def _count_store(self, store: int, uid: int) -> Iterator[None]:
        for name in _names(store):
            yield
            with suppress(OSError), self._held(name, store) as (entry, info):
                if not stat.S_ISDIR(info.st_mode):
                    yield from self._count(name, store, 2)
                    continue
                jobs = [(uid, key) for key in self._jobs_of(name, entry)] or [(uid, "")]
                owners = [*jobs, _OF_STORES]
                for inner in _names(entry):
                    size = None
                    if inner == "data":
                        size = self._manifest_bytes(".data.manifest", entry)
                    if size is None:
                        yield from self._count(inner, entry, 3, owners)
                        continue
                    yield
                    for owner in owners:
                        # Any user can write a manifest: it must not claim more than /dev/shm holds.
                        self.bytes[owner] += min(size, self._size)

    def _jobs_of(self, name: str, entry: int) -> Iterable[str]:
        """Return the keys of the jobs that an entry is staged for, or that use it."""
        match = _JOB.fullmatch(name.partition("@")[2])
        if match:
            return [(match[1] or "") + match[2]]
        with suppress(OSError), self._held(".lease", entry) as (_, info):
            return self._users.get(info.st_ino, ())
        return ()

    def _manifest_bytes(self, name: str, parent: int) -> int | None:
        try:
            with self._held(name, parent) as (fd, info):
                # Opening a FIFO in its place would block until somebody writes to it.
                if not stat.S_ISREG(info.st_mode):
                    return None
                with open(f"/proc/self/fd/{fd}", "rb") as stream:
                    size = json.loads(stream.readline(_MANIFEST_BYTES))["bytes"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None
        return size if type(size) is int and size >= 0 else None

    def _mount_of(self, fd: int) -> bytes:
        os.dup2(fd, self._probe, inheritable=False)  # its fdinfo is open: half the cost
        return os.pread(self._info, 512, 0).partition(b"mnt_id:")[2].partition(b"\n")[0]

    @contextmanager
    def _held(self, name: str, parent: int) -> Iterator[tuple[int, os.stat_result]]:
        fd = os.open(name, _HELD, dir_fd=parent)
        try:
            if self._mount_of(fd) != self._mount:
                raise OSError(errno.EXDEV, "is another file system")
            yield fd, os.fstat(fd)
        finally:
            os.close(fd)


def _names(directory: int) -> Iterator[str]:
    with suppress(OSError):
        # "." is the directory itself, even if something was mounted over its name meanwhile.
        fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=directory)
        try:
            entries = os.scandir(fd)
        finally:
            os.close(fd)
        with entries:
            yield from (entry.name for entry in entries)
