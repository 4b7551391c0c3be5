"""communication.py: every method converges, is exact where it promises to be, and resumes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpml_orchestrator.diagnosis.profile import read_profile
from tests.unit.training_runs import JOBS, LIMIT_SECONDS, TRAINS, environment, load, result_of

pytestmark = TRAINS

METHODS = ("allreduce", "fp16", "bf16", "powersgd", "int8", "topk", "localsgd", "stale", "ps")
KEEPING = ("allreduce", "powersgd", "topk", "localsgd", "stale", "ps")  # each in a way of its own
SHORT = ["--epochs=2", "--width=32", "--run-on"]  # 44 steps of two ranks
# Runs one after the other, whose ranks are forked: PyTorch is imported once. Of each: its number
# of ranks, its arguments, the step at which rank 1 is asked to stop (0: never), and whether the
# collectives are taken out.
RUNS = f"""
import json, os, sys
sys.path.insert(0, {str(JOBS)!r})
import communication, communication_methods
import sklearn.datasets
from hpml_orchestrator.node.startup import free_port

communication.Channel.stop_requested = lambda self: False
for number, (world, arguments, stop, deaf) in enumerate(json.loads(sys.argv[1])):
    port, pids = str(free_port(f"{{os.getpid()}} {{number}}")), []
    for rank in range(world):
        pid = os.fork()
        if pid:
            pids.append(pid)
            continue
        if world > 1:
            os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        if stop and rank == world - 1:
            step, steps = communication.Training.step, []

            def counted(self, *batch):
                steps.append(None)
                return step(self, *batch)

            communication.Training.step = counted
            communication.Channel.stop_requested = lambda self: len(steps) >= stop
        if deaf:
            communication_methods.Wire._timed = lambda self, call: None
        sys.argv = ["communication.py", "--device=cpu", *arguments]
        communication.main()
    print(number, [os.waitpid(pid, 0)[1] for pid in pids], flush=True)
"""


def runs(directory: Path, *wanted: tuple[int, list[str], int, bool]) -> str:
    """Train; return what was printed."""
    script = directory / "runs.py"
    script.write_text(RUNS)
    done = subprocess.run(
        [sys.executable, script, json.dumps(wanted)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    statuses = [line for line in done.stdout.splitlines() if line[:1].isdigit()]
    assert len(statuses) == len(wanted), done.stderr
    assert not any("1" in line.partition(" ")[2] for line in statuses), done.stderr
    return done.stdout


def newest(directory: Path) -> Any:
    return load(JOBS / "hpml_checkpoint.py").Checkpoints(directory).latest()


def test_every_method_reaches_the_target(tmp_path: Path) -> None:
    """0.95 on the test set with two ranks; compressed methods send less than allreduce."""
    traced = f"--profile={tmp_path / 'profile'}"
    runs(
        tmp_path,
        *((2, [f"--method={m}", f"--output={tmp_path / m}", traced], 0, False) for m in METHODS),
    )
    found = {method: result_of(tmp_path / method) for method in METHODS}
    for method, result in found.items():
        assert result["test_accuracy"] >= 0.95, method
        assert 0 < result["seconds_to_accuracy"] <= result["train_seconds"], method
        assert 0 < result["comm_seconds"] < result["train_seconds"], method
        assert result["steps_to_accuracy"] == result["steps"], method
    step = {method: result["bytes_sent"] / result["steps"] for method, result in found.items()}
    parameters = 64 * 256 + 256 + 256 * 256 + 256 + 256 * 10 + 10
    assert step["allreduce"] == step["ps"] == step["stale"] == 4 * parameters
    assert step["fp16"] == step["bf16"] == 2 * parameters
    assert step["int8"] == parameters + 4
    assert step["topk"] == 8 * (parameters // 100)
    assert step["localsgd"] == 4 * parameters / 8
    assert step["powersgd"] < 4 * parameters / 20
    profile = read_profile(tmp_path / "profile")
    assert profile is not None
    assert (profile.steps, profile.traces) == (5, 2)
    assert min(profile.compute, profile.communication, profile.data or 0) > 0


def test_ranks_train_as_one_and_only_together(tmp_path: Path) -> None:
    """The same global batch on 1, 2 and 4 ranks gives the same parameters, but not if deaf."""

    def wanted(method: str, ranks: int, *, deaf: bool = False) -> tuple[int, list[str], int, bool]:
        where = tmp_path / f"{method}{ranks}{deaf}"
        arguments = [*SHORT, f"--batch-size={32 // ranks}", f"--checkpoint={where}"]
        return ranks, [*arguments, f"--method={method}"], 0, deaf

    cases = [("allreduce", 1), ("allreduce", 2), ("allreduce", 4), ("ps", 2)]
    runs(tmp_path, *(wanted(*case) for case in cases), wanted("allreduce", 2, deaf=True))
    one = newest(tmp_path / "allreduce1False").state["vector"]
    for method, ranks in cases:
        vector = newest(tmp_path / f"{method}{ranks}False").state["vector"]
        assert vector.numpy() == pytest.approx(one.numpy(), abs=1e-4), (method, ranks)
    deaf = newest(tmp_path / "allreduce2True").state["vector"]
    assert deaf.numpy() != pytest.approx(one.numpy(), abs=1e-2)


@pytest.mark.parametrize(
    "methods", [KEEPING, pytest.param(("fp16", "bf16", "int8"), marks=pytest.mark.slow)]
)
def test_a_resumed_training_is_the_same_to_the_bit(
    methods: tuple[str, ...], tmp_path: Path
) -> None:
    """Parameters, momenta, errors and late gradients, stopped on one rank's word."""

    def wanted(method: str, name: str, stop: int) -> tuple[int, list[str], int, bool]:
        arguments = [*SHORT, f"--method={method}", f"--checkpoint={tmp_path / (method + name)}"]
        return 2, arguments, stop, False

    every = []
    for method in methods:
        every += [wanted(method, "whole", 0), wanted(method, "part", 13), wanted(method, "part", 0)]
    printed = runs(tmp_path, *every)
    assert printed.count('"stopped": true') == len(methods)
    for method in methods:
        whole, part = newest(tmp_path / f"{method}whole"), newest(tmp_path / f"{method}part")
        assert whole.step == part.step == 44
        assert (whole.state["vector"] == part.state["vector"]).all(), method
        assert whole.state["bytes_sent"] == part.state["bytes_sent"], method
        for one, other in zip(whole.state["ranks"], part.state["ranks"], strict=True):
            assert (one["mine"] == other["mine"]).all(), method
            assert same(one["memory"], other["memory"]), method


def same(one: Any, other: Any) -> bool:
    return one.keys() == other.keys() and all((one[name] == other[name]).all() for name in one)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--method=magic"], "--method"),
        (["--batch-size=0"], "--batch-size"),
        (["--batch-size=5000"], "--batch-size 5000: 5000 samples a step, but only 1437 in all"),
    ],
)
def test_wrong_options_are_named(arguments: list[str], named: str) -> None:
    """One line, and status 2."""
    command = [sys.executable, str(JOBS / "communication.py"), *arguments]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert named in done.stderr.splitlines()[-1]


MEASURED = f"""
import sys
sys.path.insert(0, {str(JOBS)!r})
import communication

def sent():
    with open("/proc/self/net/dev") as file:
        (line,) = (line for line in file if "eth0:" in line)
    return int(line.partition(":")[2].split()[8])

class Wire(communication.Wire):
    def __init__(self):
        super().__init__()
        self.before = sent()

train = communication.train

def measured(options, device, channel):
    figures = train(options, device, channel)
    print("sent", sent() - wires[-1].before, "counted", figures["bytes_sent"], flush=True)
    return figures

wires = []
communication.Wire = lambda: wires.append(Wire()) or wires[-1]
communication.train = measured
communication.main()
"""


@pytest.mark.parametrize("method", ["allreduce", "int8"])
def test_the_bytes_are_those_of_the_network(method: str, tmp_path: Path) -> None:
    """What the kernel counted at the ranks' interfaces, headers and agreement included."""
    if not all(map(shutil.which, ("ip", "tc", "unshare", "nsenter"))):
        pytest.skip("NOT TESTED: shaped links need iproute2 and util-linux")
    (tmp_path / "measured.py").write_text(MEASURED)
    command = [sys.executable, str(JOBS / "shaped_ranks.py"), "--ranks=2", "--mbit=1000"]
    command += [
        str(tmp_path / "measured.py"),
        f"--method={method}",
        "--eval-every=1000",
        "--epochs=4",
    ]
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("sent ")]
    assert len(lines) == 2
    for _, sent, _, counted in lines:
        assert 1 <= float(sent) / float(counted) < 1.15


def test_links_that_cannot_be_shaped_are_named(tmp_path: Path) -> None:
    """A missing script, a bandwidth of nothing; and the status of a script that fails."""
    script = [sys.executable, str(JOBS / "shaped_ranks.py")]

    def call(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*script, *words], env=environment(), capture_output=True, text=True, check=False
        )

    assert call("--mbit=0", "x.py").returncode == 2
    assert "a script" in call("--mbit=10").stderr.splitlines()[-1]
    (tmp_path / "fails.py").write_text(
        "import os, sys, time\nif os.environ['RANK'] == '1':\n    sys.exit(7)\ntime.sleep(60)\n"
    )
    done = call("--mbit=10", str(tmp_path / "fails.py"))
    assert done.returncode in (7, 9), done.stderr
