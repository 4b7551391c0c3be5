"""Whether staging pays: after how many epochs the time that it took has been saved.

Staging takes t_stage once; every epoch then takes t_local instead of t_remote to read. It has paid
after the least whole number of epochs n with n * (t_remote - t_local) > t_stage, and never does
where t_local >= t_remote. Both times are measured: t_remote by the staging itself, t_local by
reading a sample of what was staged.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Optional

from hpml_orchestrator.staging.delivery import COLLECTIVE
from hpml_orchestrator.staging.source import BLOCK_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hpml_orchestrator.staging.request import StageResult

__all__ = ["Payback", "Sample", "break_even", "payback_of", "sample_read"]

SAMPLE_SECONDS = 0.5
_LEAST_SECONDS = 0.02
_FILE_BYTES = 64 << 20  # of one file at most, so that a sample of few large files is one of several
_MOST_READERS = 4


@dataclass(frozen=True)
class Sample:
    """What reading some of the staged data has told.

    Attributes:
        bytes: read.
        files: read, as a whole or in part.
        seconds: wall time.
    """

    bytes: int
    files: int
    seconds: float


@dataclass(frozen=True)
class Payback:
    """What staging costs and saves on one node.

    Attributes:
        stage_seconds: that it took, once.
        remote_seconds: that this node takes to read all of the source once, as it did while it
            staged: with all of its workers at once.
        local_seconds: that it takes to read all of the staged data once.
        epochs: after which staging has paid; None for never.
        warm: the staged data were read out of the page cache, as they are right after staging.
    """

    stage_seconds: float
    remote_seconds: float
    local_seconds: float
    epochs: Optional[int]  # noqa: UP045 - runs on Python 3.9
    warm: bool = True

    def to_json(self) -> dict[str, Any]:
        """Return the figures for a record."""
        return {
            key: round(value, 6) if isinstance(value, float) else value
            for key, value in asdict(self).items()
        }


def break_even(stage_seconds: float, remote_seconds: float, local_seconds: float) -> Optional[int]:  # noqa: UP045
    """Return the epochs after which staging has paid; None for never.

    >>> break_even(10, 3, 1), break_even(10, 1, 1), break_even(0, 3, 1)
    (6, None, 1)
    """
    saved = remote_seconds - local_seconds
    if saved <= 0 or not math.isfinite(saved):
        return None
    return max(1, math.floor(stage_seconds / saved) + 1)


def payback_of(
    result: StageResult, *, sample: Callable[[str], Sample] | None = None
) -> Optional[Payback]:  # noqa: UP045
    """Return whether staging pays; None where this node did not read the source itself.

    Data that were there already, or that another node passed on, tell nothing of the source; nor
    does the first node of a chain, which reads no faster than the others take.

    Args:
        result: of one entry.
        sample: reads some of what lies at a path; `sample_read` with the result's workers when
            left out.
    """
    if result.reused or result.method in COLLECTIVE:
        return None
    if not result.bytes or result.read_seconds <= 0:
        return None
    workers = max(1, result.workers)
    if sample is not None:
        read = sample(result.path)
    else:  # the ranks wait for it: a tenth of what they have waited at most
        seconds = min(SAMPLE_SECONDS, max(_LEAST_SECONDS, result.seconds / 10))
        read = sample_read(result.path, readers=workers, seconds=seconds)
    if not read.bytes or not read.seconds:
        return None
    # of workers that were at work on average: threads come only as the source makes them wait
    busy = (result.read_seconds + result.write_seconds) / result.seconds if result.seconds else 1.0
    remote = result.read_seconds / min(workers, max(1.0, busy))
    local = result.bytes * read.seconds / read.bytes
    return Payback(result.seconds, remote, local, break_even(result.seconds, remote, local))


def sample_read(
    path: str,
    *,
    seconds: float = SAMPLE_SECONDS,
    readers: int = 1,
    clock: Callable[[], float] = time.monotonic,
) -> Sample:
    """Read files below a directory for a while, by several threads, and say how much that was.

    What cannot be read is passed over: this is a measurement and no check.

    Args:
        path: where the staged data lie.
        seconds: to read at most; looking for the files is counted, as a training does it too.
        readers: threads; no more than the CPUs that this process may use, and four.
        clock: seconds that never go back.
    """
    began = clock()
    ends = began + seconds
    files = _files(path)
    mutex = threading.Lock()
    counted = [0, 0]

    def work() -> None:
        block = memoryview(bytearray(BLOCK_BYTES))
        while clock() < ends:
            with mutex:
                name = next(files, None)
            if name is None:
                return
            done = _read(name, block, ends, clock)
            with mutex:
                counted[0] += done
                counted[1] += 1

    crew = min(max(1, readers), len(os.sched_getaffinity(0)), _MOST_READERS)
    threads = [threading.Thread(target=work, name="hpml-sample") for _ in range(crew - 1)]
    with contextlib.suppress(RuntimeError):  # the job may have no more threads
        for thread in threads:
            thread.start()
    work()
    for thread in threads:
        if thread.ident is not None:
            thread.join()
    return Sample(counted[0], counted[1], clock() - began)


def _files(path: str) -> Iterator[str]:
    """Yield the regular files below a directory."""
    waiting = [path]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                    elif entry.is_file(follow_symlinks=False):
                        yield entry.path
        except OSError:
            continue


def _read(path: str, block: memoryview, ends: float, clock: Callable[[], float]) -> int:
    """Read a file, or its beginning; returns the bytes."""
    done = 0
    with contextlib.suppress(OSError), open(path, "rb", buffering=0) as stream:
        while done < _FILE_BYTES and clock() < ends:
            got = stream.readinto(block)
            if not got:
                break
            done += got
    return done
