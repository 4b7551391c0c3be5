"""The Horovod twin of the training job: real horovodrun, real mpirun, real averages."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hpml_orchestrator.diagnosis.profile import read_profile
from hpml_orchestrator.node.channel import ChannelReader
from hpml_orchestrator.records import feed
from tests.patience import eventually
from tests.unit.training_runs import (
    JOBS,
    LIMIT_SECONDS,
    TRAINS,
    finish,
    launch,
    load,
    result_of,
    run,
)

pytestmark = TRAINS
TRAIN = JOBS / "horovod_images.py"
# What loss and accuracy an epoch had, on rank 0's line of it.
EPOCH = re.compile(r"epoch \d+/\d+: (loss [\d.]+, validation accuracy [\d.]+)")


@pytest.fixture(scope="module", autouse=True)
def _horovod() -> None:
    if importlib.util.find_spec("horovod") is None:
        pytest.skip("NO HOROVOD TESTS: horovod is not installed (make horovod)")


def horovodrun(
    ranks: int, command: Sequence[object], **more: str
) -> subprocess.CompletedProcess[str]:
    """Run under gloo on this machine; output as horovodrun gives it, with `[rank]<stream>:`."""
    launcher = [sys.executable, "-m", "horovod.runner.launch", "--gloo", "-np", ranks]
    words = [*launcher, "--network-interface", "lo", "-H", f"localhost:{ranks}", sys.executable]
    return finish(launch([*words, *command], **more))


def mpirun(ranks: int, command: Sequence[object], **more: str) -> subprocess.CompletedProcess[str]:
    if shutil.which("mpirun") is None:
        pytest.skip("NOT TESTED: no mpirun (apt-get install openmpi-bin)")
    launcher = ["mpirun", "-np", ranks, "--oversubscribe", "--bind-to", "none", sys.executable]
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return finish(launch([*launcher, *command], **root, **more))


def fused(timeline: Path) -> bool:
    """Say whether Horovod averaged several gradients at once, by its own timeline."""
    return "MEMCPY_IN_FUSION_BUFFER" in timeline.read_text()


def test_two_ranks_of_horovodrun_reach_the_accuracy_and_report_it(
    digits: Path, tmp_path: Path
) -> None:
    """0.95 on the test set, and every phase of both ranks is reported."""
    file, timeline = tmp_path / "events.jsonl", tmp_path / "timeline.json"
    command = [TRAIN, "--data", digits, "--epochs", 6, "--output", tmp_path]
    command += ["--target-accuracy", 0.95, "--checkpoint", tmp_path / "c"]
    command += ["--fusion-threshold-mb", 8, "--cycle-time-ms", 2.5, "--profile", tmp_path / "p"]
    with ChannelReader(f"hpml/test/{uuid.uuid4().hex}", file, "n1") as reader:
        done = horovodrun(2, command, HPML_CHANNEL=reader.name, HOROVOD_TIMELINE=str(timeline))
    assert done.returncode == 0, done.stderr
    result = result_of(tmp_path)
    assert result["test_accuracy"] >= 0.95
    assert 0 < result["seconds_to_accuracy"] <= result["train_seconds"]
    assert (result["world_size"], result["epochs"], result["controller"]) == (2, 6, "gloo")
    assert (result["fusion_threshold_mb"], result["cycle_time_ms"]) == (8, 2.5)
    assert fused(timeline)
    traced = read_profile(tmp_path / "p")
    assert traced is not None
    assert (traced.steps, traced.ranks) == (5, (0, 1))
    found = list(feed.read(file))
    assert reader.refused == 0
    for rank in (0, 1):
        names = [event.event for event in found if event.rank == rank]
        assert {"rendezvous", "preparation", "warm-up", "step", "evaluation"} <= set(names)
        steps = [event.data for event in found if event.rank == rank and event.event == "step"]
        assert steps[-1]["samples_total"] == 6 * 651
    assert sum(event.event == "checkpoint" for event in found) == 6
    (final,) = [event for event in found if event.data.get("final")]
    assert final.data["controller"] == "gloo"


def test_mpi_and_ddp_train_the_same_as_each_other(few: Path, tmp_path: Path) -> None:
    """Averaged by MPI one at a time, or by DDP: the same loss and accuracy after every epoch."""
    common = ["--data", few, "--epochs", 3, "--workers", 0]
    timeline = tmp_path / "timeline.json"
    command = [TRAIN, *common, "--fusion-threshold-mb", 0, "--output", tmp_path]
    done = mpirun(2, command, HOROVOD_TIMELINE=str(timeline))
    assert done.returncode == 0, done.stderr
    assert "improperly" not in done.stderr
    result = result_of(tmp_path)
    assert (result["controller"], result["world_size"]) == ("mpi", 2)
    assert result["fusion_threshold_mb"] == 0
    assert not fused(timeline)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    ddp = run([*torchrun, JOBS / "ddp_images.py", *common])
    assert ddp.returncode == 0, ddp.stderr
    assert len(EPOCH.findall(done.stdout)) == 3
    assert EPOCH.findall(done.stdout) == EPOCH.findall(ddp.stdout)


LOST = """
import sys
sys.path.insert(0, sys.argv[1])
import horovod.torch as hvd
import horovod_images
def alone(optimizer, names, **how):
    return optimizer
hvd.DistributedOptimizer = alone
horovod_images.main(sys.argv[2:])
"""


def test_without_its_averages_horovod_trains_something_else(few: Path, tmp_path: Path) -> None:
    """The comparison with DDP can fail: two ranks that average nothing have another loss."""
    (tmp_path / "lost.py").write_text(LOST)
    common = ["--data", few, "--epochs", 2, "--workers", 0]
    found = [
        EPOCH.findall(horovodrun(2, command).stdout)
        for command in ([TRAIN, *common], [tmp_path / "lost.py", JOBS, *common])
    ]
    assert [len(one) for one in found] == [2, 2]
    assert found[0] != found[1]


@pytest.mark.slow  # three trainings; DDP's resuming is tried in every run
def test_a_resumed_training_ends_with_the_weights_of_one_that_was_not(
    few: Path, tmp_path: Path
) -> None:
    """Rank 0 reads the checkpoint for all; the weights are the same to the bit."""
    import torch  # noqa: PLC0415 - skipped where there is none

    def weights(checkpoint: Path, *more: object) -> tuple[str, dict[str, Any]]:
        command = [TRAIN, "--data", few, "--epochs", 4, "--workers", 0, *more]
        done = horovodrun(2, [*command, "--checkpoint", checkpoint])
        assert done.returncode == 0, done.stderr
        found = load(JOBS / "hpml_checkpoint.py").Checkpoints(checkpoint).latest()
        return done.stdout, found.state["network"]

    _, whole = weights(tmp_path / "whole")
    weights(tmp_path / "part", "--stop-after-epochs", 2)
    said, resumed = weights(tmp_path / "part")
    assert ": 2 epochs, " in said
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_half_precision_and_groups_train_as_well(few: Path, tmp_path: Path) -> None:
    """Gradients that travel as fp16, in two groups; a request ends both ranks at one step."""
    command = [TRAIN, "--data", few, "--workers", 0, "--batch-size", 7, "--output", tmp_path]
    command += ["--compression", "fp16", "--groups", 2, "--checkpoint", tmp_path / "c"]
    reader = ChannelReader(f"hpml/test/{uuid.uuid4().hex}", tmp_path / "n1.jsonl", "n1")
    with reader, ThreadPoolExecutor(1) as pool:
        training = pool.submit(horovodrun, 2, [*command, "--epochs", 400], HPML_CHANNEL=reader.name)
        eventually(lambda: len(reader.peers.stepping) == 2, seconds=LIMIT_SECONDS)
        reader.ask_to_stop("requested")
        done = training.result()
    assert done.returncode == 0, done.stderr
    result = result_of(tmp_path)
    assert (result["compression"], result["groups"], result["stopped"]) == ("fp16", 2, True)
    assert done.stdout.count("stopped: ") == 1


def test_a_missing_directory_ends_all_ranks(tmp_path: Path) -> None:
    """Status 2 on both ranks, and one line of the script's on one of them."""
    done = horovodrun(2, [TRAIN, "--data", tmp_path / "data"])
    assert done.returncode != 0
    for rank in (0, 1):
        assert done.stdout.count(f"Process {rank} exit with status code 2") == 1
    lines = [line for line in done.stderr.splitlines() if "<stderr>" in line]
    assert len(lines) == 1
    assert lines[0].startswith("[0]<stderr>:horovod_images.py: error: --data ")


def test_ranks_that_horovod_does_not_know_are_refused(few: Path) -> None:
    """Started by torchrun, each rank would train alone, and nobody would notice."""
    done = run([TRAIN, "--data", few], RANK="0", WORLD_SIZE="2")
    assert done.returncode == 2
    assert "WORLD_SIZE is 2, but Horovod sees 1 ranks" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("option", "value"),
    [("--fusion-threshold-mb", "-1"), ("--cycle-time-ms", "0"), ("--groups", "0")],
)
def test_settings_that_make_no_sense_are_refused(option: str, value: str) -> None:
    """The message names the option, the status is 2."""
    done = run([TRAIN, "--data", "x", option, value])
    assert done.returncode == 2
    assert option in done.stderr.splitlines()[-1]
