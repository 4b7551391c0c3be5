"""The staging engine: share a plan out, copy it with processes and threads, hash it on the way.

Small jobs are done by the calling process. Larger ones are done by forked workers, one per CPU
that this job really has; where the source is served to this node, each of them has several threads,
which wait for the server side by side.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import os
import stat
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hpml_orchestrator.staging.batches import share_out
from hpml_orchestrator.staging.board import Board
from hpml_orchestrator.staging.capacity import readers_for
from hpml_orchestrator.staging.copying import CREATE, Copying, Task
from hpml_orchestrator.staging.crew import run_crew
from hpml_orchestrator.staging.faults import Problems, SourceChangedError, why
from hpml_orchestrator.staging.hashing import PIECE_BYTES, hashing
from hpml_orchestrator.staging.manners import TokenBucket
from hpml_orchestrator.staging.readercopying import ReaderCopying
from hpml_orchestrator.staging.transfer import make_directories, make_links
from hpml_orchestrator.staging.treecopying import TreeCopying

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpml_orchestrator.staging.batches import Batch
    from hpml_orchestrator.staging.faults import Retry
    from hpml_orchestrator.staging.plan import Plan
    from hpml_orchestrator.staging.progress import Progress
    from hpml_orchestrator.staging.source import Source

__all__ = ["Copied", "EngineOptions", "check_directories", "copy"]

_MOST_PROCESSES = 16
_MOST_WORKERS = 64
_SMALL_FILES = 400  # fewer are copied sooner than workers are there
_SMALL_BYTES = 32 << 20
_TREES = ("tree", "file")
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


@dataclass(frozen=True)
class EngineOptions:
    """How to copy.

    Attributes:
        hash: make a digest of every file while it is copied.
        processes: workers; None for as many as CPUs (at most 16).
        threads: of each worker; None for 32 in all where the source is served to this node, else 1.
        opens_per_second: most source files opened per second, all workers together; 0 for any.
        drop_cache: let the source's pages leave the memory once they are read; None for where
            the source lies on a file system that is served to this node.
        goes_on: copy all others where a file cannot be copied, which is an error all the same.
    """

    hash: bool = True
    processes: int | None = None
    threads: int | None = None
    opens_per_second: float = 0.0
    drop_cache: bool | None = None
    goes_on: bool = False


@dataclass(frozen=True)
class Copied:
    """What a copy took.

    Attributes:
        digests: of each of the plan's files; empty when they were not hashed.
        workers: processes times threads.
    """

    digests: list[bytes] = field(default_factory=list)
    workers: int = 1


def copy(
    plan: Plan,
    source: Source,
    target_dir: str,
    *,
    options: EngineOptions,
    retry: Retry,
    progress: Progress,
    piece_bytes: int = PIECE_BYTES,
) -> Copied:
    """Fill an existing empty directory with what was planned.

    Args:
        plan: from `source.plan()`.
        source: what is copied.
        target_dir: the directory.
        options: how.
        retry: calls again after faults that pass, and says when to stop.
        progress: told what is done.
        piece_bytes: larger files are shared by several workers and hashed in pieces of this size.

    Raises:
        StagingError: a source cannot be read, is damaged or changed, the target is full, or a
            worker died. What lies in the directory then is for the caller to remove.
        StagingStopped: retry's should_stop said so.
        OSError: the target cannot be written.
    """
    return _Copy(plan, source, target_dir, options, retry, progress, piece_bytes).run()


class _Copy:
    def __init__(
        self,
        plan: Plan,
        source: Source,
        target_dir: str,
        options: EngineOptions,
        retry: Retry,
        progress: Progress,
        piece_bytes: int,
    ) -> None:
        self._plan = plan
        self._source = source
        self._options = options
        self._retry = retry
        self._progress = progress
        self._told = (0, 0)
        self._tree = source.kind in _TREES
        self._problems = Problems(f"cannot stage {plan.name}")
        self._missing = [FileNotFoundError] if options.goes_on else []  # what could not be copied
        self._processes = self._process_count()
        shares = share_out(
            plan,
            _MOST_WORKERS,
            piece_bytes=piece_bytes,
            ordered=source.ordered,
            streams=self._processes,
        )
        readers = readers_for(plan.source_root)
        self._threads = 1
        if not source.ordered:
            self._threads = options.threads or -(-readers // self._processes)
        drop_cache = options.drop_cache
        if drop_cache is None:
            # the node has its own copy then, and the source's pages would push out those of it
            drop_cache = readers > 1
        self._task = Task(
            plan=plan,
            shares=shares,
            target=target_dir,
            how=hashing() if options.hash else None,
            piece_bytes=piece_bytes,
            drop_cache=drop_cache,
            ordered=source.ordered,
            take=None,
            goes_on=options.goes_on,
        )
        self._board = Board(shares.slots, self._processes * self._threads)

    def _process_count(self) -> int:
        plan = self._plan
        if self._source.ordered:
            return 1
        wanted = self._options.processes or len(os.sched_getaffinity(0))
        small = len(plan.files) <= _SMALL_FILES and plan.bytes <= _SMALL_BYTES
        if small and self._options.processes is None:
            return 1
        return max(1, min(wanted, _MOST_PROCESSES))

    def run(self) -> Copied:
        task, plan = self._task, self._plan
        target = os.open(task.target, _DIRECTORY)
        try:
            make_directories(plan, target, self._retry)
            self._make_large(target)
            self._copy_files()
            if self._tree:
                threads = self._threads * self._processes
                check_directories(plan, self._retry, self._problems, threads=threads)
            if not task.goes_on:
                self._problems.raise_any()
            with contextlib.suppress(*self._missing):
                self._finish_large(target)
                make_links(plan, target, self._retry)
            self._problems.raise_any()
            digests = []
            if task.how is not None:
                digests = task.shares.digests(plan, self._board.digest, task.how)
        finally:
            os.close(target)
            self._board.close()
        return Copied(digests, self._processes * self._threads)

    def _in_pieces(self) -> list[int]:
        return [batch.first for batch in self._task.shares.batches if batch.start == 0 < batch.end]

    def _make_large(self, target: int) -> None:
        """Create the files that several workers will write."""
        for number in self._in_pieces():
            entry = self._plan.files[number]
            fd = os.open(entry.path, CREATE, (entry.mode & 0o777) | 0o600, dir_fd=target)
            try:
                os.ftruncate(fd, entry.size)
            finally:
                os.close(fd)

    def _finish_large(self, target: int) -> None:
        for number in self._in_pieces():
            entry = self._plan.files[number]
            times = (entry.mtime_ns, entry.mtime_ns)
            with contextlib.suppress(*self._missing):
                os.utime(entry.path, ns=times, dir_fd=target, follow_symlinks=False)

    def _copy_files(self) -> None:
        batches = self._task.shares.batches
        if self._processes == 1:
            left = iter(batches)
            lock = threading.Lock()

            def take() -> Batch | None:
                with lock:
                    return next(left, None)

            self._work(0, take, self._problems.add, self._retry, self._progress)
            return
        run_crew(
            self._processes,
            self._work_forked,
            range(len(batches)),
            told=self._problems.add,
            heartbeat=self._heartbeat,
        )
        self._heartbeat()

    def _heartbeat(self) -> None:
        self._retry.check_stop()
        done = self._board.done()
        then, self._told = self._told, (done.bytes, done.files)
        self._progress.add(done.bytes - then[0], done.files - then[1])

    def _work_forked(
        self, number: int, take: Callable[[], int | None], tell: Callable[..., None]
    ) -> None:
        """Do what one worker does, in the forked process."""
        batches = self._task.shares.batches

        def take_batch() -> Batch | None:
            found = take()
            return None if found is None else batches[found]

        def problem(path: str, reason: str, _error: BaseException) -> None:
            tell(path, reason)

        # the parent asks whether to stop, and kills its workers then
        self._work(number, take_batch, problem, self._retry.stopped_by(lambda: False), None)

    def _work(
        self,
        number: int,
        take: Callable[[], Batch | None],
        problem: Callable[[str, str, BaseException], None],
        whole: Retry,
        progress: Progress | None,
    ) -> None:
        """Copy batches with the threads of one process until there are no more."""
        failed: list[BaseException] = []
        retry = whole.stopped_by(lambda: bool(failed) or whole.stops())
        rate = self._options.opens_per_second / self._processes
        task = self._task
        if rate > 0:
            task = task._replace(take=TokenBucket(rate, check_stop=retry.check_stop).take)
        copying = self._copying(task, retry, problem)

        def drain(thread: int) -> None:
            tally = self._board.tally(thread * self._processes + number, progress)
            try:
                while not failed and (batch := take()) is not None:
                    copying.do(batch, tally)
            except BaseException as error:  # noqa: BLE001 - raised again below
                failed.append(error)

        try:
            _in_threads(self._threads, drain)
        finally:
            copying.close()
        if failed:
            raise failed[0]

    def _copying(
        self, task: Task, retry: Retry, problem: Callable[[str, str, BaseException], None]
    ) -> Copying:
        if self._tree:
            return TreeCopying(task, self._board, retry, problem)
        reader = self._source.reader(self._plan)
        return ReaderCopying(task, self._board, retry, problem, reader)


def check_directories(plan: Plan, retry: Retry, problems: Problems, *, threads: int = 1) -> None:
    """Look at a source's directories again: files that came or went show in their times."""
    if not stat.S_ISDIR(plan.top.mode):
        return  # made up for a single file
    left = collections.deque([plan.top, *plan.directories])

    def check(_thread: int) -> None:
        with contextlib.suppress(IndexError):  # none left
            while not retry.stops():
                entry = left.popleft()
                path = f"{plan.source_root}/{entry.path}" if entry.path else plan.source_root
                try:
                    info = retry(functools.partial(os.lstat, path))
                except OSError as error:
                    problems.add(entry.path or ".", why(error), error)
                    continue
                if info.st_mtime_ns != entry.mtime_ns:
                    problems.add(entry.path or ".", str(SourceChangedError()))

    _in_threads(threads, check)
    retry.check_stop()


def _in_threads(count: int, work: Callable[[int], None]) -> None:
    """Do work in so many threads, this one being number 0; in fewer where there may be no more."""
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
