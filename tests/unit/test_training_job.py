"""The training jobs, as a user runs them: real processes, real torchrun, real files."""

import json
import os
import signal
import socket
import subprocess
import sys
import tarfile
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hpml_orchestrator.node.channel import ChannelReader
from hpml_orchestrator.records import events

JOBS = Path(__file__).parents[2] / "training_jobs"
TRAIN = JOBS / "ddp_images.py"
DIGITS = JOBS / "make_digits.py"
LIMIT_SECONDS = 240

for module in ("torch", "sklearn", "PIL"):
    pytest.importorskip(module, reason="the training jobs need the extra 'train'")


def environment(**more: str) -> dict[str, str]:
    ours = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "HPML_CHANNEL")
    clean = {key: value for key, value in os.environ.items() if key not in ours}
    return {**clean, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **more}


def run(command: Sequence[object], **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, command)],
        env=environment(**more),
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )


def torchrun(ranks: int) -> list[object]:
    return ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]


def result_of(directory: Path) -> Any:
    return json.loads((directory / "result.json").read_text())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("data") / "digits"
    done = run([DIGITS, target])
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture(scope="module")
def few(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Thirty images of each of four digits: enough to train in a moment."""
    target = tmp_path_factory.mktemp("few")
    for digit in "0123":
        (target / digit).mkdir()
        for path in sorted((digits / digit).iterdir())[:30]:
            (target / digit / path.name).symlink_to(path)
    return target


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
    assert done.stdout.splitlines()[-1].startswith("done: 6 epochs")
    result = result_of(tmp_path)
    assert result["test_accuracy"] >= 0.95
    assert result["test_images"] == 355
    assert 0 < result["seconds_to_accuracy"] < result["elapsed_seconds"]
    assert result["samples_per_second"] > 0
    assert (result["world_size"], result["epochs"], result["device"]) == (2, 6, "cpu")
    found = events.read(file)
    assert reader.refused == 0
    for rank in (0, 1):
        names = [event.event for event in found if event.rank == rank]
        assert {"rendezvous", "warm-up", "step", "evaluation"} <= set(names)
        steps = [event.data for event in found if event.rank == rank and event.event == "step"]
        # Each rank's half of 1442 images, 6 times: nothing of the warm-up is lost either.
        assert steps[-1]["samples_total"] == 6 * 721
        assert steps[-1]["steps_total"] == 6 * 23
    assert sum(event.event == "checkpoint" and event.rank == 0 for event in found) == 6
    (final,) = [event for event in found if event.data.get("final")]
    assert final.rank == 0
    assert final.data["test_accuracy"] == result["test_accuracy"]


def test_one_rank_needs_no_launcher_and_no_channel(few: Path, tmp_path: Path) -> None:
    """A copy of the script alone, without hpml_channel.py, trains; the same seed gives the same."""
    copy = tmp_path / "alone" / TRAIN.name
    copy.parent.mkdir()
    copy.write_bytes(TRAIN.read_bytes())
    seen = []
    for number in range(2):
        output = tmp_path / str(number)
        done = run([copy, "--data", few, "--epochs", 3, "--seed", 5, "--output", output])
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        lines = [line.split(", test")[0] for line in done.stdout.splitlines() if "loss" in line]
        seen.append((result_of(output)["test_accuracy"], lines))
    assert seen[0] == seen[1]


def test_ranks_of_another_launcher_find_each_other(few: Path, tmp_path: Path) -> None:
    """What srun sets is enough; every test image counts once although 24 do not divide by 3."""
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "3"}
    command = [sys.executable, str(TRAIN), "--data", str(few), "--epochs", "1", "--workers", "0"]
    ranks = [
        subprocess.Popen(
            [*command, "--batch-size", "7", "--output", str(tmp_path)],
            env=environment(**common, RANK=str(rank), LOCAL_RANK=str(rank)),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(3)
    ]
    outputs = [rank.communicate(timeout=LIMIT_SECONDS)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0, 0], outputs
    assert [bool(output) for output in outputs] == [True, False, False]
    result = result_of(tmp_path)
    assert result["world_size"] == 3
    assert (result["test_accuracy"] * 24) == pytest.approx(round(result["test_accuracy"] * 24))


def test_a_killed_training_goes_on_to_the_same_end(few: Path, tmp_path: Path) -> None:
    """SIGKILL, then --resume: as many epochs and the accuracy of a run that was not killed."""
    command: list[object] = [TRAIN, "--data", few, "--epochs", 8, "--workers", 0]
    whole = run([*command, "--output", tmp_path / "whole"])
    assert whole.returncode == 0, whole.stderr
    checkpoint = tmp_path / "c.pt"
    command += ["--checkpoint", checkpoint, "--resume", "--output", tmp_path / "resumed"]
    with subprocess.Popen(
        [sys.executable, *map(str, command)],
        env=environment(),
        stdout=subprocess.DEVNULL,
    ) as victim:
        deadline = time.monotonic() + LIMIT_SECONDS
        while not checkpoint.exists():
            assert time.monotonic() < deadline
            time.sleep(0.005)
        victim.send_signal(signal.SIGKILL)
    assert victim.returncode == -signal.SIGKILL
    done = run(command)
    assert done.returncode == 0, done.stderr
    assert "resumed from" in done.stdout
    before, after = result_of(tmp_path / "whole"), result_of(tmp_path / "resumed")
    assert after["epochs"] == before["epochs"] == 8
    assert after["test_accuracy"] == pytest.approx(before["test_accuracy"], abs=0.05)
    assert not list(tmp_path.glob(".c.pt.*.tmp"))

    other = run([*command, "--lr", 0.5])
    assert other.returncode == 2
    assert "lr 0.05 -> 0.5" in other.stderr
    checkpoint.write_bytes(checkpoint.read_bytes()[:1000])
    torn = run(command)
    assert torn.returncode == 2
    assert str(checkpoint) in torn.stderr


def test_a_stop_file_stops_all_ranks_at_the_same_step(few: Path, tmp_path: Path) -> None:
    """Asked to stop, two ranks agree, write the checkpoint, exit 0; resumed, they finish."""
    stop, file = tmp_path / "stop", tmp_path / "events.jsonl"
    stop.touch()
    command = [*torchrun(2), TRAIN, "--data", few, "--epochs", 3, "--batch-size", 4, "--workers", 0]
    command += ["--checkpoint", tmp_path / "c.pt", "--resume", "--output", tmp_path]
    with ChannelReader(f"hpml/test/{uuid.uuid4().hex}", file, "n1") as reader:
        done = run(command, HPML_STOP_FILE=str(stop), HPML_CHANNEL=reader.name)
    assert done.returncode == 0, done.stderr
    assert "stopping in epoch 1 after 2 steps" in done.stdout
    assert result_of(tmp_path)["stopped"] is True
    stopping = {event.rank: event.data for event in events.read(file) if event.event == "stopping"}
    assert stopping == {0: {"epoch": 0, "step": 2}, 1: {"epoch": 0, "step": 2}}
    done = run(command)
    assert done.returncode == 0, done.stderr
    assert "0 epochs and 2 steps are done" in done.stdout
    assert (result_of(tmp_path)["epochs"], result_of(tmp_path)["stopped"]) == (3, False)


def test_a_target_that_is_not_reached_is_censored(few: Path, tmp_path: Path) -> None:
    """Not reached is null, not a number and not an error; reached may end the training."""
    common: list[object] = [TRAIN, "--data", few, "--workers", 0, "--output", tmp_path]
    done = run([*common, "--epochs", 1, "--lr", 1e-9, "--target-accuracy", 1])
    assert done.returncode == 0, done.stderr
    assert "1 not reached" in done.stdout
    assert result_of(tmp_path)["seconds_to_accuracy"] is None
    done = run([*common, "--epochs", 9, "--target-accuracy", 0.01, "--stop-at-target"])
    assert done.returncode == 0, done.stderr
    assert result_of(tmp_path)["epochs"] == 1


def bad_data(kind: str, root: Path) -> tuple[Path, str]:
    """Return a directory that cannot be trained with, and what the message has to name."""
    data = root / "data"
    if kind == "missing":
        return data, f"--data {data}: No such file"
    data.mkdir()
    if kind == "one class":
        (data / "only").mkdir()
        for number in range(4):
            (data / "only" / f"{number}.png").write_bytes(b"")
        return data, "only one class (only)"
    return data, "no folders with PNG files"


@pytest.mark.parametrize("kind", ["missing", "empty", "one class"])
def test_bad_data_are_named_in_one_line(kind: str, tmp_path: Path) -> None:
    """Exit status 2 and a line that names the directory and what is wrong with it."""
    data, named = bad_data(kind, tmp_path)
    done = run([TRAIN, "--data", data])
    assert done.returncode == 2
    assert named in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_broken_image_ends_all_ranks_with_its_name(few: Path, tmp_path: Path) -> None:
    """Only one rank meets the broken file; none hangs, and both end with 2."""
    data = tmp_path / "data"
    for folder in few.iterdir():
        (data / folder.name).mkdir(parents=True)
        for path in folder.iterdir():
            (data / folder.name / path.name).write_bytes(path.read_bytes())
    broken = sorted((data / "2").iterdir())[17]
    broken.write_bytes(broken.read_bytes()[:40])
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [
                sys.executable,
                str(TRAIN),
                "--data",
                str(data),
                "--epochs",
                "50",
                "--batch-size",
                "8",
            ],
            env=environment(**common, RANK=str(rank), LOCAL_RANK=str(rank)),
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=LIMIT_SECONDS)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [2, 2], outputs
    assert str(broken) in outputs[0]
    assert outputs[1] == ""


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--resume"], "--checkpoint"),
        (["--stop-at-target"], "--target-accuracy"),
        (["--epochs", "0"], "--epochs"),
        (["--target-accuracy", "95"], "--target-accuracy"),
    ],
)
def test_options_that_make_no_sense_are_refused(arguments: list[str], named: str) -> None:
    """The message names the option."""
    done = run([TRAIN, "--data", "x", *arguments])
    assert done.returncode == 2
    assert named in done.stderr.splitlines()[-1]
