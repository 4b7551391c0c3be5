"""communication.py: every method converges, is exact if it promises to be, and resumes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from hpml_orchestrator.diagnosis.profile import read_profile
from tests.unit.local_runs import Desk
from tests.unit.training_runs import (
    JOBS,
    TRAINS,
    environment,
    finish,
    launch,
    load,
    result_of,
    run_forked,
)

pytestmark = TRAINS

METHODS = ("allreduce", "fp16", "bf16", "powersgd", "int8", "topk", "localsgd", "stale", "ps")
KEEPING = ("allreduce", "powersgd", "topk", "localsgd", "stale", "ps")  # each in its own way
SHORT = ["--epochs=2", "--width=32", "--run-on"]  # 40 steps of two ranks
# On the last rank a stop is requested at a step.
STOP = """
steps, step = [], job.Training.step

def counted(self, *batch):
    steps.append(None)
    return step(self, *batch)

job.Training.step = counted
if rank == 1:
    job.Channel.stop_requested = lambda self: len(steps) >= {step}
"""
# The collectives are taken out: each rank gets what it would have sent.
DEAF = "job.Wire._timed = lambda self, call, wait=True: None"
Wanted = tuple[int, list[str], str]  # ranks, arguments, changes


def runs(directory: Path, *wanted: Wanted) -> str:
    """Train; return what was printed."""
    return run_forked(directory, "communication", wanted, ["sklearn.datasets"])


def newest(directory: Path) -> Any:
    return load(JOBS / "hpml_checkpoint.py").Checkpoints(directory).latest()


def test_every_method_reaches_the_target(tmp_path: Path) -> None:
    """0.95 in validation with two ranks; compressed methods send less than allreduce."""
    traced = f"--profile={tmp_path / 'profile'}"
    runs(
        tmp_path,
        *((2, [f"--method={m}", f"--output={tmp_path / m}", traced], "") for m in METHODS),
    )
    found = {method: result_of(tmp_path / method) for method in METHODS}
    for method, result in found.items():
        assert result["validation_accuracy"] >= 0.95, method
        assert result["test_accuracy"] >= 0.9, method
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


def test_ranks_train_as_one(tmp_path: Path) -> None:
    """The same global batch gives the same parameters on 1, 2 and 4 ranks."""

    def wanted(method: str, ranks: int) -> Wanted:
        where = tmp_path / f"{method}{ranks}"
        arguments = [*SHORT, f"--batch-size={32 // ranks}", f"--checkpoint={where}"]
        return ranks, [*arguments, f"--method={method}"], ""

    cases = [("allreduce", 1), ("allreduce", 2), ("allreduce", 4), ("ps", 2), ("ps", 4)]
    runs(tmp_path, *(wanted(*case) for case in cases))
    one = newest(tmp_path / "allreduce1").state["vector"]
    for method, ranks in cases:
        vector = newest(tmp_path / f"{method}{ranks}").state["vector"]
        assert vector.numpy() == pytest.approx(one.numpy(), abs=1e-4), (method, ranks)


@pytest.mark.parametrize(
    "methods", [KEEPING, pytest.param(("fp16", "bf16", "int8"), marks=pytest.mark.slow)]
)
def test_a_resumed_training_is_the_same_to_the_bit_but_not_a_deaf_one(
    methods: tuple[str, ...], tmp_path: Path
) -> None:
    """Parameters, momenta, errors and late gradients, stopped on one rank's word.

    Without its collective, each method trains another network.
    """

    def wanted(method: str, name: str, change: str) -> Wanted:
        arguments = [*SHORT, f"--method={method}", f"--checkpoint={tmp_path / (method + name)}"]
        return 2, arguments, change

    every = []
    for method in methods:
        every += [wanted(method, "whole", ""), wanted(method, "part", STOP.format(step=13))]
        every += [wanted(method, "part", ""), wanted(method, "deaf", DEAF)]
    printed = runs(tmp_path, *every)
    assert printed.count('"stopped": true') == len(methods)
    assert printed.count("stopped: {") == len(methods)
    for method in methods:
        whole, part = newest(tmp_path / f"{method}whole"), newest(tmp_path / f"{method}part")
        assert whole.step == part.step == 40
        assert (whole.state["vector"] == part.state["vector"]).all(), method
        assert whole.state["wire"][:2] == part.state["wire"][:2], method
        for one, other in zip(whole.state["ranks"], part.state["ranks"], strict=True):
            assert (one["mine"] == other["mine"]).all(), method
            assert same(one["memory"], other["memory"]), method
        deaf = newest(tmp_path / f"{method}deaf")
        assert (deaf.state["vector"] - whole.state["vector"]).abs().max() > 0.01, method


def same(one: Any, other: Any) -> bool:
    return one.keys() == other.keys() and all((one[name] == other[name]).all() for name in one)


def test_wrong_options_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, and status 2; or, if the data decide, an error that becomes a line."""
    monkeypatch.syspath_prepend(JOBS)
    job = load(JOBS / "communication.py")
    for argument in ("--method=magic", "--batch-size=0"):
        monkeypatch.setattr("sys.argv", ["communication.py", argument])
        with pytest.raises(SystemExit, match="2"):
            job.options()
        assert argument.partition("=")[0] in capsys.readouterr().err.splitlines()[-1]
    monkeypatch.setattr("sys.argv", ["communication.py", "--batch-size=5000"])
    with pytest.raises(job.CheckpointError, match="5000 samples a step, but only 1293 in all"):
        job.Data(job.options(), job.Wire(), "cpu")


# Each method in turn on shaped links, in forked processes: PyTorch is imported once per rank.
NINE = f"""
import os, sys
sys.path.insert(0, {str(JOBS)!r})
import communication, sklearn.datasets, torch._dynamo
for number, method in enumerate(communication.METHODS):
    if not (pid := os.fork()):
        os.environ["MASTER_PORT"] = str(29500 + number)
        sys.argv = ["communication.py", "--method=" + method, "--output=" + sys.argv[1] + method]
        sys.argv += ["--epochs=1", "--run-on", "--device=cpu"]
        communication.main()
    if os.waitpid(pid, 0)[1]:
        sys.exit(1)
"""


def test_no_method_is_faster_than_the_wire(tmp_path: Path) -> None:
    """At 20 Mbit/s; what the kernel counted at the ranks' interfaces is sent, and a bit more.

    What `stale` sends while it computes counts, too: its clock stops when all of it has arrived.
    """
    if not all(map(shutil.which, ("ip", "tc", "unshare", "nsenter"))):
        pytest.skip("NOT TESTED: shaped links need iproute2 and util-linux")
    (tmp_path / "nine.py").write_text(NINE)
    command = [sys.executable, JOBS / "shaped_ranks.py", "--ranks=2", "--mbit=20"]
    done = finish(launch([*command, tmp_path / "nine.py", f"{tmp_path}/"]))
    assert done.returncode == 0, done.stderr
    for method in METHODS:
        result = result_of(tmp_path / method)
        assert result["bandwidth_mbit"] == 20
        on_the_wire = 8 * result["bytes_sent"] / 20e6
        assert result["train_seconds"] >= on_the_wire, method
        assert result["predicted_seconds"] >= on_the_wire, method
        # Headers, acknowledgements, and the ranks' agreement on when to stop; powersgd and topk
        # send many small messages.
        most = 4 if method in ("powersgd", "topk") else 1.15
        # What still waits in the link's queue at the end of a step is not counted.
        assert 0.9 <= result["interface_bytes"] / result["bytes_sent"] < most, method


def test_the_prediction_takes_the_figures_of_hpml_bench(tmp_path: Path) -> None:
    """2 L log2(n) + 2 m G (n - 1) / n for each of the 20 all-reduces, or the halves of ps."""
    figures = ["--epochs=1", "--run-on", "--latency-us=1000", "--bandwidth-gb=0.001"]
    methods, nothing = ("allreduce", "ps"), tmp_path / "nothing"
    wanted = [(2, [*figures, f"--method={m}", f"--output={tmp_path / m}"], "") for m in methods]
    runs(tmp_path, *wanted, (2, [*figures[:3], f"--output={nothing}"], ""))
    for method in methods:
        result = result_of(tmp_path / method)
        expected = 20 * 2 * 0.001 + result["bytes_sent"] / 1e6
        assert result["predicted_seconds"] == pytest.approx(expected), method
    result = result_of(nothing)
    assert result["predicted_seconds"] is result["interface_bytes"] is None


@pytest.mark.slow
def test_a_sweep_finds_the_bandwidth_below_which_topk_wins(tmp_path: Path) -> None:
    """communication_sweep.yaml with fewer points, on shaped links: all runs reach the target."""
    if not all(map(shutil.which, ("ip", "tc", "unshare", "nsenter"))):
        pytest.skip("NOT TESTED: shaped links need iproute2 and util-linux")
    for file in (*JOBS.glob("*.py"), JOBS / "communication.yaml"):
        shutil.copy(file, tmp_path)
    sweep = YAML(typ="safe").load(JOBS / "communication_sweep.yaml")
    sweep["axes"] = {"--method": ["allreduce", "topk"], "--ranks": [2, 4], "--mbit": [10, 3000]}
    sweep["repeats"] = 1
    sweep["set"]["environment.python"] = sys.executable
    (tmp_path / "sweep.yaml").write_text(json.dumps(sweep))
    report = Desk(tmp_path).json("sweep", "run", "sweep.yaml", "--local")
    costs = {
        (one["method"], one["ranks"], one["mbit"]): one for one in report["communication"]["costs"]
    }
    assert len(costs) == 8
    for one in costs.values():
        assert one["reached"] == one["runs"] == 1
    for ranks in (2, 4):
        slow, fast = costs["allreduce", ranks, 10], costs["topk", ranks, 10]
        assert slow["bytes_sent"] > 5 * fast["bytes_sent"]
        assert slow["seconds"]["value"] > fast["seconds"]["value"]
    crossovers = report["communication"]["crossovers"]
    assert {(one["method"], one["ranks"]) for one in crossovers} == {("topk", 2), ("topk", 4)}


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
