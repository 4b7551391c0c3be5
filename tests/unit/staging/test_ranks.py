"""One job's ranks on a node: one stages, the others wait, and the kernel sees the locks."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hpml_orchestrator.records.job import Stage
from hpml_orchestrator.staging.request import Bases
from hpml_orchestrator.staging.stage import CopyStager
from tests.patience import eventually
from tests.unit.staging.conftest import partials, same

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

RANK = """
import os, signal, sys, time
from hpml_orchestrator.errors import StagingError
from hpml_orchestrator.staging.copy import CopyOptions
from hpml_orchestrator.records.job import Stage
from hpml_orchestrator.staging.request import Bases
from hpml_orchestrator.staging.stage import CopyStager
real = os.readv
def slow(*arguments):  # so that there is a middle on any machine: 300 files take 0.6 s at least
    time.sleep(float(sys.argv[4]))
    return real(*arguments)
os.readv = slow
stop = []
signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
def report(done, files, all_bytes, all_files):
    print("heard", files, all_files, flush=True)
stager = CopyStager(
    sys.argv[3],
    bases=Bases(shm=sys.argv[1]),
    on_progress=report,
    should_stop=lambda: bool(stop),
    options=CopyOptions(processes=2, threads=1),
)
keep = sys.argv[3] != "7.0"
try:
    result = stager.stage(Stage("data", sys.argv[2], target="shm", keep=keep))
except StagingError as error:
    print(error, flush=True)
    stager.cleanup()
    sys.exit(8)
print("reused" if result.reused else "copied", flush=True)
sys.stdin.read()
"""
FILES = 300
RANKS = 9
ENDS = ("copied", "reused", "stopped")


@pytest.fixture
def many(tmp_path: Path) -> Path:
    """Give a tree of FILES files."""
    top = tmp_path / "many"
    top.mkdir()
    for number in range(FILES):
        (top / str(number)).write_bytes(b"%d" % number * 700)
    return top


@pytest.fixture
def rank(base: Path, many: Path, tmp_path: Path) -> Iterator[Callable[..., Rank]]:
    """Start ranks of one job; they are killed when the test ends."""
    started: list[Rank] = []

    def start(key: str = "7.0", pause: float = 0.004) -> Rank:
        log = tmp_path / f"rank{len(started)}"
        with log.open("w") as output:
            process = subprocess.Popen(
                [sys.executable, "-c", RANK, str(base), str(many), key, str(pause)],
                stdin=subprocess.PIPE,
                stdout=output,
            )
        started.append((process, log))
        return process, log

    yield start
    for process, _ in started:
        process.kill()
        process.communicate()


Rank = tuple[subprocess.Popen[bytes], Path]


def end_of(one: Rank) -> str:
    """Wait until a rank has the data, or was stopped; returns how it got them."""
    process, log = one

    def said() -> str:
        lines = [line for line in log.read_text().splitlines() if line in ENDS]
        assert lines or process.poll() is None
        return lines[0] if lines else ""

    return eventually(said)


def copier(base: Path, ranks: dict[int, Rank]) -> int:
    """Return the rank that copies now, by the name of the directory that it fills."""

    def copying() -> int:
        with contextlib.suppress(FileNotFoundError):  # one that was listed is gone already
            pids = (int(path.name.split("-")[1]) for path in partials(base))
            return next((pid for pid in pids if pid in ranks), 0)
        return 0

    return eventually(copying, pause=0.002)


@pytest.mark.parametrize("count", [5, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("jobs", ["one", "many"])
def test_the_one_that_stages_is_killed_while_others_wait(
    base: Path, many: Path, rank: Callable[..., Rank], jobs: str, count: int
) -> None:
    """Eight ranks of a job, or eight jobs: another one takes over, and all have whole data."""
    chance = random.Random(3)
    keys = (f"{number}.0" if jobs == "many" else "7.0" for number in itertools.count(10))
    ranks = {one[0].pid: one for one in (rank(next(keys)) for _ in range(RANKS))}
    midway = 0
    for _ in range(count):
        pid = copier(base, ranks)
        time.sleep(chance.uniform(0, 0.6))
        is_published = bool(list(base.glob("hpml-*/*/data")))
        os.kill(pid, signal.SIGKILL)
        ranks.pop(pid)[0].wait()
        if is_published:
            break
        midway += 1
        another = rank(next(keys))
        ranks[another[0].pid] = another
    assert midway
    ends = sorted(end_of(one) for one in ranks.values())
    assert ends[1:] == ["reused"] * (len(ranks) - 1)
    (published,) = base.glob("hpml-*/*/data")
    assert same(published, many)
    assert partials(base) == []
    for process, _ in ranks.values():
        process.kill()
        process.wait()
    key = next(keys)
    stager = CopyStager(key, bases=Bases(shm=str(base)))
    found = stager.stage(Stage("data", str(many), target="shm"))
    assert found.reused == (jobs == "many"), "what went with its job is gone with its last rank"
    stager.cleanup()
    assert os.listdir(base) == ([] if jobs == "one" else [f"hpml-{os.getuid()}"])


def test_one_that_waits_takes_over_from_one_that_is_stopped(
    base: Path, rank: Callable[..., Rank]
) -> None:
    """The agent's stop is heard within a file, leaves nothing, and does not end the other."""
    first = rank(pause=0.5)  # minutes, if it went on
    copier(base, {first[0].pid: first})
    second = rank()
    eventually(lambda: has_open(second[0].pid, ".lease"), "it waits")
    first[0].send_signal(signal.SIGTERM)
    assert end_of(first) == "stopped"
    assert first[0].wait() == 8
    assert end_of(second) == "copied"
    second[0].kill()
    second[0].wait()
    alone = rank("8.0", pause=0.5)
    copier(base, {alone[0].pid: alone})
    alone[0].send_signal(signal.SIGTERM)
    assert end_of(alone) == "stopped"
    assert alone[0].wait() == 8
    assert os.listdir(base) == []


def has_open(pid: int, name: str) -> bool:
    """Return whether a process has a file of that name open now."""
    with contextlib.suppress(FileNotFoundError):  # closed meanwhile
        return any(
            os.path.basename(os.readlink(fd)) == name for fd in Path(f"/proc/{pid}/fd").iterdir()
        )
    return False


def test_ranks_that_wait_hear_how_far_it_is(
    base: Path, many: Path, rank: Callable[..., Rank]
) -> None:
    """Each that waits hears the figures of the one that copies: it is at work, not dead."""
    for number in range(700):
        (many / f"more{number}").write_bytes(b"x")
    first = rank()
    copier(base, {first[0].pid: first})
    waiting = [rank() for _ in range(3)]
    assert end_of(first) == "copied"
    for one in waiting:
        assert end_of(one) == "reused"
        heard = [line.split() for line in one[1].read_text().splitlines() if "heard" in line]
        assert heard, "nothing was heard in seconds of waiting"
        assert all(0 < int(done) <= int(total) == FILES + 700 for _, done, total in heard)


def held_locks(pids: set[int]) -> set[tuple[int, int, int]]:
    """Return (major, minor, inode) of the files that processes have locked, by the kernel."""
    found = set()
    for line in Path("/proc/locks").read_text().splitlines():
        fields = line.split()
        if "->" not in fields and int(fields[4]) in pids:
            major, minor, inode = fields[5].split(":")
            found.add((int(major, 16), int(minor, 16), int(inode)))
    return found


def test_no_lock_is_on_the_source_nor_in_named_memory(
    base: Path, many: Path, rank: Callable[..., Rank]
) -> None:
    """In the middle of a copy all locks are on files of the target; no shared memory has a name."""
    one = rank()
    pid = copier(base, {one[0].pid: one})
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    family = {pid, *map(int, children)}
    ours = {
        (os.major(info.st_dev), os.minor(info.st_dev), info.st_ino)
        for info in (path.lstat() for path in [base, *base.rglob("*")])
    }
    locks = held_locks(family)
    named = {
        line.split(maxsplit=5)[5]
        for process in family
        for line in Path(f"/proc/{process}/maps").read_text().splitlines()
        # those of the executor lose theirs as they are made
        if "/dev/shm/" in line and not line.endswith(" (deleted)")
    }
    assert not list(base.glob("hpml-*/*/data")), "it was over too soon"
    assert locks, "one stager holds at least its own lock"
    assert locks <= ours
    assert named == set()
    assert end_of(one) == "copied"
