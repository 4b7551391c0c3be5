"""The training jobs, as a user runs them: real processes, real torchrun, real files."""

import json
import re
import shutil
import subprocess
import tarfile
import uuid
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from hpml_orchestrator.node.channel import ChannelReader
from hpml_orchestrator.records import feed
from hpml_orchestrator.runs.reporting.timeline import Timeline, phases
from tests.patience import eventually
from tests.unit.training_runs import (
    DIGITS,
    JOBS,
    LIMIT_SECONDS,
    TRAINS,
    finish,
    load,
    result_of,
    run,
    run_ranks,
    start_ranks,
)

TRAIN = JOBS / "ddp_images.py"
EPOCH = re.compile(r"epoch \d+/\d+: (loss [\d.]+, validation accuracy [\d.]+)")

pytestmark = TRAINS


def torchrun(ranks: int) -> list[object]:
    return ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]


def alone(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Train with one rank."""
    return run([TRAIN, "--workers", 0, *arguments])


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
        command += ["--target-accuracy", 0.95, "--checkpoint", tmp_path / "c"]
        done = run(command, HPML_CHANNEL=reader.name)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("epoch ") == 6
    result = result_of(tmp_path)
    last = done.stdout.splitlines()[-1]
    assert last.startswith(f"done: 6 epochs in {result['train_seconds']:.1f} s")
    assert result["test_accuracy"] >= 0.95
    images = [result[f"{part}_images"] for part in ("train", "validation", "test")]
    assert images == [1302, 140, 355]
    assert f", test accuracy {result['test_accuracy']:.4f}, " in last
    assert done.stdout.count("test accuracy") == 1, "the test set is used once"
    assert result["samples_per_second"] > 0
    assert (result["world_size"], result["epochs"], result["device"]) == (2, 6, "cpu")
    found = list(feed.read(file))
    assert reader.refused == 0
    for rank in (0, 1):
        names = [event.event for event in found if event.rank == rank]
        assert {"rendezvous", "preparation", "warm-up", "step", "evaluation"} <= set(names)
        steps = [event.data for event in found if event.rank == rank and event.event == "step"]
        # Each rank's half of 1302 images, 6 times: nothing of the warm-up is lost either.
        assert steps[-1]["samples_total"] == 6 * 651
        assert steps[-1]["steps_total"] == 6 * 21
        assert steps[0]["steps_total"] == 20  # the warm-up's, sent as it ended
        parts = {f"{part}_seconds_total" for part in ("wait", "comm", "save", "evaluation")}
        assert all(0 <= steps[-1][part] < steps[-1]["step_seconds_total"] for part in parts)
        assert steps[-1]["evaluation_seconds_total"] > 0 < steps[-1]["save_seconds_total"]
    assert sum(event.event == "checkpoint" and event.rank == 0 for event in found) == 6
    (final,) = [event for event in found if event.data.get("final")]
    assert final.rank == 0
    assert final.data["test_accuracy"] == result["test_accuracy"]
    evaluated = [one.data["accuracy"] for one in found if "accuracy" in one.data and one.rank == 0]
    assert evaluated[-1] == result["validation_accuracy"]
    took = {phase.name: phase.seconds for phase in phases(Timeline(found), queued=found[0].time)}
    in_phases = took["warm-up"] + took["training"]
    assert 0 < result["seconds_to_accuracy"] <= result["train_seconds"] <= in_phases + 0.05
    parts = sum(result[f"{part}_seconds"] for part in ("steady", "evaluation", "checkpoint"))
    assert 0 < parts <= result["train_seconds"]


def test_the_same_seed_gives_the_same_without_a_launcher(few: Path, tmp_path: Path) -> None:
    """Loss and accuracy of each epoch are equal, with processes that read and without."""
    seen = []
    for workers in (0, 2):
        done = run([TRAIN, "--data", few, "--epochs", 3, "--workers", workers])
        assert (done.returncode, done.stderr) == (0, "")
        seen.append(EPOCH.findall(done.stdout))
    assert seen[0] == seen[1]
    assert len(seen[0]) == 3


# Two ranks of the training as it is, forked for each attempt, which note the images of each step.
# An attempt ends as given in LIVES: "kill", "start", "step" or "evaluation", the rank and the step.
LIVES = f"""
import json, os, signal, sys
from pathlib import Path
sys.path.insert(0, {str(JOBS)!r})
import ddp_images, images_data
from hpml_orchestrator.node.startup import free_port
notes, lives, arguments = Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3:]
read, phase, training = [], ["start"], []
fetch, train_step = images_data.Images.__getitem__, ddp_images.train_step
load, evaluate = ddp_images.load, ddp_images.evaluate

def noted_load(run):
    training.append(run)
    load(run)

def noted_step(run, images, labels):
    phase[0] = "step"
    step = run.at.step
    if (how, rank, step) == ("kill", where, at):
        os.kill(os.getpid(), 9)
    loss = train_step(run, images, labels)
    with (notes / str(rank)).open("a") as file:
        file.write(json.dumps([step, read[-len(labels):]]) + "\\n")
    return loss

def noted_evaluate(run, *part):
    phase[0] = "evaluation"
    return evaluate(run, *part)

def stop_requested(self):
    here = training[0].at.step
    return (how, where, at <= here) == (phase[0], rank, True)

def getitem(self, index):
    read.append(index)
    return fetch(self, index)

images_data.Images.__getitem__ = getitem
ddp_images.Channel.stop_requested = stop_requested
ddp_images.train_step = noted_step
ddp_images.load, ddp_images.evaluate = noted_load, noted_evaluate
for number, (how, where, at) in enumerate(lives):
    ranks, port = set(), str(free_port(f"{{notes}} {{number}}"))
    for rank in (0, 1):
        pid = os.fork()
        if pid == 0:
            os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_PORT=port)
            ddp_images.main(arguments)
        ranks.add(pid)
    statuses = []
    while ranks:
        pid, status = os.wait()
        ranks.remove(pid)
        statuses.append(status)
        if status:
            for other in ranks:
                os.kill(other, signal.SIGKILL)
    print("statuses", statuses, flush=True)
"""
STEPS = 7  # of an epoch of two ranks with batches of seven


@pytest.mark.parametrize(
    "ends",
    [
        [("kill", 1, 10), ("kill", 0, 17)],
        [("start", 1, 0), ("step", 0, 3), ("step", 1, 6), ("step", 1, 13)],
        [("evaluation", 0, 0), ("evaluation", 1, 14), ("step", 0, 15), ("kill", 0, 18)],
    ],
    ids=["killed", "stopped", "in the evaluation"],
)
def test_a_training_that_was_interrupted_is_the_same_to_the_bit(
    ends: list[tuple[str, int, int]], few: Path, tmp_path: Path, uninterrupted: Path
) -> None:
    """Weights, momenta, result and samples of each step; an unwarned end costs one interval."""
    attempts, checkpoints, errors = live(few, tmp_path, [*ends, WHOLE, WHOLE])
    for attempt, (how, _, _) in zip(attempts, [*ends, WHOLE], strict=False):
        assert ("statuses [0, 0]" in attempt) == (how != "kill"), (attempts, errors)
        is_stopped = how in {"start", "step", "evaluation"}
        assert ("stopping in epoch" in attempt, "\nstopped: " in attempt) == (is_stopped,) * 2
        assert ("\ndone: " in attempt) == (not (is_stopped or how == "kill"))
        assert "loss 0.0000" not in attempt, "of an epoch that an earlier attempt has trained"
    resumed = ["resumed from" in attempt for attempt in attempts]
    assert resumed == sorted(resumed)
    assert resumed.count(False) == (2 if ends[0][0] == "start" else 1)

    whole, interrupted = newest(uninterrupted / "c"), newest(checkpoints)
    assert interrupted.step == whole.step == 3 * STEPS
    assert same(whole.state, interrupted.state)
    figures = ("validation_accuracy", "test_accuracy", "epochs", "stopped", "world_size")
    before, after = (result_of(one) for one in (uninterrupted, tmp_path))
    assert [after[name] for name in figures] == [before[name] for name in figures]
    lost = 0
    for rank in ("0", "1"):
        expected = noted(uninterrupted / rank)
        assert [step for step, _ in expected] == list(range(3 * STEPS))
        found = noted(tmp_path / rank)
        assert dict(found) == dict(expected)
        lost = max(lost, len(found) - len(expected))
    kills = sum(how == "kill" for how, _, _ in ends)
    assert lost <= 4 * kills, "an interval is four steps"
    assert bool(lost) == bool(kills)
    # What is complete ends at once, with its result.
    done = [line for line in "\n".join(attempts).splitlines() if line.startswith("done: 3 epochs")]
    assert "3 epochs and 0 steps are done" in attempts[-1]
    assert done[-1].split(" s, ")[1:] == done[-2].split(" s, ")[1:]


WHOLE = ("", 0, 0)


def live(
    data: Path, output: Path, lives: list[tuple[str, int, int]]
) -> tuple[list[str], Path, str]:
    """Train again and again; return what each printed, where the checkpoints are, and stderr."""
    (output / "lives.py").write_text(LIVES)
    command = [output / "lives.py", output, json.dumps(lives), "--data", data]
    command += ["--epochs", 3, "--batch-size", 7, "--workers", 0, "--checkpoint-steps", 4]
    command += ["--output", output, "--checkpoint", output / "c"]
    done = run(command, MASTER_ADDR="127.0.0.1")
    assert done.returncode == 0, done.stderr
    attempts = re.split(r"(?<=\])\n", done.stdout)[:-1]
    assert len(attempts) == len(lives), done.stderr
    return attempts, output / "c", done.stderr


def noted(file: Path) -> list[tuple[int, list[int]]]:
    return [(step, images) for step, images in map(json.loads, file.read_text().splitlines())]


def newest(directory: Path) -> Any:
    return load(JOBS / "hpml_checkpoint.py").Checkpoints(directory).latest()


def same(one: Any, other: Any) -> bool:
    """Whether two states are the same to the bit, except for the seconds that they took."""
    if isinstance(one, dict):
        names = [name for name in one if "seconds" not in str(name) and name != "steady_samples"]
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in names)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool((one == other).all()) if hasattr(one, "all") else bool(one == other)


@pytest.fixture(scope="module")
def uninterrupted(few: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a training that nothing interrupted."""
    directory = tmp_path_factory.mktemp("whole")
    live(few, directory, [WHOLE])
    return directory


def test_other_settings_or_a_damaged_checkpoint_are_not_resumed_from(
    few: Path, tmp_path: Path
) -> None:
    """The first is an error; of the damaged one there is an older one."""
    command = ["--data", few, "--epochs", 2, "--checkpoint", tmp_path / "c"]
    assert alone(*command).returncode == 0
    refused = alone(*command, "--lr", 0.5)
    assert refused.returncode == 2
    assert "settings: lr 0.05 -> 0.5" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1
    first, last = sorted((tmp_path / "c").iterdir())
    (last / "state.pt").write_bytes(b"torn")
    done = alone(*command)
    assert f"{last} is skipped: state.pt is missing or damaged" in done.stderr
    assert f"resumed from {first}: 1 epochs and 0 steps are done" in done.stdout


def test_a_training_starts_from_the_checkpoint_of_another(few: Path, tmp_path: Path) -> None:
    """The model is the other run's, the settings are its own, and so is a checkpoint to resume."""
    parent, own = tmp_path / "parent", tmp_path / "own"
    common = ["--data", few, "--output", tmp_path]
    alone(*common, "--epochs", 9, "--checkpoint", parent)
    reached = result_of(tmp_path)["test_accuracy"]
    assert reached > 0.6
    child = [*common, "--epochs", 1, "--lr", 1e-9, "--checkpoint", own]
    child += ["--checkpoint-from", parent]
    assert f"started from {parent}" in alone(*child).stdout
    result = result_of(tmp_path)
    assert (result["epochs"], result["learning_rate"]) == (1, 1e-9)
    assert result["test_accuracy"] == pytest.approx(reached, abs=0.05)
    shutil.rmtree(parent)
    assert f"resumed from {own}" in alone(*child).stdout
    for arguments, problem in (
        (["--checkpoint-from", parent], f"--checkpoint-from {parent}: there is no checkpoint"),
        (["--checkpoint-from", own, "--width", 8], "has another model: --model or --width differs"),
    ):
        refused = alone(*common, *arguments)
        assert refused.returncode == 2
        assert problem in refused.stderr


def test_a_request_stops_all_ranks_at_the_same_step(few: Path, tmp_path: Path) -> None:
    """One of two ranks is asked, by the agent of its node; both save and exit with 0."""
    name = f"hpml/test/{uuid.uuid4().hex}-"
    command = [TRAIN, "--data", few, "--epochs", 400, "--batch-size", 7, "--workers", 0]
    command += ["--output", tmp_path]
    environment = {"HPML_CHANNEL": name + "{rank}", "HPML_CHECKPOINT_DIR": str(tmp_path / "c")}
    readers = [ChannelReader(f"{name}{n}", tmp_path / f"n{n}.jsonl", f"n{n}") for n in (0, 1)]
    with readers[0], readers[1]:
        ranks = start_ranks(2, command, **environment)
        eventually(lambda: all(one.peers.stepping for one in readers), seconds=LIMIT_SECONDS)
        readers[1].ask_to_stop("time_limit")
        done = [finish(rank) for rank in ranks]
    assert [rank.returncode for rank in done] == [0, 0], done
    assert "stopping in epoch" in done[0].stdout
    assert done[1].stdout == ""
    result = result_of(tmp_path)
    assert (result["stopped"], result["test_accuracy"]) == (True, None)
    found = [event for n in (0, 1) for event in feed.read(tmp_path / f"n{n}.jsonl")]
    stops = {event.rank: event.data["step"] for event in found if event.event == "stopping"}
    (step,) = set(stops.values())
    assert set(stops) == {0, 1}
    saved = [event.data["step"] for event in found if event.event == "checkpoint"]
    assert saved[-1] == step > 0
    training = [event.data for event in found if event.event == "training"]
    assert training == [{"step": 0, "total_steps": 400 * STEPS}] * 2


def test_a_target_that_is_not_reached_is_censored(few: Path, tmp_path: Path) -> None:
    """Not reached is null, not a number and not an error; reached may end the training."""
    common = ["--data", few, "--output", tmp_path]
    alone(*common, "--epochs", 1, "--lr", 1e-9, "--target-accuracy", 1)
    assert result_of(tmp_path)["seconds_to_accuracy"] is None
    alone(*common, "--epochs", 9, "--target-accuracy", 0.01, "--stop-at-target")
    result = result_of(tmp_path)
    assert result["epochs"] == 1
    assert 0 < result["seconds_to_accuracy"] <= result["train_seconds"]


@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_the_learning_rate_is_scaled_after_a_warm_up(
    world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It begins at one rank's, reaches the world's at the end of the warm-up, and ends at 0."""
    monkeypatch.syspath_prepend(str(JOBS))
    model = load(JOBS / "images_model.py")
    options = SimpleNamespace(lr=1.0, lr_warmup_epochs=2, epochs=6)
    rates = [model.learning_rate(step, 10, world_size, options) for step in range(61)]
    assert rates[0] == pytest.approx(1)
    assert rates[10] == pytest.approx((1 + world_size) / 2)
    assert rates[20] == pytest.approx(world_size)
    assert rates[:21] == sorted(rates[:21])
    assert rates[20:] == sorted(rates[20:], reverse=True)
    assert rates[60] == pytest.approx(0)


@pytest.fixture(scope="module")
def data() -> ModuleType:
    """Return images_data.py as a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(JOBS))
        return load(JOBS / "images_data.py")


def test_the_flops_of_a_sample_are_counted_and_nothing_else_happens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """2 FLOP per weight and place forward, and for each gradient; the input needs none."""
    monkeypatch.syspath_prepend(JOBS)
    torch, module = pytest.importorskip("torch"), load(JOBS / "hpml_job.py")
    layers = (torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.BatchNorm2d(8), torch.nn.Flatten())
    network = torch.nn.Sequential(*layers, torch.nn.Linear(8 * 64, 10))
    before = {name: one.clone() for name, one in network.state_dict().items()}
    flops = module.flops_of(network, (3, 8, 8))
    assert flops == 2 * (2 * 8 * 27 * 64) + 3 * (2 * 512 * 10)
    assert network.training
    assert all(torch.equal(one, before[name]) for name, one in network.state_dict().items())
    assert all(one.grad is None for one in network.parameters())


def test_each_image_is_used_once_in_an_epoch(data: ModuleType) -> None:
    """The ranks' shares are disjoint and equally large; another epoch has another order."""
    ranks = [SimpleNamespace(rank=rank, world_size=3) for rank in range(3)]
    shares = [data.order_of(0, 100, 1, rank) for rank in ranks]
    assert [len(share) for share in shares] == [33, 33, 33]
    assert len(set().union(*shares)) == 99
    assert data.order_of(1, 100, 1, ranks[0]) != shares[0]


def test_the_split_does_not_depend_on_where_the_data_lie(
    data: ModuleType, few: Path, tmp_path: Path
) -> None:
    """Staged elsewhere, the same images are for testing: a fifth of every class.

    A tenth of the others is for the evaluations during the training.
    """
    (tmp_path / "elsewhere").symlink_to(few)
    splits = [data.find_images(root) for root in (few, tmp_path / "elsewhere")]
    names = [
        {part: [Path(path).name for path, _ in files] for part, files in parts.items()}
        for parts, _ in splits
    ]
    assert names[0] == names[1]
    parts, classes = splits[0]
    assert classes == 4
    for part, count in (("test", 6), ("validation", 2), ("train", 22)):
        assert [label for _, label in parts[part]] == sorted([*range(4)] * count), part
    assert len({path for files in parts.values() for path, _ in files}) == 4 * 30


@pytest.mark.parametrize(("folders", "named"), [([], "no such folder"), (["only"], "only only")])
def test_bad_data_are_named(
    data: ModuleType, folders: list[str], named: str, tmp_path: Path
) -> None:
    """The message names the directory and what is wrong with it."""
    for folder in folders:
        (tmp_path / folder).mkdir()
        for number in range(4):
            (tmp_path / folder / f"{number}.png").touch()
    with pytest.raises(data.JobError, match=f"--data {tmp_path}: .*{named}"):
        data.find_images(tmp_path)


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
        (["--stop-at-target"], "--target-accuracy"),
        (["--epochs", "0"], "--epochs"),
        (["--target-accuracy", "95"], "--target-accuracy"),
        (["--width", "0"], "--width"),
        (["--accumulate", "0"], "--accumulate"),
    ],
)
def test_options_that_make_no_sense_are_refused(arguments: list[str], named: str) -> None:
    """The message names the option, the status is 2."""
    done = run([TRAIN, "--data", "x", *arguments])
    assert done.returncode == 2
    assert named in done.stderr.splitlines()[-1]
