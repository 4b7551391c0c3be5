"""A training that is stopped at random moments, in every way, ends as if it had not been.

A schedule comes from its seed: a failure names it, and the same one can be run again.
"""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.conftest import SlurmCluster
from tests.cluster.hpml_on_slurm import UID, Desk
from tests.cluster.stops import KINDS, Life, schedule, table
from tests.unit.training_runs import TRAINS

pytestmark = TRAINS

ON_SLURM = list(KINDS)
LOCAL = ["hpml requeue, twice", "rank killed", "checkpoint damaged", "hpml requeue, twice"]


@pytest.fixture(scope="module")
def lives() -> Iterator[list[Life]]:
    """All trainings that ended as one without a stop; their figures are printed at the end."""
    lived: list[Life] = []
    yield lived
    sys.stdout.write(table(lived))


@pytest.fixture
def local_desk(tmp_path: Path) -> Desk:
    """A desk without a cluster."""
    nowhere = SlurmCluster(tmp_path, tmp_path / "no-slurm.conf", (), (), {})
    return Desk(nowhere, tmp_path)


def live(life: Life, kinds: list[str], seed: int, lives: list[Life]) -> None:
    """Train with the stops of a seed."""
    numbers = random.Random(seed)
    stops = schedule(numbers, numbers.sample(kinds, len(kinds)), life.steps)
    sys.stdout.write(f"{life.name}, seed {seed}: {stops}\n")
    if any(stop.kind == "time limit" for stop in stops):
        life.fields = {**life.fields, "resources": {**life.fields["resources"], "time": "1:00"}}
    with life:
        for stop in stops:
            life.suffer(stop, numbers)
        life.end()
    lives.append(life)


def test_stops_on_slurm(desk: Desk, lives: list[Life]) -> None:
    """Three of the four stops of `make test`: two that are warned, and a dead slurmd."""
    kinds = ["hpml requeue, twice", "preemption", "slurmd killed"]
    live(Life(desk, "three", {"resources": {}, "launcher": "srun"}), kinds, 2, lives)


@pytest.mark.parametrize(
    ("kinds", "ranks", "seed"),
    [
        pytest.param(["rank killed"], 1, 1, id="one"),
        pytest.param(LOCAL, 2, 2, id="four", marks=pytest.mark.slow),
    ],
)
def test_stops_on_the_local_backend(
    local_desk: Desk, lives: list[Life], kinds: list[str], ranks: int, seed: int
) -> None:
    """Requests, and a killed rank with and without a damaged checkpoint, by hand each time."""
    fields = {"resources": {"ranks_per_node": ranks}}
    live(Life(local_desk, "local", fields, local=True), kinds, seed, lives)


def test_a_full_disk_leaves_the_checkpoints_and_says_so(local_desk: Desk, tmp_path: Path) -> None:
    """The run fails with the reason; with more space, `hpml requeue` brings it to its end."""
    small = tmp_path / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size=14m,mode=777,uid={UID}", "tmpfs", str(small)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("needs root and the right to mount a tmpfs")
    try:
        fields = {"resources": {"ranks_per_node": 1}, "checkpoint": {"directory": str(small)}}
        with Life(local_desk, "full", fields, pause=0, local=True) as life:
            life.set_pace(life.steps)
            failed = local_desk.json("wait", life.job["id"], code=6)
            assert (
                f"{small}/step-00000400: PyTorch cannot write it: is the disk" in failed["reason"]
            )
            assert sorted(path.name for path in small.iterdir()) == [
                f"step-00000{number}00" for number in (1, 2, 3)
            ]
            subprocess.run(["mount", "-o", "remount,size=64m", str(small)], check=True)
            local_desk.hpml("requeue", life.job["id"])
            life.end()
    finally:
        subprocess.run(["umount", "--lazy", str(small)], check=True)


@pytest.mark.slow
def test_a_checkpoint_of_another_job_is_refused(local_desk: Desk, tmp_path: Path) -> None:
    """Two jobs that share a directory and differ in a setting: the second names it, and fails."""
    fields = {"resources": {}, "checkpoint": {"directory": str(tmp_path / "shared")}}
    with Life(local_desk, "first", fields, steps=250, pause=0, local=True) as first:
        first.end()
    with Life(local_desk, "second", fields, steps=500, pause=0, local=True) as second:
        failed = local_desk.json("wait", second.job["id"], code=6)
    assert "it belongs to other settings: steps 250 -> 500" in failed["reason"]
    assert second.attempt() == 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(9))
@pytest.mark.parametrize("launcher", ["torchrun", "srun", "mpirun"])
def test_a_hundred_stops(desk: Desk, lives: list[Life], launcher: str, seed: int) -> None:
    """Four kinds at a time, in turn, at each launcher; two or four ranks."""
    first = 4 * seed
    kinds = [ON_SLURM[(first + number) % len(ON_SLURM)] for number in range(4)]
    fields = {"launcher": launcher, "resources": {"ranks_per_node": 1 + seed % 2}}
    live(Life(desk, f"{launcher}{seed}", fields), kinds, seed, lives)


@pytest.mark.slow
def test_a_training_longer_than_its_limit(local_desk: Desk, lives: list[Life]) -> None:
    """On the local backend, with a lead of 15 s of its minute: two attempts, the weights of one."""
    life = Life(local_desk, "limited", {"resources": {"time": "1:00"}}, pause=0.06, local=True)
    live(life, [], 0, lives)
    assert life.attempt() >= 1


@pytest.mark.slow
def test_a_training_of_seven_minutes_with_a_limit_of_two(desk: Desk, lives: list[Life]) -> None:
    """On Slurm, with its lead of 30 s: at least five attempts, the weights of one."""
    life = Life(desk, "seven", {"resources": {"time": "2:00"}}, pause=0.4)
    live(life, [], 0, lives)
    assert life.attempt() >= 4
