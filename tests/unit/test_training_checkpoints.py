"""hpml_checkpoint.py: what a save leaves on the disk, however it ends, and what is loaded."""

from __future__ import annotations

import json
import random
import resource
import uuid
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from hpml_orchestrator.node.channel import ChannelReader
from hpml_orchestrator.records import feed
from tests.patience import eventually
from tests.unit.training_runs import (
    JOBS,
    LIMIT_SECONDS,
    TRAINS,
    finish,
    load,
    run_ranks,
    start_ranks,
)

pytestmark = TRAINS


@pytest.fixture(scope="module")
def job() -> ModuleType:
    """Return hpml_checkpoint.py as a module."""
    return load(JOBS / "hpml_checkpoint.py")


def steps_of(directory: Path) -> list[int]:
    return sorted(int(one.name.removeprefix("step-")) for one in directory.iterdir())


def state_of(step: int) -> dict[str, Any]:
    import torch  # noqa: PLC0415 - skipped where there is none

    return {"weights": torch.full((1000,), float(step)), "epoch": 3, "names": [("a", None)]}


def test_the_last_ones_are_kept_and_the_newest_is_loaded(job: ModuleType, tmp_path: Path) -> None:
    """Weights and position come back, with the random numbers that would have followed."""
    import torch  # noqa: PLC0415

    sent: list[tuple[str, dict[str, Any]]] = []
    counted: list[str] = []
    channel = SimpleNamespace(
        event=lambda name, **data: sent.append((name, data)),
        count=lambda **more: counted.extend(more),
    )
    checkpoints = job.Checkpoints(tmp_path / "a/b", keep=2, job={"lr": 0.1}, channel=channel)
    assert checkpoints.load() is None
    for step in (5, 99_999_999, 100_000_000):
        checkpoints.save(state_of(step), step=step)
    followed = torch.rand(3).tolist(), random.random()
    assert steps_of(tmp_path / "a/b") == [99_999_999, 100_000_000]
    found = job.Checkpoints(str(tmp_path / "a/b"), job={"lr": 0.1}, channel=channel).load()
    assert (torch.rand(3).tolist(), random.random()) == followed
    assert (found.step, found.state["epoch"], found.state["names"]) == (10**8, 3, [("a", None)])
    assert torch.equal(found.state["weights"], state_of(10**8)["weights"])
    assert [name for name, _ in sent] == ["checkpoint"] * 3 + ["resumed"]
    assert counted == ["save_seconds"] * 3
    assert sent[0][1]["step"] == 5
    assert sent[0][1]["seconds"] > 0
    assert sent[0][1]["size_bytes"] > 4000
    assert sent[-1][1] == {"step": 10**8, "checkpoint": str(found.path)}


def damaged(file: str, change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda path: (path / file).write_bytes(change((path / file).read_bytes()))


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (damaged("state.pt", lambda raw: raw[:-100]), "state.pt is missing or damaged"),
        (
            damaged("state.pt", lambda raw: raw[:900] + bytes([raw[900] ^ 1]) + raw[901:]),
            "state.pt is missing or",
        ),
        (lambda path: (path / "state.pt").unlink(), "state.pt is missing or damaged"),
        (damaged("checkpoint.json", lambda raw: raw[:50]), "checkpoint.json is missing or damaged"),
        (damaged("checkpoint.json", lambda _: b"[]"), "checkpoint.json is missing or damaged"),
        (lambda path: (path / "checkpoint.json").unlink(), "checkpoint.json is missing or"),
    ],
)
def test_a_damaged_checkpoint_is_skipped_aloud(
    job: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[Path], object],
    named: str,
) -> None:
    """The next older one is used, and later saves are not taken for older than the damaged one."""
    checkpoints = job.Checkpoints(tmp_path, keep=2)
    for step in (10, 20, 30):
        checkpoints.save(state_of(step), step=step)
    damage(tmp_path / "step-00000030")
    assert checkpoints.latest().step == 20
    assert f"step-00000030 is skipped: {named}" in capsys.readouterr().err
    checkpoints.save(state_of(25), step=25)
    assert steps_of(tmp_path) == [20, 25]
    assert checkpoints.latest().step == 25

    for path in tmp_path.iterdir():
        damage(path)
    with pytest.raises(job.CheckpointError, match=f"no checkpoint in {tmp_path} is complete"):
        checkpoints.latest()


@pytest.mark.parametrize(
    ("settings", "manifest", "named"),
    [
        ({"lr": 0.2, "shape": (1, 2)}, {}, "other settings: lr 0.1 -> 0.2"),
        ({"lr": 0.1, "shape": (1, 2), "seed": 1}, {}, "other settings: seed None -> 1"),
        ({"lr": 0.1}, {}, r"other settings: shape \[1, 2\] -> None"),
        ({"lr": 0.1, "shape": (1, 2)}, {"format": "else 7"}, "its format is 'else 7', not 'hpml-"),
    ],
)
def test_a_checkpoint_of_another_job_is_refused(
    job: ModuleType, tmp_path: Path, settings: Any, manifest: Any, named: str
) -> None:
    """It is not skipped: the older ones are of that job too."""
    saved = job.Checkpoints(tmp_path, job={"lr": 0.1, "shape": (1, 2)})
    saved.save({}, step=1)
    assert saved.latest().step == 1
    file = tmp_path / "step-00000001/checkpoint.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **manifest}))
    with pytest.raises(job.CheckpointError, match=f"checkpoint {file.parent}: .*{named}"):
        job.Checkpoints(tmp_path, job=settings).latest()


def test_what_is_no_directory_is_named(job: ModuleType, tmp_path: Path) -> None:
    """An old single file, for example."""
    (tmp_path / "c.pt").touch()
    with pytest.raises(job.CheckpointError, match=f"checkpoint {tmp_path}/c.pt: File exists"):
        job.Checkpoints(tmp_path / "c.pt").load()


def test_a_state_that_cannot_be_read_again_is_refused(job: ModuleType, tmp_path: Path) -> None:
    """At once, not when a training has to be resumed; what could be saved is still there."""
    checkpoints = job.Checkpoints(tmp_path)
    checkpoints.save({"epoch": 1}, step=1)
    with pytest.raises(job.CheckpointError, match="in dicts and lists, but not pathlib"):
        checkpoints.save({"path": tmp_path}, step=2)
    assert steps_of(tmp_path) == [1]
    assert [*tmp_path.iterdir()] == [tmp_path / "step-00000001"]


@pytest.fixture
def full_disk() -> Iterator[Callable[[int], None]]:
    """Return what makes files end at a size: as on a full disk, writing fails."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("size", [0, 100, 3000])
def test_a_full_disk_leaves_the_earlier_ones(
    job: ModuleType, tmp_path: Path, full_disk: Callable[[int], None], size: int
) -> None:
    """The error names the path, nothing of the new one is left, and later there may be room."""
    checkpoints = job.Checkpoints(tmp_path)
    checkpoints.save(state_of(1), step=1)
    full_disk(size)
    with pytest.raises(job.CheckpointError, match=f"{tmp_path}/step-00000002: .*disk") as caught:
        checkpoints.save(state_of(2), step=2)
    assert len(str(caught.value).splitlines()) == 1
    full_disk(resource.RLIM_INFINITY)
    assert [*tmp_path.iterdir()] == [tmp_path / "step-00000001"]
    assert checkpoints.latest().step == 1
    checkpoints.save(state_of(3), step=3)
    assert checkpoints.latest().step == 3


class Killed(BaseException):
    """What no `except Exception` sees: the process is gone."""


@pytest.mark.parametrize("again", [False, True])
def test_a_save_can_be_killed_at_any_moment(
    job: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """A complete checkpoint is there after each, and the next save succeeds and cleans up."""
    calls = count()
    dies_at = -1

    def dying(real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            number = next(calls)
            if number == dies_at:
                raise Killed
            return real(*args, **kwargs)

        return call

    for holder, name in (
        (job.torch, "save"),
        (job.os, "fsync"),
        (job.os, "rename"),
        (job.os, "mkdir"),
        (job.shutil, "rmtree"),
        (Path, "rename"),
        (Path, "write_text"),
    ):
        monkeypatch.setattr(holder, name, dying(getattr(holder, name)))
    survived = 0
    for moment in count():
        directory = tmp_path / str(moment)
        checkpoints = job.Checkpoints(directory, keep=2)
        for step in (1, 2, 3):
            checkpoints.save(state_of(step), step=step)
        calls, dies_at = count(), moment
        step = 3 if again else 4  # a step that was saved before
        try:
            checkpoints.save(state_of(step), step=step)
        except Killed:
            survived += 1
        else:
            break
        finally:
            dies_at = -1
        assert checkpoints.latest().step in (2, 3, 4)
        checkpoints.save(state_of(5), step=5)
        assert checkpoints.latest().step == 5
        assert len(list(directory.iterdir())) == 2
    assert survived > 8


RANKS = """
import os, sys, time
import torch, torch.distributed as dist
from pathlib import Path
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
sys.path.insert(0, sys.argv[1])
import hpml_checkpoint
from hpml_checkpoint import CheckpointError, Checkpoints, StopAgreement

home = Path(sys.argv[2])
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
checkpoints = Checkpoints(home, keep=2)
assert checkpoints.load() is None

# What one rank wants, both learn at the same call, and never again.
agreement = StopAgreement(checkpoints.ranks)
for pause, wish_at, most in ((0.0, 5, 100_000), (0.02, 2, 20), (0.2, 3, 2)):
    seen = []
    for call in range(wish_at + most):
        seen.append(agreement.exchange(2 if rank == 1 and call >= wish_at else 0))
        if seen[-1]:
            break
        time.sleep(pause)
    assert seen[-1] == 2 and not any(seen[:-1]), seen
    assert checkpoints.ranks.gather(len(seen)) == [len(seen)] * 2
    agreement.finish()
assert [agreement.exchange(rank), agreement.exchange(0), agreement.finish()] == [1, 0, 0]
assert [agreement.exchange(0), agreement.exchange(0)] == [0, 0]
for call in range(1000):
    agreement.exchange(0)
assert any([agreement.exchange(rank) for call in range(20)])
agreement.finish()
for call in range(1000):
    agreement.exchange(0)
assert max(agreement.exchange(rank), agreement.finish()) == 1

# Shards of each rank, and a random state of each rank.
mesh = init_device_mesh("cpu", (2,))
whole = torch.arange(24.0).reshape(6, 4)
for step in (7, 8):
    sharded = {"w": distribute_tensor(whole * step, mesh)}
    checkpoints.save({"epoch": step}, step=step, sharded=sharded)
followed = torch.rand(1)
empty = {"w": distribute_tensor(torch.zeros(6, 4), mesh)}
found = checkpoints.load(empty)
assert (found.step, found.state) == (8, {"epoch": 8})
assert torch.equal(empty["w"].full_tensor(), whole * 8)
assert torch.equal(torch.rand(1), followed)

# Whose shard is damaged does not matter: all ranks take the older one.
dist.barrier()
if rank == 0:
    shard = home / "step-00000008/shards/__1_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
dist.barrier()
assert checkpoints.load(empty).step == 7
assert torch.equal(empty["w"].full_tensor(), whole * 7)

# What one rank cannot do is an error of all.
class Broken:
    def __reduce__(self):
        raise RuntimeError("device lost")
def lost(file):
    raise RuntimeError("device lost")
failed = 0
for state, sharded in (({"a": Broken()}, None), ({}, empty)):
    if rank == 1:
        hpml_checkpoint._facts = lost
    try:
        checkpoints.save(state, step=9, sharded=sharded)
    except CheckpointError as error:
        failed += 1
        assert "device lost" in str(error), error
        assert f"{home}/step-00000009: " in str(error), error
assert failed == 2
dist.barrier()
assert sorted(one.name for one in home.iterdir()) == ["step-00000007", "step-00000008"]
print("done", flush=True)
dist.barrier()
os._exit(0)
"""


def test_two_ranks_do_everything_together(tmp_path: Path) -> None:
    """Agreements, shards, random states, damage and errors are those of both ranks."""
    (tmp_path / "ranks.py").write_text(RANKS)
    ranks = run_ranks(2, [tmp_path / "ranks.py", JOBS, tmp_path / "home"])
    assert [(rank.returncode, rank.stdout) for rank in ranks] == [(0, "done\n")] * 2, ranks
    skipped = f"checkpoint {tmp_path}/home/step-00000008 is skipped: shards/__1_0.distcp is"
    assert [rank.stderr.count(skipped) for rank in ranks] == [1, 0]


def test_the_example_to_fill_in_stops_and_resumes(job: ModuleType, tmp_path: Path) -> None:
    """Two ranks that were stopped and resumed end with the weights of two that were not."""
    command = [JOBS / "train.py", "--steps", 100]
    whole = run_ranks(2, command, HPML_CHECKPOINT_DIR=str(tmp_path / "whole"))
    assert [rank.returncode for rank in whole] == [0, 0], whole

    parts = {"HPML_CHECKPOINT_DIR": str(tmp_path / "parts")}
    file = tmp_path / "n1.jsonl"
    with ChannelReader(f"hpml/test/{uuid.uuid4().hex}", file, "n1") as reader:
        ranks = start_ranks(2, command, HPML_CHANNEL=reader.name, **parts)
        eventually(reader.peers.by_pid, seconds=LIMIT_SECONDS)
        reader.ask_to_stop("preemption")  # before the process group is there
        assert [finish(rank).returncode for rank in ranks] == [0, 0]
    stops = [event for event in feed.read(file) if event.event == "stopping"]
    steps = {event.data["step"] for event in stops}
    assert len(stops) == 2
    assert steps == {job.Checkpoints(tmp_path / "parts").latest().step}
    assert steps < set(range(100))

    rest = run_ranks(2, command, **parts)
    assert [rank.returncode for rank in rest] == [0, 0], rest
    states = [job.Checkpoints(tmp_path / name).latest().state for name in ("whole", "parts")]
    assert repr(states[0]) == repr(states[1])
    weights = [state["model"]["module.0.weight"] for state in states]
    assert weights[0].equal(weights[1])
