"""How fast each way of copying is here: small files and a large one, from one place to others.

Everything is made anew in directories `.hpml-bench-*`, and removed again, also after an error or
when it is told to stop. What is read was written a moment before: the cache is warm, and the ladder
compares ways, not disks.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import tempfile
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from hpml_orchestrator.errors import CapacityError, InputError, StagingError
from hpml_orchestrator.records.texts import human_bytes
from hpml_orchestrator.staging.capacity import Need, check_room, room_at
from hpml_orchestrator.staging.choose import room_for_data
from hpml_orchestrator.staging.faults import shown, why
from hpml_orchestrator.staging.files import remove_tree
from hpml_orchestrator.staging.request import StagingStopped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = [
    "LARGE",
    "SMALL",
    "Data",
    "Latency",
    "Rung",
    "Sizes",
    "Way",
    "bench_directory",
    "check_room_for",
    "climb",
    "make_data",
    "open_latency",
]

SMALL, LARGE = "small", "large"
_PER_DIRECTORY = 500
_BLOCK_BYTES = 1 << 20
_SECONDS_PER_TARGET = 8.0
_LATENCY_FILES = 500
_WRITING_SECONDS = 0.5
_LEAST_FILES = 100


@dataclass(frozen=True)
class Sizes:
    """What is copied; files and the large file become less where writing them takes long.

    Attributes:
        files: how many small ones.
        file_bytes: the size of each.
        large_bytes: the size of the large one.
        runs: of each way, less where time runs out; the median counts.
    """

    files: int = 5000
    file_bytes: int = 16 << 10
    large_bytes: int = 256 << 20
    runs: int = 3


@dataclass(frozen=True)
class Way:
    """One way to copy.

    Attributes:
        name: as in the table.
        data: SMALL or LARGE.
        checked: it makes or checks a digest of every file.
        run: brings the data into an existing empty directory.
    """

    name: str
    data: str
    checked: bool
    run: Callable[[str], None]


@dataclass(frozen=True)
class Rung:
    """How fast a way was; `fault` instead where it failed.

    Attributes:
        way: its name.
        data: SMALL or LARGE.
        checked: with digests.
        files: copied in one run.
        bytes: likewise.
        seconds: of a run, the median.
        runs: how many.
        fault: why there is no figure; "" when there is.
    """

    way: str
    data: str
    checked: bool
    files: int
    bytes: int
    seconds: float
    runs: int
    fault: str = ""

    @property
    def files_per_second(self) -> float:
        """Small files per second."""
        return self.files / self.seconds if self.seconds else 0.0

    @property
    def bytes_per_second(self) -> float:
        """Bytes per second."""
        return self.bytes / self.seconds if self.seconds else 0.0


class Data(NamedTuple):
    """What was made: directories, and how much is in them."""

    small: str
    files: int
    small_bytes: int
    large: str
    large_bytes: int


class Latency(NamedTuple):
    """Seconds that opening, reading and closing a small file takes."""

    median: float
    worst: float
    files: int


@contextlib.contextmanager
def bench_directory(place: str, *, field: str = "DIR") -> Iterator[str]:
    """Make a directory of the benchmark's own; it is gone afterwards, whatever happened.

    Raises:
        InputError: there is no such directory, or nothing can be made in it.
    """
    try:
        made = tempfile.mkdtemp(prefix=".hpml-bench-", dir=place)
    except OSError as error:
        raise InputError(
            f"nothing can be written there: {why(error)}", field=field, value=place
        ) from error
    try:
        yield made
    finally:
        try:
            remove_tree(made)
        except OSError as error:
            raise StagingError(f"cannot remove {shown(made)}: {why(error)}") from error


def check_room_for(place: str, size: int, inodes: int, *, field: str) -> None:
    """Refuse a directory that has no room for so much; of memory half is left alone.

    Raises:
        CapacityError: it has not.
        InputError: there is no such directory.
    """
    try:
        room = room_at(place)
    except OSError as error:
        raise InputError(why(error), field=field, value=place) from error
    need = Need(size + inodes * room.block_bytes, inodes)
    if room_for_data(room) < need.bytes <= room.bytes:
        raise CapacityError(
            f"{human_bytes(need.bytes)} in {shown(place)} are more than half of the memory that "
            "is free",
            field=field,
            hint="copy less: --files and --large",
        )
    check_room(need, room, name=field, where=shown(place))


def make_data(directory: str, sizes: Sizes, should_stop: Callable[[], bool]) -> Data:
    """Write the files to be copied, fewer where half a second is not enough for all of them.

    Raises:
        OSError: the directory cannot be written.
        StagingStopped: should_stop said so.
    """
    block = memoryview(os.urandom(_BLOCK_BYTES + sizes.file_bytes))
    begin = time.monotonic()
    small = f"{directory}/small"
    os.mkdir(small)
    count = 0
    while count < sizes.files:
        late = time.monotonic() - begin > _WRITING_SECONDS
        if late and count >= min(_LEAST_FILES, sizes.files):
            break
        if should_stop():
            raise StagingStopped
        if count % _PER_DIRECTORY == 0:
            os.mkdir(f"{small}/{count // _PER_DIRECTORY:04}")
        start = count * 61 % _BLOCK_BYTES  # no two alike, for file systems that look for that
        with open(f"{small}/{count // _PER_DIRECTORY:04}/{count:06}.bin", "wb") as stream:
            stream.write(block[start : start + sizes.file_bytes])
        count += 1
    os.mkdir(f"{directory}/large")
    begin = time.monotonic()
    written = 0
    with open(f"{directory}/large/large.bin", "wb") as stream:
        while written < sizes.large_bytes:
            if written and time.monotonic() - begin > _WRITING_SECONDS:
                break
            if should_stop():
                raise StagingStopped
            written += stream.write(block[: min(_BLOCK_BYTES, sizes.large_bytes - written)])
    return Data(small, count, count * sizes.file_bytes, f"{directory}/large", written)


def open_latency(small: str, clock: Callable[[], float] = time.perf_counter) -> Latency:
    """Open, read and close some of the small files, one after the other."""
    taken = []
    for parent, _, names in os.walk(small):
        for name in names:
            begin = clock()
            fd = os.open(os.path.join(parent, name), os.O_RDONLY | os.O_CLOEXEC)
            os.read(fd, _BLOCK_BYTES)
            os.close(fd)
            taken.append(clock() - begin)
            if len(taken) == _LATENCY_FILES:
                break
        if len(taken) == _LATENCY_FILES:
            break
    return Latency(statistics.median(taken), max(taken), len(taken))


def climb(
    ways: Sequence[Way],
    data: Data,
    target: str,
    *,
    runs: int,
    should_stop: Callable[[], bool],
    clock: Callable[[], float] = time.perf_counter,
) -> list[Rung]:
    """Run the ways in turns and return how fast each was.

    A way that fails is not tried again, and the others go on.

    Args:
        ways: what to compare.
        data: what they copy.
        target: an existing directory of the benchmark's own.
        runs: of each way; those behind the first only while there is time.
        should_stop: asked between the runs.
        clock: seconds.

    Raises:
        StagingStopped: should_stop said so.
    """
    taken: dict[str, list[float]] = {way.name: [] for way in ways}
    faults: dict[str, str] = {}
    began = clock()
    for turn in range(runs):
        if turn and clock() - began > _SECONDS_PER_TARGET * turn / (turn + 1):
            break
        for way in ways:
            if should_stop():
                raise StagingStopped
            if way.name in faults:
                continue
            try:
                taken[way.name].append(_timed(way, target, clock))
            except StagingStopped:
                raise
            except (OSError, StagingError, InputError, shutil.Error) as error:
                if should_stop():
                    raise StagingStopped from error
                faults[way.name] = why(error).splitlines()[0]
    return [_rung(way, data, taken[way.name], faults.get(way.name, "")) for way in ways]


def _timed(way: Way, target: str, clock: Callable[[], float]) -> float:
    place = tempfile.mkdtemp(dir=target)
    try:
        begin = clock()
        way.run(place)
        return clock() - begin
    finally:
        remove_tree(place)


def _rung(way: Way, data: Data, taken: Sequence[float], fault: str) -> Rung:
    small = way.data == SMALL
    return Rung(
        way.name,
        way.data,
        way.checked,
        data.files if small else 1,
        data.small_bytes if small else data.large_bytes,
        statistics.median(taken) if taken else 0.0,
        len(taken),
        fault,
    )
