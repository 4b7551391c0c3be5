"""The training jobs, as a user runs them: real processes, real torchrun, real files."""

import re
import shutil
import signal
import tarfile
import uuid
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from hpml_orchestrator.node.channel import ChannelReader
from hpml_orchestrator.records import events
from hpml_orchestrator.runs.summary import Timeline, phases
from tests.unit.training_runs import (
    DIGITS,
    JOBS,
    TRAINS,
    finish,
    load,
    result_of,
    run,
    run_ranks,
    start,
)

TRAIN = JOBS / "ddp_images.py"

pytestmark = TRAINS


def torchrun(ranks: int) -> list[object]:
    return ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]


def train_here(job: ModuleType, arguments: Sequence[object]) -> None:
    """Train in this process: what needs no process of its own saves seconds of imports."""
    options = job.parse([*map(str, arguments), "--device", "cpu"])
    job.train(options, job.Ranks(options), job.Channel())


@pytest.fixture(scope="module")
def job() -> ModuleType:
    """Return ddp_images.py as a module, for what needs no process of its own."""
    return load(TRAIN)


def test_digits_are_written_once_and_whole(digits: Path, tmp_path: Path) -> None:
    """1,797 files in ten folders; a second call leaves them alone and can write the tar."""
    assert len(list(digits.glob("[0-9]/*.png"))) == 1797
    assert [one.name for one in digits.parent.iterdir()] == ["digits"]
    archive = tmp_path / "digits.tar"
    done = run([DIGITS, digits, "--tar", archive])
    assert (done.returncode, done.stderr) == (0, "")
    assert "complete already" in done.stdout
    with tarfile.open(archive) as tar:
        assert len(tar.getnames()) == 1797
        member = tar.extractfile("3/0003.png")
        assert member is not None
        assert member.read() == (digits / "3" / "0003.png").read_bytes()


def test_digits_do_not_replace_something_else(tmp_path: Path) -> None:
    """A directory with other things in it is an error, and stays as it is."""
    (tmp_path / "notes.txt").write_text("mine")
    done = run([DIGITS, tmp_path])
    assert done.returncode == 2
    assert str(tmp_path) in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert [one.name for one in tmp_path.iterdir()] == ["notes.txt"]


def test_two_ranks_reach_the_accuracy_and_report_it(digits: Path, tmp_path: Path) -> None:
    """Under torchrun: 0.95 on the test set, and every phase of both ranks in the node's events."""
    file = tmp_path / "events.jsonl"
    with ChannelReader(f"hpml/test/{uuid.uuid4().hex}", file, "n1") as reader:
        command = [*torchrun(2), TRAIN, "--data", digits, "--epochs", 6, "--output", tmp_path]
        command += ["--target-accuracy", 0.95, "--checkpoint", tmp_path / "c.pt"]
        done = run(command, HPML_CHANNEL=reader.name)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("epoch ") == 6
    result = result_of(tmp_path)
    last = done.stdout.splitlines()[-1]
    assert last.startswith(f"done: 6 epochs in {result['train_seconds']:.1f} s")
    assert result["test_accuracy"] >= 0.95
    assert result["test_images"] == 355
    assert result["samples_per_second"] > 0
    assert (result["world_size"], result["epochs"], result["device"]) == (2, 6, "cpu")
    found = list(events.read(file))
    assert reader.refused == 0
    for rank in (0, 1):
        names = [event.event for event in found if event.rank == rank]
        assert {"rendezvous", "warm-up", "step", "evaluation"} <= set(names)
        steps = [event.data for event in found if event.rank == rank and event.event == "step"]
        # Each rank's half of 1442 images, 6 times: nothing of the warm-up is lost either.
        assert steps[-1]["samples_total"] == 6 * 721
        assert steps[-1]["steps_total"] == 6 * 23
        assert steps[0]["steps_total"] == 20  # the warm-up's, sent as it ended
    assert sum(event.event == "checkpoint" and event.rank == 0 for event in found) == 6
    (final,) = [event for event in found if event.data.get("final")]
    assert final.rank == 0
    assert final.data["test_accuracy"] == result["test_accuracy"]
    took = {phase.name: phase.seconds for phase in phases(Timeline(found), queued=found[0].time)}
    in_phases = took["warm-up"] + took["training"]
    assert 0 < result["seconds_to_accuracy"] <= result["train_seconds"] <= in_phases + 0.05
    parts = sum(result[f"{part}_seconds"] for part in ("step", "evaluation", "checkpoint"))
    assert 0 < parts <= result["train_seconds"]


def test_one_rank_needs_no_launcher_and_no_channel(few: Path, tmp_path: Path) -> None:
    """A copy of the script alone, without hpml_channel.py, trains; the same seed gives the same."""
    copy = tmp_path / "alone" / TRAIN.name
    copy.parent.mkdir()
    copy.write_bytes(TRAIN.read_bytes())
    command = [copy, "--data", few, "--epochs", 3, "--seed", 5, "--output"]
    twice = [start([*command, tmp_path / str(number)]) for number in range(2)]
    seen = []
    for number, process in enumerate(twice):
        done = finish(process)
        assert (done.returncode, done.stderr) == (0, "")
        lines = [line.split(", test")[0] for line in done.stdout.splitlines() if "loss" in line]
        seen.append((result_of(tmp_path / str(number))["test_accuracy"], lines))
    assert seen[0] == seen[1]


# It is killed with its first checkpoint on the disk: from outside, a quick one would be over.
DYING = """
import os, runpy, sys
real = os.replace
def dying(*words):
    real(*words)
    os.kill(os.getpid(), 9)
os.replace = dying
del sys.argv[0]
sys.path[0] = os.path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_killed_training_goes_on_to_the_same_end(
    job: ModuleType, few: Path, tmp_path: Path
) -> None:
    """SIGKILL, then --resume: as many epochs and the accuracy of a run that was not killed."""
    command: list[object] = [TRAIN, "--data", few, "--epochs", 8, "--workers", 0]
    whole = start([*command, "--output", tmp_path / "whole"])
    checkpoint = tmp_path / "c.pt"
    command += ["--checkpoint", checkpoint, "--resume", "--output", tmp_path / "resumed"]
    victim = start(["-c", DYING, *command])
    assert finish(victim).returncode == -signal.SIGKILL
    assert checkpoint.exists()
    unkilled, done = finish(whole), run(command)
    assert unkilled.returncode == 0, unkilled.stderr
    assert done.returncode == 0, done.stderr
    assert "resumed from" in done.stdout
    before, after = result_of(tmp_path / "whole"), result_of(tmp_path / "resumed")
    assert after["epochs"] == before["epochs"] == 8
    assert after["test_accuracy"] == pytest.approx(before["test_accuracy"], abs=0.05)

    with pytest.raises(job.JobError, match=r"settings: lr 0\.05 -> 0\.5"):
        train_here(job, [*command[1:], "--lr", 0.5])
    checkpoint.write_bytes(checkpoint.read_bytes()[:1000])
    with pytest.raises(job.JobError, match=r"cannot read the checkpoint .*c\.pt"):
        train_here(job, command[1:])


def test_a_training_starts_from_the_checkpoint_of_another(
    job: ModuleType, few: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model is the other run's, the settings are its own, and so is a checkpoint to resume."""
    parent, own = tmp_path / "parent.pt", tmp_path / "own.pt"
    common: list[object] = ["--data", few, "--workers", 0, "--output", tmp_path]
    train_here(job, [*common, "--epochs", 9, "--checkpoint", parent])
    reached = result_of(tmp_path)["test_accuracy"]
    assert reached > 0.6
    child = [*common, "--epochs", 1, "--lr", 1e-9, "--checkpoint", own, "--resume"]
    child += ["--checkpoint-from", parent]
    train_here(job, child)
    result = result_of(tmp_path)
    assert (result["epochs"], result["learning_rate"]) == (1, 1e-9)
    assert result["test_accuracy"] == pytest.approx(reached, abs=0.05)
    assert f"started from {parent}" in capsys.readouterr().out
    parent.unlink()
    train_here(job, child)
    assert f"resumed from {own}" in capsys.readouterr().out
    for arguments, problem in (
        (["--checkpoint-from", parent], r"cannot read the checkpoint .*parent\.pt"),
        (["--checkpoint-from", own, "--width", 8], "width 16 -> 8"),
    ):
        with pytest.raises(job.JobError, match=problem):
            train_here(job, [*common, *arguments])


def test_a_stop_file_stops_all_ranks_at_the_same_step(few: Path, tmp_path: Path) -> None:
    """Two ranks as srun starts them agree to stop, save and exit 0; resumed, they finish."""
    stop, file = tmp_path / "stop", tmp_path / "events.jsonl"
    stop.touch()
    command = [TRAIN, "--data", few, "--epochs", 2, "--batch-size", 7, "--workers", 0]
    command += ["--checkpoint", tmp_path / "c.pt", "--resume", "--output", tmp_path]
    with ChannelReader(f"hpml/test/{uuid.uuid4().hex}", file, "n1") as reader:
        ranks = run_ranks(2, command, HPML_STOP_FILE=str(stop), HPML_CHANNEL=reader.name)
    assert [rank.returncode for rank in ranks] == [0, 0], ranks
    assert "stopping in epoch 1 after 2 steps" in ranks[0].stdout
    assert ranks[1].stdout == ""
    assert result_of(tmp_path)["stopped"] is True
    found = {event.rank: event.data for event in events.read(file) if event.event == "stopping"}
    assert found == {rank: {"epoch": 0, "step": 2} for rank in (0, 1)}

    ranks = run_ranks(2, command)
    assert [rank.returncode for rank in ranks] == [0, 0], ranks
    assert "0 epochs and 2 steps are done" in ranks[0].stdout
    result = result_of(tmp_path)
    assert (result["epochs"], result["stopped"], result["world_size"]) == (2, False, 2)


def test_a_target_that_is_not_reached_is_censored(
    job: ModuleType, few: Path, tmp_path: Path
) -> None:
    """Not reached is null, not a number and not an error; reached may end the training."""
    common: list[object] = ["--data", few, "--workers", 0, "--output", tmp_path]
    train_here(job, [*common, "--epochs", 1, "--lr", 1e-9, "--target-accuracy", 1])
    assert result_of(tmp_path)["seconds_to_accuracy"] is None
    train_here(job, [*common, "--epochs", 9, "--target-accuracy", 0.01, "--stop-at-target"])
    result = result_of(tmp_path)
    assert result["epochs"] == 1
    assert 0 < result["seconds_to_accuracy"] <= result["train_seconds"]


def test_every_test_image_counts_once(job: ModuleType) -> None:
    """The ranks' shares of the test set are disjoint and complete; those of training are equal."""
    ranks = [SimpleNamespace(rank=rank, world_size=3) for rank in range(3)]
    samplers = [job.EpochSampler(100, rank, 1, 8) for rank in ranks]
    shares = [list(sampler) for sampler in samplers]
    assert [len(share) for share in shares] == [33, 33, 33]
    assert len(set().union(*shares)) == 99
    samplers[1].first_step = 2
    assert list(samplers[1]) == shares[1][16:]
    samplers[1].epoch = 1
    assert list(samplers[1]) != shares[1][16:]
    assert len(samplers[1]) == 17


def test_the_split_does_not_depend_on_where_the_data_lie(
    job: ModuleType, few: Path, tmp_path: Path
) -> None:
    """Staged elsewhere, the same images are for testing: a fifth of every class."""
    (tmp_path / "elsewhere").symlink_to(few)
    splits = [job.find_images(root) for root in (few, tmp_path / "elsewhere")]
    names = [[Path(path).name for path, _ in test] for _, test, _ in splits]
    assert names[0] == names[1]
    assert [label for _, label in splits[0][1]] == [0] * 6 + [1] * 6 + [2] * 6 + [3] * 6
    assert not set(splits[0][0]) & set(splits[0][1])


@pytest.mark.parametrize(
    ("folders", "named"),
    [
        (None, "No such file"),
        ([], "no folders with PNG files"),
        (["only"], "only one class (only)"),
    ],
)
def test_bad_data_are_named(
    job: ModuleType, folders: list[str] | None, named: str, tmp_path: Path
) -> None:
    """The message names the directory and what is wrong with it."""
    data = tmp_path / "data"
    for folder in folders or ():
        (data / folder).mkdir(parents=True)
        for number in range(4):
            (data / folder / f"{number}.png").touch()
    if folders == []:
        data.mkdir()
    with pytest.raises(job.JobError, match=re.escape(str(data))) as caught:
        job.find_images(data)
    assert named in str(caught.value)


def test_a_missing_directory_ends_all_ranks(tmp_path: Path) -> None:
    """Exit status 2 on both ranks, and one line on one of them."""
    ranks = run_ranks(2, [TRAIN, "--data", tmp_path / "data"])
    assert [rank.returncode for rank in ranks] == [2, 2], ranks
    assert f"--data {tmp_path / 'data'}: No such file" in ranks[0].stderr
    assert [len(rank.stderr.splitlines()) for rank in ranks] == [1, 0]


def test_a_broken_image_ends_all_ranks_with_its_name(few: Path, tmp_path: Path) -> None:
    """Only one rank meets the broken file; none hangs, and both end with 2."""
    data = tmp_path / "data"
    shutil.copytree(few, data)
    broken = sorted((data / "2").iterdir())[17]
    broken.write_bytes(broken.read_bytes()[:40])
    ranks = run_ranks(2, [TRAIN, "--data", data, "--epochs", 50, "--batch-size", 8])
    assert [rank.returncode for rank in ranks] == [2, 2], ranks
    assert str(broken) in ranks[0].stderr
    assert ranks[1].stderr == ""


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--resume"], "--checkpoint"),
        (["--stop-at-target"], "--target-accuracy"),
        (["--epochs", "0"], "--epochs"),
        (["--target-accuracy", "95"], "--target-accuracy"),
        (["--width", "6"], "--width"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    job: ModuleType, arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message names the option, the status is 2."""
    with pytest.raises(SystemExit) as caught:
        job.parse(["--data", "x", *arguments])
    assert caught.value.code == 2
    assert named in capsys.readouterr().err.splitlines()[-1]
