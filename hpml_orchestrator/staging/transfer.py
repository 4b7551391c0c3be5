"""Carry out a plan: copy files from one directory into a new one."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import StagingError
from hpml_orchestrator.staging.faults import FULL, Problems, Retry, shown, why
from hpml_orchestrator.staging.plan import data_ranges, has_holes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpml_orchestrator.staging.plan import Entry, Plan
    from hpml_orchestrator.staging.progress import Progress

__all__ = ["Copier", "SourceChangedError", "make_directories", "make_links", "new_file"]

CHUNK_BYTES = 1 << 20
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_NO_SENDFILE = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})
_SAMPLE_FILES = 64
_WAIT_SECONDS_PER_FILE = 0.0002  # less is a busy CPU rather than a slow source
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class SourceChangedError(Exception):
    """A source is not what it was when it was scanned."""

    def __init__(self) -> None:
        super().__init__("changed while it was copied")


class Copier:
    """Copies the files of a plan; one thread when the CPU is the limit, several for latency."""

    def __init__(self, plan: Plan, retry: Retry, progress: Progress, *, threads: int) -> None:
        self._plan = plan
        self._retry = retry
        self._progress = progress
        self._threads = threads
        self._problems = Problems(f"cannot stage {shown(plan.source_root)}")
        self._halted = False
        self._from = self._to = -1

    def run(self, target: str) -> None:
        """Fill an existing empty directory.

        Raises:
            StagingError: a source cannot be read or changed, or the target is full.
            StagingStopped: should_stop said so.
            OSError: the target cannot be written.
        """
        with contextlib.ExitStack() as stack:
            self._from = os.open(self._plan.source_root, _DIRECTORY)
            stack.callback(os.close, self._from)
            self._to = os.open(target, _DIRECTORY)
            stack.callback(os.close, self._to)
            make_directories(self._plan, self._to, self._retry)
            self._copy_files(self._plan.files)
            self._check_directories()
            self._problems.raise_any("if the source is being written, stage it when it is complete")
            make_links(self._plan, self._to, self._retry)

    def _copy_files(self, files: list[Entry]) -> None:
        wall, cpu = time.perf_counter(), time.thread_time()
        for entry in files[:_SAMPLE_FILES]:
            self._copy(entry)
        cpu = time.thread_time() - cpu
        waited = time.perf_counter() - wall - cpu
        rest = deque(files[_SAMPLE_FILES:])
        slow = waited > max(cpu, _WAIT_SECONDS_PER_FILE * min(len(files), _SAMPLE_FILES))
        threads = min(self._threads, len(rest)) if slow else 1
        if threads <= 1:
            self._drain(rest)
            return
        with ThreadPoolExecutor(threads, thread_name_prefix="hpml-stage") as pool:
            for future in [pool.submit(self._drain, rest) for _ in range(threads)]:
                future.result()

    def _drain(self, queue: deque[Entry]) -> None:
        try:
            while queue and not self._halted:
                try:
                    entry = queue.popleft()
                except IndexError:
                    return
                self._copy(entry)
        except BaseException:
            self._halted = True
            raise

    def _copy(self, entry: Entry) -> None:
        """Copy a file; after a first problem only look whether the others have one too."""
        self._retry.check_stop()
        try:
            self._retry(lambda: self._try(entry))
        except SourceChangedError as error:
            self._problems.add(entry.path, str(error), error)
        except OSError as error:
            if error.errno in FULL:
                raise StagingError(
                    f"cannot write {shown(entry.path)} of {shown(self._plan.source_root)}: "
                    f"{why(error)}",
                    hint="something else took the room that was free before; choose another target",
                ) from error
            self._problems.add(entry.path, why(error), error)

    def _try(self, entry: Entry) -> None:
        name = self._plan.origins.get(entry.path, entry.path)
        source = os.open(name, _READ, dir_fd=self._from)
        try:
            before = os.fstat(source)
            _check_same(entry, before)
            if self._problems:
                return
            with new_file(entry, self._to) as target:
                self._fill(source, target, before)
                _check_same(entry, os.fstat(source))
        finally:
            os.close(source)
        self._progress.add(0, 1)

    def _fill(self, source: int, target: int, info: os.stat_result) -> None:
        ranges = [(0, info.st_size)]
        if has_holes(info):
            ranges = data_ranges(source, info.st_size)
            os.ftruncate(target, info.st_size)
        done = 0
        try:
            for start, end in ranges:
                os.lseek(target, start, os.SEEK_SET)
                at = start
                while at < end:
                    if at > start:
                        self._retry.check_stop()
                    count = _send(source, target, at, min(CHUNK_BYTES, end - at))
                    if count == 0:
                        raise SourceChangedError
                    at += count
                    done += count
                    self._progress.add(count)
        except BaseException:
            self._progress.add(-done)
            raise
        if done < info.st_size:  # the holes
            self._progress.add(info.st_size - done)

    def _check_directories(self) -> None:
        for entry in [self._plan.top, *self._plan.directories]:
            if not stat.S_ISDIR(entry.mode):
                continue  # made up for a single file
            try:
                info = os.stat(entry.path or ".", dir_fd=self._from, follow_symlinks=False)
            except OSError as error:
                self._problems.add(entry.path or ".", why(error), error)
                continue
            if info.st_mtime_ns != entry.mtime_ns:
                self._problems.add(entry.path or ".", str(SourceChangedError()))


def _send(source: int, target: int, offset: int, count: int) -> int:
    """Copy up to count bytes inside the kernel, or through memory where it cannot."""
    try:
        return os.sendfile(target, source, offset, count)
    except OSError as error:
        if error.errno not in _NO_SENDFILE:
            raise
    data = os.pread(source, count, offset)
    return os.write(target, data) if data else 0


def _check_same(entry: Entry, info: os.stat_result) -> None:
    now = (stat.S_IFMT(info.st_mode), info.st_size, info.st_mtime_ns, info.st_ino)
    if now != (stat.S_IFREG, entry.size, entry.mtime_ns, entry.inode):
        raise SourceChangedError


@contextlib.contextmanager
def new_file(entry: Entry, dir_fd: int, name: str = "") -> Iterator[int]:
    """Create a file with the entry's mode (& ~umask, owner rw) and time; gone after an error."""
    path = name or entry.path
    fd = os.open(path, _CREATE, (entry.mode & 0o777) | 0o600, dir_fd=dir_fd)
    try:
        try:
            yield fd
            os.utime(fd, ns=(entry.mtime_ns, entry.mtime_ns))
        finally:
            os.close(fd)
    except BaseException:
        os.unlink(path, dir_fd=dir_fd)
        raise


def make_directories(plan: Plan, dir_fd: int, retry: Retry) -> None:
    """Create the directories of a plan with their modes (& ~umask, owner rwx)."""
    for entry in plan.directories:
        retry.check_stop()
        os.mkdir(entry.path, (entry.mode & 0o777) | 0o700, dir_fd=dir_fd)


def make_links(plan: Plan, dir_fd: int, retry: Retry) -> None:
    """Create hard and symbolic links, then set the times of directories, children first."""
    for hard in plan.hard_links:
        retry.check_stop()
        os.link(hard.first, hard.path, src_dir_fd=dir_fd, dst_dir_fd=dir_fd, follow_symlinks=False)
    for link in plan.symlinks:
        retry.check_stop()
        os.symlink(link.target, link.path, dir_fd=dir_fd)
        times = (link.mtime_ns, link.mtime_ns)
        os.utime(link.path, ns=times, dir_fd=dir_fd, follow_symlinks=False)
    for entry in reversed([plan.top, *plan.directories]):
        times = (entry.mtime_ns, entry.mtime_ns)
        os.utime(entry.path or ".", ns=times, dir_fd=dir_fd, follow_symlinks=False)
