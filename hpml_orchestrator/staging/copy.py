"""The copier: reads, hashes, writes and compares the files of a plan in processes and threads.

The calling process copies small plans itself. Forked workers copy larger ones, one per CPU of this
job; on a network file system each has several threads, which wait for the server in parallel. The
source's `SourceReader` does the reading and notices files that have changed.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import os
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from hpml_orchestrator.errors import StagingError
from hpml_orchestrator.staging.manifest import hashing
from hpml_orchestrator.staging.request import (
    FULL,
    NO_ROOM_LEFT,
    Problems,
    SourceChangedError,
    shown,
    why,
)
from hpml_orchestrator.staging.source import BLOCK_BYTES, WRITE_BYTES
from hpml_orchestrator.staging.space import readers_for
from hpml_orchestrator.staging.workers import TokenBucket, run_forked, run_here

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from concurrent.futures import ThreadPoolExecutor
    from typing import Self

    from hpml_orchestrator.staging.manifest import Hashing
    from hpml_orchestrator.staging.plan import CopyPlan, TreeEntry
    from hpml_orchestrator.staging.request import Retry
    from hpml_orchestrator.staging.source import Buffer, Source
    from hpml_orchestrator.staging.workers import Report

OnProgress = Callable[[int, int, int, int], None]
"""Called with (bytes done, files done, total bytes, total files)."""

_PERIOD_SECONDS = 1.0

FILE_COST_BYTES = 64 << 10
"""Opening and creating a file takes as long as copying this many bytes (measured, warm cache)."""

_BATCHES_PER_WORKER = 64
_MOST_BATCHES = 1024  # this process spends about 0.2 ms on each
_LEAST_COST_BYTES = 2 << 20
_FILES_PER_THREAD = 8  # per batch: its threads wait for the slowest one
_REPORT_SECONDS = 0.2


class CopyProgress:
    """Counts bytes and files of one copy; safe from several threads."""

    def __init__(
        self,
        tell: OnProgress | None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tell = tell
        self._clock = clock
        self._lock = threading.Lock()
        self._next = clock() + _PERIOD_SECONDS
        self._bytes = self._files = 0
        self._bytes_total = self._files_total = 0

    def expect(self, total_bytes: int, total_files: int) -> None:
        """Set the totals."""
        self._bytes_total, self._files_total = total_bytes, total_files

    def add(self, done_bytes: int, done_files: int = 0) -> None:
        """Add to the counts (negative if work is repeated), and report them once a second."""
        with self._lock:
            self._bytes += done_bytes
            self._files += done_files
            if self._tell is None or self._clock() < self._next:
                return
            self._next = self._clock() + _PERIOD_SECONDS
            self._call()

    def finish(self) -> None:
        """Report the final figures."""
        with self._lock:
            self._call()

    def _call(self) -> None:
        if self._tell is not None:
            self._tell(self._bytes, self._files, self._bytes_total, self._files_total)


class FileRange(NamedTuple):
    """Files `first` up to, but not including, `last`."""

    first: int
    last: int


def share_out(files: Sequence[TreeEntry], workers: int, threads: int = 1) -> list[FileRange]:
    """Divide files into batches of similar effort.

    Args:
        files: files of the plan.
        workers: number of processes. Each works in a different part of the tree, because processes
            that create files in one directory block each other.
        threads: threads per process, which share a batch.
    """
    total = sum(entry.size for entry in files) + len(files) * FILE_COST_BYTES
    most = max(_LEAST_COST_BYTES, total // min(_MOST_BATCHES, workers * _BATCHES_PER_WORKER))
    fewest = min(threads * _FILES_PER_THREAD, -(-len(files) // workers)) if threads > 1 else 1
    found = []
    first = cost = 0
    for number, entry in enumerate(files):
        cost += entry.size + FILE_COST_BYTES
        if cost >= most and number + 1 - first >= fewest:
            found.append(FileRange(first, number + 1))
            first, cost = number + 1, 0
    if first < len(files):
        found.append(FileRange(first, len(files)))
    # Reorder with a stride: consecutive batches, which are copied at the same time, are then in
    # different parts of the tree.
    each = -(-len(found) // workers)
    return [one for at in range(each) for one in found[at::each]]


class Tally:
    """Counts the work of one thread and reports it from time to time.

    Args:
        report: called with bytes and files since the last report.
    """

    def __init__(self, report: Callable[[int, int], object]) -> None:
        self.bytes = self.files = 0
        self._report = report
        self._reported = (0, 0)
        self._next = 0.0

    def report_sometimes(self) -> None:
        """Report at most a few times per second."""
        if time.monotonic() >= self._next:
            self.report()

    def report(self) -> None:
        """Report the work since the last report; negative bytes if a file is reread."""
        then, self._reported = self._reported, (self.bytes, self.files)
        self._report(self.bytes - then[0], self.files - then[1])
        self._next = time.monotonic() + _REPORT_SECONDS


CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_MOST_PROCESSES = 16
_SMALL_FILES = 400  # up to here, this process finishes before workers could start
_SMALL_BYTES = 32 << 20
_ZEROS = bytes(BLOCK_BYTES)


@dataclass(frozen=True)
class CopyOptions:
    """How to copy.

    Attributes:
        hash: hash every file while copying it.
        processes: number of workers; None for one per CPU, at most 16.
        threads: threads per worker; None for 32 in total on a network file system, else 1.
        opens_per_second: limit of source files opened per second by all workers; 0 for none.
        goes_on: if a file cannot be copied, copy the others before raising the error.
    """

    hash: bool = True
    processes: int | None = None
    threads: int | None = None
    opens_per_second: float = 0.0
    goes_on: bool = False


def copy(
    plan: CopyPlan,
    source: Source,
    target_dir: str,
    *,
    options: CopyOptions,
    retry: Retry,
    progress: CopyProgress,
) -> list[bytes]:
    """Copy a whole plan into an existing empty directory; on errors, the caller removes it.

    Returns:
        the digest of each file of the plan; empty without hashing.

    Raises:
        StagingError: a source cannot be read, is damaged or has changed, the target is full, or a
            worker died.
        StagingStopped: retry's should_stop returned True.
        OSError: the target cannot be written.
    """
    copier = _Copier(plan, source, target_dir, options, retry, progress)
    problems = copier.problems
    # With `goes_on`, hard links may refer to files that could not be copied.
    missing = [FileNotFoundError] if options.goes_on else []
    target = os.open(target_dir, _DIRECTORY)
    try:
        make_directories(plan, target, retry)
        copier.run()
        # Readers notice changed files; only a directory's time reveals new and removed ones.
        if source.kind in {"tree", "file"}:
            threads = options.threads or readers_for(plan.source_root)
            check_directories(plan, retry, problems, threads=threads)
        if not options.goes_on:
            problems.raise_any()
        with contextlib.suppress(*missing):
            make_links(plan, target, retry)
        problems.raise_any()
    finally:
        os.close(target)
    return copier.digests if options.hash else []


def make_directories(plan: CopyPlan, dir_fd: int, retry: Retry) -> None:
    """Create the directories of a plan with their modes (& ~umask, owner rwx)."""
    for entry in plan.directories:
        retry.check_stop()
        os.mkdir(entry.path, (entry.mode & 0o777) | 0o700, dir_fd=dir_fd)


def make_links(plan: CopyPlan, dir_fd: int, retry: Retry) -> None:
    """Create hard and symbolic links, then set the times of directories, children first."""
    # Create links after all files, so that no file is written through one. Set directory times
    # last, because creating a name changes them.
    for hard in plan.hard_links:
        retry.check_stop()
        os.link(hard.first, hard.path, src_dir_fd=dir_fd, dst_dir_fd=dir_fd, follow_symlinks=False)
    for link in plan.symlinks:
        retry.check_stop()
        os.symlink(link.target, link.path, dir_fd=dir_fd)
        times = (link.mtime_ns, link.mtime_ns)
        os.utime(link.path, ns=times, dir_fd=dir_fd, follow_symlinks=False)
    for entry in reversed([plan.top, *plan.directories]):
        retry.check_stop()
        times = (entry.mtime_ns, entry.mtime_ns)
        os.utime(entry.path or ".", ns=times, dir_fd=dir_fd, follow_symlinks=False)


def check_directories(
    plan: CopyPlan, retry: Retry, problems: Problems, *, threads: int = 1
) -> None:
    """Check that no file was added to or removed from the source's directories, by their times."""
    if not stat.S_ISDIR(plan.top.mode):
        return  # a single file has no directory of its own
    left = collections.deque([plan.top, *plan.directories])

    def check() -> None:
        with contextlib.suppress(IndexError):  # no directories left
            while not retry.stops():
                entry = left.popleft()
                path = f"{plan.source_root}/{entry.path}" if entry.path else plan.source_root
                try:
                    info = retry(functools.partial(os.stat, path))
                except OSError as error:
                    problems.add(entry.path or ".", why(error), error)
                    continue
                if info.st_mtime_ns != entry.mtime_ns:
                    problems.add(entry.path or ".", str(SourceChangedError()))

    with _Threads(threads) as together:
        together.run(check)
    retry.check_stop()


class _Copier:
    """Lets threads and forked workers copy the files of a plan."""

    def __init__(
        self,
        plan: CopyPlan,
        source: Source,
        target: str,
        options: CopyOptions,
        retry: Retry,
        progress: CopyProgress,
    ) -> None:
        self._plan = plan
        self._source = source
        self._target = target
        self._options = options
        self._retry = retry
        self._progress = progress
        self.digests = [b""] * len(plan.files)
        self.problems = Problems(f"cannot stage {plan.name}")
        self.processes = self._process_count()
        self.threads = 1
        self._batches = [FileRange(0, len(plan.files))]
        # A compressed stream has one position, so one thread reads it. Other sources get one thread
        # per request that a server should have in flight.
        if not source.ordered:
            served = readers_for(plan.source_root)
            self.threads = options.threads or -(-served // self.processes)
        if self.processes > 1:
            self._batches = share_out(plan.files, self.processes, self.threads)

    def _process_count(self) -> int:
        plan, asked = self._plan, self._options.processes
        small = len(plan.files) <= _SMALL_FILES and plan.bytes <= _SMALL_BYTES
        # Forking workers takes longer than copying a few hundred small files.
        if self._source.ordered or len(plan.files) <= 1 or (small and asked is None):
            return 1
        return max(1, min(asked or len(os.sched_getaffinity(0)), _MOST_PROCESSES))

    def run(self) -> None:
        """Copy all files; faults of single files are added to `problems`."""
        count, add = len(self._batches), self._progress.add
        if self.processes == 1:
            begin = functools.partial(self._begin, self._retry)
            run_here(count, begin, on_result=self._done, on_report=add)
            return
        run_forked(
            count,
            # Workers need not check whether to stop: this process does, and kills them.
            functools.partial(self._begin, self._retry.stopped_by(lambda: False)),
            workers=self.processes,
            on_result=self._done,
            on_report=add,
            heartbeat=self._heartbeat,
        )

    def _heartbeat(self) -> None:
        self._retry.check_stop()
        self._progress.add(0)

    def _done(self, copied: _Copied) -> None:
        for number, digest in copied.digests:
            self.digests[number] = digest
        for path, reason in copied.problems:
            self.problems.add(path, reason)

    @contextlib.contextmanager
    def _begin(self, retry: Retry, report: Report) -> Iterator[Callable[[int], _Copied]]:
        """Yield the function that copies a batch, given its number."""
        rate = self._options.opens_per_second / self.processes
        with _Threads(self.threads) as threads, contextlib.ExitStack() as stack:
            worker = _Worker(self._plan, self._source, self._target, self._options, retry, rate)
            stack.callback(worker.close)
            yield lambda number: worker.copy(self._batches[number], threads, report)


class _Copied(NamedTuple):
    """The result of a batch: (number, digest) of files, and (path, reason) of faults."""

    digests: list[tuple[int, bytes]]
    problems: list[tuple[str, str]]


class _Worker:
    """Copies batches; one per process."""

    def __init__(
        self,
        plan: CopyPlan,
        source: Source,
        target: str,
        options: CopyOptions,
        retry: Retry,
        rate: float,
    ) -> None:
        self._plan = plan
        self._goes_on = options.goes_on
        self._how: Hashing | None = hashing() if options.hash else None
        self._faulty = False  # when set, files are only read, to find further faults
        self._failure: BaseException | None = None
        # A thread's first failure stops the others, which may be in the middle of large files.
        self._retry = retry.stopped_by(lambda: self._failure is not None or retry.stops())
        # Data read from a compressed stream cannot be read again.
        self._tries_again = not source.ordered
        self._take = TokenBucket(rate, check_stop=self._retry.check_stop).take if rate > 0 else None
        self._reader = source.reader(plan)
        self._to = os.open(target, _DIRECTORY)

    def close(self) -> None:
        """Close what is open."""
        os.close(self._to)
        self._reader.close()

    def copy(self, batch: FileRange, threads: _Threads, report: Report) -> _Copied:
        """Copy a batch; raises StagingError if the target is full or the source is damaged."""
        numbers = iter(range(batch.first, batch.last))
        copied = _Copied([], [])

        def drain() -> None:
            tally = Tally(report)
            try:
                for number in numbers:  # the iterator is shared by all threads
                    self._retry.check_stop()
                    self._try(number, tally, copied)
                    tally.report_sometimes()
            except BaseException as error:  # noqa: BLE001 - raised again below
                self._failure = self._failure or error
            tally.report()

        threads.run(drain)
        if self._failure is not None:
            raise self._failure
        return copied

    def _try(self, number: int, tally: Tally, copied: _Copied) -> None:
        """Copy a file with retries, and record its faults."""
        entry = self._plan.files[number]
        before = tally.bytes
        try:
            try:
                # Use `Retry`, which costs a closure, only after a fault: there may be millions of
                # files.
                self._file(number, entry, tally, before, copied)
            except OSError as error:
                if not self._tries_again or self._faulty:
                    raise
                again = functools.partial(self._file, number, entry, tally, before, copied)
                self._retry.again(again, error)
        except SourceChangedError as error:
            tally.bytes = before
            self._wrong(entry, str(error), copied)
        except OSError as error:
            tally.bytes = before
            # All other files would fail on a full target as well. Other faults are collected, so
            # that one run reports all files that need attention.
            if error.errno in FULL:
                raise StagingError(
                    f"cannot write {shown(entry.path)} of {self._plan.name}: {why(error)}",
                    hint=NO_ROOM_LEFT,
                ) from error
            self._wrong(entry, why(error), copied)

    def _wrong(self, entry: TreeEntry, reason: str, copied: _Copied) -> None:
        if not self._goes_on:
            self._faulty = True
        copied.problems.append((entry.path, reason))

    def _file(
        self, number: int, entry: TreeEntry, tally: Tally, before: int, copied: _Copied
    ) -> None:
        """Copy a file; after an error, remove the partial file and restore the count `before`."""
        tally.bytes = before
        if self._take is not None:
            self._take()
        pieces = self._reader.read(number)
        data = next(pieces, b"")
        # Nothing is published after a fault; keep reading to report all faults at once.
        if self._faulty:
            return
        if len(data) == entry.size:
            tally.bytes += entry.size
            digest = self._whole(entry, data, pieces)
        else:
            digest = self._blocks(entry, itertools.chain((data,), pieces), tally)
        tally.files += 1
        copied.digests.append((number, digest))

    def _whole(self, entry: TreeEntry, data: Buffer, rest: Iterator[Buffer]) -> bytes:
        """Write a file that arrived in one piece, with as few system calls as possible.

        Asking for more data makes the reader run its checks at the end of the file.
        """
        size, digest = entry.size, b""
        if self._how is not None:
            hasher = self._how.new()
            hasher.update(data)
            digest = hasher.digest()
        target = os.open(entry.path, CREATE, (entry.mode & 0o777) | 0o400, dir_fd=self._to)
        try:
            try:
                wrote = os.write(target, data) if 0 < size <= WRITE_BYTES else 0
                if wrote < size:
                    _write_all(target, memoryview(data)[wrote:], wrote)
                # The time is set last and marks a file as finished, by which `collect` recognises
                # unfinished ones.
                if next(rest, None) is not None:
                    raise SourceChangedError
                os.utime(target, ns=(entry.mtime_ns, entry.mtime_ns))
            finally:
                os.close(target)
        except BaseException:
            os.unlink(entry.path, dir_fd=self._to)
            raise
        return digest

    def _blocks(self, entry: TreeEntry, pieces: Iterator[Buffer], tally: Tally) -> bytes:
        """Write a file block by block; holes stay holes, as the check of free space assumed."""
        digest = self._how.new() if self._how is not None else None
        target = os.open(entry.path, CREATE, (entry.mode & 0o777) | 0o400, dir_fd=self._to)
        at = 0
        try:
            try:
                # Zeros at the end of a sparse file are not written, so set its size first.
                if entry.stored < entry.size:
                    os.ftruncate(target, entry.size)
                for data in pieces:
                    if digest is not None:
                        digest.update(data)
                    if entry.stored == entry.size or data != _ZEROS[: len(data)]:
                        _write_all(target, data, at)
                    at += len(data)
                    tally.bytes += len(data)
                    tally.report_sometimes()
                    self._retry.check_stop()
                if at != entry.size:
                    raise SourceChangedError
                os.utime(target, ns=(entry.mtime_ns, entry.mtime_ns))
            finally:
                os.close(target)
        except BaseException:
            os.unlink(entry.path, dir_fd=self._to)
            raise
        return digest.digest() if digest is not None else b""


def _write_all(target: int, data: Buffer, at: int) -> None:
    view = memoryview(data)
    while view:
        wrote = os.pwrite(target, view[:WRITE_BYTES], at)
        view, at = view[wrote:], at + wrote


class _Threads:
    """A pool of this thread and others that share work."""

    def __init__(self, count: int) -> None:
        self._others = count - 1
        self._pool: ThreadPoolExecutor | None = None

    def __enter__(self) -> Self:
        if self._others > 0:
            from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415 - takes time

            self._pool = ThreadPoolExecutor(self._others)
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown()

    def run(self, work: Callable[[], None]) -> None:
        """Run `work` in all threads at once; in fewer if the job's thread limit is reached."""
        others = []
        if self._pool is not None:
            with contextlib.suppress(RuntimeError):
                for _ in range(self._others):
                    others.append(self._pool.submit(work))  # noqa: PERF401 - may end early
        try:
            work()
        finally:
            for other in others:
                other.exception()
        for other in others:
            other.result()
