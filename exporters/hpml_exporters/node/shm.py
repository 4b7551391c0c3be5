"""The RAM file system /dev/shm: its size, its use, and the share of each job.

A job's share is what hpml staged for it (a cached dataset counts for each job that uses it), and
all other files of its user if that user has no other job here. The exporter of a single job cannot
know of others, and only counts what hpml staged. The kernel's own figure is
`hpml_job_memory_bytes{kind="shmem"}`, of the job's control group: it includes files that are
deleted but open, and leaves out a dataset that another job brought. Where Slurm gives each job a
/dev/shm of its own (job_container/tmpfs), the exporter of the node sees none of them.

Users may put anything there. A FUSE file system mounted on a directory or file, whose server never
answers, would block any access by name (lstat, open). So each entry is opened with O_PATH, which
reaches no file system (open(2)); the kernel's record of that descriptor (/proc/PID/fdinfo, proc(5))
names its mount; and only entries on the mount of /dev/shm are read, through that descriptor, so
that no mount or rename can come in between. Links are not followed.

Staged data are `hpml-{uid}/{cluster}-{job id}/{name}`, a directory next to its manifest, or a link
to `hpml-{uid}/.cache/{key}/data`. What a shell staged, `hpml-{uid}/shell-{pid}-{start}/{name}`, is
a file of its user's. They count by the size in the manifest: a million files cost one read.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import islice

from prometheus_client.core import Metric

from hpml_exporters.core.collector import NotHereError
from hpml_exporters.core.metric import MetricSpec, Row, families, metric
from hpml_exporters.options import Context

_STATVFS = "statvfs(2) of /dev/shm"
_SIZE = metric("hpml_shm_size_bytes", "Size of /dev/shm.", source=_STATVFS)
_USED = metric("hpml_shm_used_bytes", "Memory that files in /dev/shm take.", source=_STATVFS)
_OF_JOB = metric(
    "hpml_job_shm_bytes",
    "Memory of files in /dev/shm that are a job's: what hpml staged for it,"
    " and files of its user if that user has no other job here.",
    "cluster jobid",
    source="a bounded walk of /dev/shm, manifests of hpml's staged data",
)
SPECS = (_SIZE, _USED, _OF_JOB)

ENTRIES = 500
"""Entries per sample, about 10 ms of work; the next sample continues where this one stopped.

The result of the last complete walk is shown.
"""

# {cluster}-{job id}; for runs of hpml's local backend all of it is the key, see JobFacts.key
_JOB = re.compile(r"(?:(local-[0-9a-f]{6}-)|[^.].*-)([0-9]+)", re.ASCII)
_SHELL = re.compile(r"shell-[0-9]+-[0-9]+", re.ASCII)  # shell-{process}-{time of its start}
_HELD = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_BLOCK_BYTES = 512  # of st_blocks, whatever the file system's own
_MAX_DEPTH = 32
_MANIFEST_BYTES = 65536


class Shm:
    """The collector `shm`."""

    name = "shm"
    specs: Sequence[MetricSpec] = SPECS

    def __init__(self, context: Context) -> None:
        self.interval = context.options.node_interval
        self._root = context.options.roots.shm
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
        walk = self._walk or _Walk(self._root, size)
        self._walk = None  # one that fails is given up
        if walk.go_on(ENTRIES):
            self._found = walk.bytes
        else:
            self._walk = walk
        used = (space.f_blocks - space.f_bfree) * space.f_frsize
        return families({_SIZE: [((), size)], _USED: [((), used)], _OF_JOB: self._of_jobs()})

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
        size: bytes that no manifest can exceed.

    Attributes:
        bytes: found so far, by user and key of the job in `Jobs`; empty: what no job staged.
    """

    def __init__(self, root: str, size: int) -> None:
        self.bytes: Counter[tuple[int, str]] = Counter()
        self._size = size
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
            for name in _names(top):
                yield from self._count(name, top)

    def _count(
        self, name: str, parent: int, depth: int = 1, job: tuple[int, str] | None = None
    ) -> Iterator[None]:
        yield
        with suppress(OSError), self._held(name, parent) as (fd, info):
            is_directory = stat.S_ISDIR(info.st_mode)
            if depth == 1 and is_directory and name == f"hpml-{info.st_uid}":
                yield from self._count_jobs(fd, info.st_uid)
                return
            # Each of several names of a file counts as its share, so that the file counts once.
            names = 1 if is_directory else max(1, info.st_nlink)
            self.bytes[job or (info.st_uid, "")] += info.st_blocks * _BLOCK_BYTES // names
            if is_directory and depth < _MAX_DEPTH:
                for inner in _names(fd):
                    yield from self._count(inner, fd, depth + 1, job)

    def _count_jobs(self, user: int, uid: int) -> Iterator[None]:
        for name in _names(user):
            yield
            key = _job_of(name)
            if key is None:
                continue
            with suppress(OSError), self._held(name, user) as (folder, _):
                for data in _names(folder):
                    size = None if data.startswith(".") else self._staged_bytes(data, folder, user)
                    if size is None:
                        yield from self._count(data, folder, 3, (uid, key))
                    else:
                        yield
                        # Any user can write a manifest: it must not claim more than /dev/shm holds.
                        self.bytes[uid, key] += min(size, self._size)

    def _staged_bytes(self, name: str, job: int, user: int) -> int | None:
        """Return the size of published data; None if it is something else, or not published yet."""
        try:
            target = os.readlink(name, dir_fd=job).split("/")
        except OSError:
            return self._manifest_bytes(f".{name}.manifest", job)
        if len(target) != 4 or target[:2] != ["..", ".cache"]:  # noqa: PLR2004
            return None
        try:
            with (
                self._held(".cache", user) as (cache, _),
                self._held(target[2], cache) as (data, _),
            ):
                return self._manifest_bytes(".data.manifest", data)
        except OSError:
            return None

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


def _job_of(name: str) -> str | None:
    """Return the key in `Jobs` of the job that a directory was staged for.

    It is empty for a shell's, which counts as its user's, and None for other directories.
    """
    if _SHELL.fullmatch(name):
        return ""
    match = _JOB.fullmatch(name)
    return (match[1] or "") + match[2] if match else None


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
