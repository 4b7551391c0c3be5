"""The copier: reads, hashes, writes and compares a plan with processes and threads.

The calling process copies small plans itself. Larger ones are copied by forked workers, one per CPU
of this job; if a server provides the source, each of them has several threads, which wait for the
server at the same time. The source's `SourceReader` reads, and notices that a file has changed.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import os
import stat
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import StagingError
from hpml_orchestrator.staging.crew import run_crew
from hpml_orchestrator.staging.faults import (
    FULL,
    NO_ROOM_LEFT,
    Problems,
    SourceChangedError,
    shown,
    why,
)
from hpml_orchestrator.staging.hashing import hashing
from hpml_orchestrator.staging.progress import FileRange, Tally, share_out
from hpml_orchestrator.staging.rate_limit import TokenBucket
from hpml_orchestrator.staging.source import BLOCK_BYTES
from hpml_orchestrator.staging.space import readers_for

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator
    from concurrent.futures import ThreadPoolExecutor

    from hpml_orchestrator.staging.faults import Retry
    from hpml_orchestrator.staging.hashing import Buffer, Digest, Hashing
    from hpml_orchestrator.staging.plan import CopyPlan, TreeEntry
    from hpml_orchestrator.staging.progress import CopyProgress
    from hpml_orchestrator.staging.source import Source, SourceReader

CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_MOST_PROCESSES = 16
_MOST_WORKERS = 64
_SMALL_FILES = 400  # up to here, this process is done before workers have started
_SMALL_BYTES = 32 << 20
_LARGE_BYTES = 64 << 20  # larger files get a second thread that reads and hashes ahead
_ZEROS = bytes(BLOCK_BYTES)


@dataclass(frozen=True)
class CopyOptions:
    """How to copy.

    Attributes:
        hash: make a digest of every file while it is copied.
        processes: workers; None for as many as CPUs (at most 16).
        threads: of each worker; None for 32 in all if a server provides the source, else 1.
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
    """Copy everything in a plan to an existing empty directory; the caller removes it on errors.

    Returns:
        the digest of each of the plan's files; nothing without hashing.

    Raises:
        StagingError: a source cannot be read, is damaged or changed, the target is full, or a
            worker died.
        StagingStopped: retry's should_stop returned True.
        OSError: the target cannot be written.
    """
    copier = _Copier(plan, source, target_dir, options, retry, progress)
    problems, threads = copier.problems, copier.processes * copier.threads
    # With `goes_on`, hard links may lead to files that could not be copied.
    missing = [FileNotFoundError] if options.goes_on else []
    target = os.open(target_dir, _DIRECTORY)
    try:
        make_directories(plan, target, retry)
        copier.run()
        # A reader notices changed files; only a directory's time shows new and removed ones.
        if source.kind in {"tree", "file"}:
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
    # Links come after all files, so that no file can be written through one. Times of directories
    # come last: creating a name in a directory changes its time.
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
    """Check a source's directories again: adding or removing a file changes their times."""
    if not stat.S_ISDIR(plan.top.mode):
        return  # a single file has no directory of its own
    left = collections.deque([plan.top, *plan.directories])

    def check(_thread: int) -> None:
        with contextlib.suppress(IndexError):  # none left
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

    _in_threads(threads, check)
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
        if not source.ordered:
            served = readers_for(plan.source_root)
            # A compressed stream has one position, so it is read by one thread. Other sources get a
            # thread for each request that a server should have in flight.
            self.threads = options.threads or -(-served // self.processes)
        self._batches = [FileRange(0, len(plan.files))]
        if not source.ordered:
            self._batches = share_out(plan.files, _MOST_WORKERS, streams=self.processes)

    def _process_count(self) -> int:
        plan, asked = self._plan, self._options.processes
        small = len(plan.files) <= _SMALL_FILES and plan.bytes <= _SMALL_BYTES
        # Forking workers takes longer than copying a few hundred small files.
        if self._source.ordered or len(plan.files) <= 1 or (small and asked is None):
            return 1
        return max(1, min(asked or len(os.sched_getaffinity(0)), _MOST_PROCESSES))

    def run(self) -> None:
        """Copy all files; faults of single files go to `problems`."""
        if self.processes == 1:
            left = iter(self._batches)
            lock = threading.Lock()

            def take() -> FileRange | None:
                with lock:
                    return next(left, None)

            self._work(take, self.problems.add, self._done, self._retry)
            return
        reports: dict[str, Callable[..., None]] = {"done": self._done, "problem": self.problems.add}
        run_crew(
            self.processes,
            self._work_forked,
            # The plan is in the workers' memory from the fork, so the queue only carries numbers.
            range(len(self._batches)),
            on_report=lambda word, *values: reports[word](*values),
            heartbeat=self._heartbeat,
        )

    def _heartbeat(self) -> None:
        self._retry.check_stop()
        self._progress.add(0)

    def _done(self, more_bytes: int, more_files: int, digests: list[tuple[int, bytes]]) -> None:
        for number, digest in digests:
            self.digests[number] = digest
        self._progress.add(more_bytes, more_files)

    def _work_forked(
        self, _number: int, take: Callable[[], int | None], tell: Callable[..., None]
    ) -> None:
        def take_batch() -> FileRange | None:
            found = take()
            return None if found is None else self._batches[found]

        def problem(path: str, reason: str, _error: BaseException) -> None:
            tell("problem", path, reason)

        # Workers need not check whether to stop: the parent does, and kills them.
        retry = self._retry.stopped_by(lambda: False)
        self._work(take_batch, problem, functools.partial(tell, "done"), retry)

    def _work(
        self,
        take: Callable[[], FileRange | None],
        problem: Callable[[str, str, BaseException], None],
        done: Callable[[int, int, list[tuple[int, bytes]]], None],
        whole: Retry,
    ) -> None:
        failed: list[BaseException] = []
        # The first failure of a thread stops the others, which may be in the middle of large files.
        retry = whole.stopped_by(lambda: bool(failed) or whole.stops())
        reader = self._source.reader(self._plan)
        worker = _Worker(self._plan, self._target, self._options, reader, retry, problem)
        rate = self._options.opens_per_second / self.processes
        if rate > 0:
            worker.wait = TokenBucket(rate, check_stop=retry.check_stop).take
        # What was read from a compressed stream cannot be read again.
        worker.tries_again = not self._source.ordered

        def drain(_thread: int) -> None:
            tally = Tally(done)
            try:
                while not failed and (batch := take()) is not None:
                    worker.do(batch, tally)
            except BaseException as error:  # noqa: BLE001 - raised again below
                failed.append(error)

        try:
            _in_threads(self.threads, drain)
        finally:
            worker.close()
        if failed:
            raise failed[0]


class _Worker:
    """Copies batches; one per process, its threads call `do` at once."""

    def __init__(
        self,
        plan: CopyPlan,
        target: str,
        options: CopyOptions,
        reader: SourceReader,
        retry: Retry,
        problem: Callable[[str, str, BaseException], None],
    ) -> None:
        self._plan = plan
        self._goes_on = options.goes_on
        self._how: Hashing | None = hashing() if options.hash else None
        self._faulty = False  # if set, files are only read, to find further faults
        self._reader = reader
        self._retry = retry
        self._problem = problem
        self._to = os.open(target, _DIRECTORY)
        self._pool: ThreadPoolExecutor | None = None
        self.wait: Callable[[], object] | None = None
        self.tries_again = True

    def close(self) -> None:
        """Close what is open."""
        if self._pool is not None:
            self._pool.shutdown()
        os.close(self._to)
        self._reader.close()

    def do(self, batch: FileRange, tally: Tally) -> None:
        """Copy a batch; raises StagingError if the target is full or the source is damaged."""
        files = self._plan.files
        for number in range(batch.first, batch.last):
            entry = files[number]
            self._retry.check_stop()
            before = tally.bytes
            try:
                try:
                    # Only after a fault does a file cost a closure and the machinery of `Retry`;
                    # there may be millions of files.
                    self._file(number, entry, tally, before)
                except OSError as error:
                    if not self.tries_again or self._faulty:
                        raise
                    again = functools.partial(self._file, number, entry, tally, before)
                    self._retry.again(again, error)
            except SourceChangedError as error:
                tally.bytes = before
                self._wrong(entry, str(error), error)
            except OSError as error:
                tally.bytes = before
                # A full target fails for all other files as well. Other faults are collected, so
                # that one run reports all files that need attention.
                if error.errno in FULL:
                    raise StagingError(
                        f"cannot write {shown(entry.path)} of {self._plan.name}: {why(error)}",
                        hint=NO_ROOM_LEFT,
                    ) from error
                self._wrong(entry, why(error), error)
        tally.report()

    def _wrong(self, entry: TreeEntry, reason: str, error: BaseException) -> None:
        if not self._goes_on:
            self._faulty = True
        self._problem(entry.path, reason, error)

    def _file(self, number: int, entry: TreeEntry, tally: Tally, before: int) -> None:
        """Copy a file; after an error, remove its part and restore the byte count `before`."""
        tally.bytes = before
        if self.wait is not None:
            self.wait()
        pieces = self._reader.read(number)
        data = next(pieces, b"")
        # Nothing is published after a fault. The rest is still read, to report all faults at once.
        if self._faulty:
            return
        if len(data) == entry.size:
            self._whole(number, entry, data, pieces, tally)
        else:
            self._blocks(number, entry, itertools.chain((data,), pieces), tally)
        tally.files += 1

    def _whole(
        self, number: int, entry: TreeEntry, data: Buffer, rest: Iterator[Buffer], tally: Tally
    ) -> None:
        """Write a file that came in one piece, with as few system calls as possible.

        Asking for the rest makes the reader run its checks at the end of the file.
        """
        if self._how is not None:
            digest = self._how.new()
            digest.update(data)
            tally.digests.append((number, digest.digest()))
        size = entry.size
        tally.bytes += size
        target = os.open(entry.path, CREATE, (entry.mode & 0o777) | 0o600, dir_fd=self._to)
        try:
            try:
                wrote = os.write(target, data) if size else 0
                while wrote < size:
                    wrote += os.write(target, memoryview(data)[wrote:])
                # The time is set last and marks a file as finished; `collect` keeps unfinished
                # files out by it.
                if next(rest, None) is not None:
                    raise SourceChangedError
                os.utime(target, ns=(entry.mtime_ns, entry.mtime_ns))
            finally:
                os.close(target)
        except BaseException:
            os.unlink(entry.path, dir_fd=self._to)
            raise

    def _blocks(
        self, number: int, entry: TreeEntry, pieces: Iterator[Buffer], tally: Tally
    ) -> None:
        """Write a file block by block; holes stay holes, as the check of free space assumed."""
        digest = self._how.new() if self._how is not None else None
        target = os.open(entry.path, CREATE, (entry.mode & 0o777) | 0o600, dir_fd=self._to)
        at = 0
        blocks = self._hashed(entry, digest, pieces)
        try:
            try:
                # Zeros at the end of a sparse file are not written, so its size must be set first.
                if entry.stored < entry.size:
                    os.ftruncate(target, entry.size)
                for data in blocks:
                    self._write(target, entry, data, at)
                    at += len(data)
                    tally.bytes += len(data)
                    tally.report_sometimes()
                    self._retry.check_stop()
                if at != entry.size:
                    raise SourceChangedError
                os.utime(target, ns=(entry.mtime_ns, entry.mtime_ns))
            finally:
                blocks.close()
                os.close(target)
        except BaseException:
            os.unlink(entry.path, dir_fd=self._to)
            raise
        if digest is not None:
            tally.digests.append((number, digest.digest()))

    def _hashed(
        self, entry: TreeEntry, digest: Digest | None, pieces: Iterator[Buffer]
    ) -> Generator[Buffer, None, None]:
        """Yield and hash the pieces of a file; of a large one, a thread reads one piece ahead.

        Writing into the page cache takes about as long as reading from it and hashing, so a large
        file is copied as fast as by `cp`, digest included.
        """

        def following() -> Buffer | None:
            data = next(pieces, None)
            if data is not None and digest is not None:
                digest.update(data)
            return data

        if entry.size < _LARGE_BYTES:
            while (data := following()) is not None:
                yield data
            return
        if self._pool is None:
            from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415 - takes time

            self._pool = ThreadPoolExecutor()
        # The reader has two buffers: the thread fills one while the caller writes the other.
        ahead = self._pool.submit(following)
        try:
            while (data := ahead.result()) is not None:
                ahead = self._pool.submit(following)
                yield data
        finally:
            ahead.exception()  # wait for the thread: the caller closes the source next

    @staticmethod
    def _write(target: int, entry: TreeEntry, data: Buffer, at: int) -> None:
        count = wrote = len(data)
        if entry.stored == entry.size or data != _ZEROS[:count]:
            wrote = os.pwrite(target, data, at)
        while wrote < count:
            wrote += os.pwrite(target, memoryview(data)[wrote:], at + wrote)


def _in_threads(count: int, work: Callable[[int], None]) -> None:
    """Run `work` in `count` threads, this one included; in fewer if the job's limit is reached."""
    threads = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(1, count)]
    try:
        with contextlib.suppress(RuntimeError):
            for thread in threads:
                thread.start()
        work(0)
    finally:
        for thread in threads:
            if thread.ident is not None:
                thread.join()
