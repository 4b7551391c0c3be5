"""Whether staging pays: after how many epochs the time that it took has been saved.

Staging takes t_stage once; every epoch then takes t_local instead of t_remote to read. It has paid
after the least whole number of epochs n with n * (t_remote - t_local) > t_stage, and never does
where t_local >= t_remote. Both times are measured: t_remote by the staging itself, t_local by
reading a sample of what was staged, both as if by the same number of readers.
"""

from __future__ import annotations

import math
import os
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Optional, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpml_orchestrator.staging.request import StageResult

__all__ = ["Payback", "Sample", "break_even", "payback_of", "sample_staged"]

_MOST_SECONDS = 0.5
_LEAST_SECONDS = 0.02
_MOST_FILE_BYTES = 8 << 20
_BLOCK_BYTES = 1 << 20
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class Sample(NamedTuple):
    """What reading took: the opens, and the bytes.

    Attributes:
        files: how many were opened.
        open_seconds: for all of them.
        bytes: how many were read.
        read_seconds: for all of them.
    """

    files: int
    open_seconds: float
    bytes: int
    read_seconds: float


class _Reread(Protocol):
    def __call__(self, path: str, *, seconds: float) -> Sample: ...


@dataclass(frozen=True)
class Payback:
    """What staging costs and saves on one node.

    Attributes:
        stage_seconds: that it took, once.
        remote_seconds: that this node takes to read all of the source once, as it did while it
            staged: with as many workers as were busy on average.
        local_seconds: that it takes to read all of the staged data once, with as many, up to CPUs.
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


def sample_staged(
    path: str, *, seconds: float = 0.5, clock: Callable[[], float] = time.perf_counter
) -> Sample:
    """Read the beginnings of staged files for a while; those that cannot be read are passed over.

    Args:
        path: where the staged data lie.
        seconds: stop after so long.
        clock: seconds.
    """
    begin = clock()
    files = size = 0
    opening = reading = 0.0
    for name in (f"{top}/{name}" for top, _, names in os.walk(path) for name in names):
        start = clock()
        if start - begin > seconds:
            break
        try:
            fd = os.open(name, _READ)
        except OSError:
            continue
        opened = clock()
        got = 0
        try:
            while got < _MOST_FILE_BYTES and (block := os.read(fd, _BLOCK_BYTES)):
                got += len(block)
        except OSError:
            continue
        finally:
            os.close(fd)
        files += 1
        size += got
        opening += opened - start
        reading += clock() - opened
    return Sample(files, opening, size, reading)


def payback_of(result: StageResult, *, reread: _Reread = sample_staged) -> Optional[Payback]:  # noqa: UP045
    """Return whether staging pays; None where this node did not read the source itself.

    Data that were there already, or that another node passed on, tell nothing of the source; nor
    does the first node of a chain, which reads no faster than the others take.

    Args:
        result: of one entry.
        reread: reads some of what lies at a path.
    """
    if result.reused or result.method == "chain":
        return None
    if not result.bytes or result.read_seconds <= 0:
        return None
    # of workers that were at work on average: those that wait for a batch read nothing
    busy = (result.read_seconds + result.write_seconds) / result.seconds if result.seconds else 1.0
    readers = min(max(1, result.workers), max(1.0, busy))
    # the ranks wait for it: a tenth of what they have waited at most
    seconds = min(_MOST_SECONDS, max(_LEAST_SECONDS, result.seconds / 10))
    sample = reread(result.path, seconds=seconds)
    alone = _epoch_seconds(sample, result.files, result.bytes)
    if alone is None:
        return None
    local = alone / min(readers, len(os.sched_getaffinity(0)))  # what waits for nobody needs a CPU
    remote = result.read_seconds / readers
    return Payback(result.seconds, remote, local, break_even(result.seconds, remote, local))


def _epoch_seconds(sample: Sample, files: int, size: int) -> float | None:
    """Return the time of so many files and bytes, one after the other; None without a sample.

    files * (time of an open) + bytes * (time of a byte): the sample need not have files as large as
    those that it stands for.
    """
    if not sample.files or (size and not sample.bytes):
        return None
    opens = files * sample.open_seconds / sample.files
    return opens + (size * sample.read_seconds / sample.bytes if sample.bytes else 0.0)
