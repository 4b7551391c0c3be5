"""The agent of a node stages data, marks the node as ready, and removes the data at the end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.node import planning
from hpml_orchestrator.node.agent import Agent
from hpml_orchestrator.node.environment import AgentOptions
from hpml_orchestrator.node.startup import wait_ready
from hpml_orchestrator.placement import planfile
from hpml_orchestrator.records.files import append_line
from hpml_orchestrator.records.job import (
    Binding,
    Checkpoint,
    Job,
    Monitor,
    Resources,
    SiteLimits,
    Stage,
    Verify,
)
from hpml_orchestrator.records.run import Attempt
from hpml_orchestrator.topology.cpulist import format_list
from tests.patience import PATIENCE_SECONDS, eventually
from tests.unit.node.conftest import UNLIMITED, Node, stage

Until = Callable[[Callable[[], object]], object]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A directory of three files."""
    source = tmp_path / "source"
    source.mkdir()
    for number in range(3):
        (source / f"file {number}").write_text("x" * 1000)
    return source


class Running:
    """An agent that runs."""

    def __init__(
        self,
        node: Node,
        *stages: Stage,
        site: SiteLimits = UNLIMITED,
        own: Checkpoint | None = None,
        **more: str,
    ) -> None:
        node.describe(site, stage=stages, checkpoint=own or Checkpoint())
        status, out, err = node.claim("1")
        assert status == 0, err
        self.attempt = Path(out.strip())
        self.marker = self.attempt / "nodes" / "n1.ready.json"
        self.process = node.start("agent", *node.places, **more)

    def over(self) -> None:
        """Say that the job is over, as its script does."""
        (self.attempt / "over").touch()
        self.process.send_signal(signal.SIGUSR1)

    def end(self) -> tuple[int, str]:
        """Wait for the agent's end; return its status and its messages."""
        _, err = self.process.communicate(timeout=PATIENCE_SECONDS)
        return self.process.returncode, err

    def events(self) -> list[dict[str, Any]]:
        """What the node's file of events holds."""
        lines = (self.attempt / "events" / "n1.jsonl").read_text("utf-8").splitlines()
        return [json.loads(line) for line in lines]


@pytest.fixture
def start(node: Node) -> Iterator[Callable[..., Running]]:
    """Start agents, and end what is left of them."""
    started: list[Running] = []

    def make(*stages: Stage, **more: Any) -> Running:
        started.append(Running(node, *stages, **more))
        return started[-1]

    yield make
    for running in started:
        if running.process.poll() is None:
            running.process.kill()
            running.process.communicate()


def test_it_stages_and_cleans_up_when_the_job_is_over(
    start: Callable[..., Running], source: Path, tmp_path: Path, until: Until
) -> None:
    """The data is there when the node is ready, and is removed at the end."""
    target = tmp_path / "target"
    target.mkdir()
    running = start(stage("data", source, target))
    until(running.marker.exists)
    (staged,) = target.glob(f"hpml-{os.getuid()}/*@test-1/data")
    assert sorted(path.name for path in staged.iterdir()) == ["file 0", "file 1", "file 2"]
    marker = json.loads(running.marker.read_text())
    assert (marker["node"], marker["files"], marker["bytes"]) == ("n1", 3, 3000)
    (told,) = marker["stages"]
    assert (told["name"], told["path"], told["files"]) == ("data", str(staged), 3)
    assert (told["method"], told["reused"], told["kept"]) == ("copy", False, False)
    assert running.events()[-1]["data"]["stages"] == marker["stages"]
    assert marker["pid"] == running.process.pid
    assert [one["event"] for one in running.events()] == ["staging", "ready"]
    assert running.events()[0]["data"]["source"] == str(source)
    (running.attempt / "over").touch()  # which needs no signal
    assert running.end() == (0, "")
    assert list(target.iterdir()) == []


@pytest.mark.parametrize("ends", [True, False])
def test_no_signal_takes_the_data_of_living_ranks(
    start: Callable[..., Running],
    source: Path,
    tmp_path: Path,
    until: Until,
    rank: subprocess.Popen[bytes],
    ends: bool,
) -> None:
    """They are on record; one that ends processes ends the agent, too, once no rank lives."""
    target = tmp_path / "target"
    target.mkdir()
    running = start(stage("data", source, target, kind="tree"))
    until(running.marker.exists)
    record(running.attempt, 0, rank.pid, format_list(os.sched_getaffinity(0)))
    numbers = [signal.SIGUSR1, signal.SIGUSR2]
    if ends:
        numbers += [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT]
    for number in numbers:
        running.process.send_signal(number)
    until(
        lambda: (
            {one["data"]["name"] for one in running.events() if one["event"] == "signal"}
            == {number.name for number in numbers}
        )
    )
    assert len(list(target.glob("*/*/data/*"))) == 3
    rank.kill()
    rank.wait()
    if not ends:
        running.over()
    assert running.end()[0] == 0
    assert list(target.iterdir()) == []


def test_ranks_that_outlive_the_job_are_ended_before_their_data_go(
    start: Callable[..., Running], source: Path, tmp_path: Path, until: Until
) -> None:
    """Slurm's SIGKILL would take the agent, too, and the data would stay in memory."""
    target = tmp_path / "target"
    target.mkdir()
    running = start(stage("data", source, target, kind="tree"), HPML_LOCAL_KILL_WAIT="0.5")
    until(running.marker.exists)
    stubborn = ["bash", "-c", "trap '' TERM; echo; while :; do sleep 0.1; done"]
    with subprocess.Popen(stubborn, stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout is not None
        rank.stdout.readline()
        record(running.attempt, 0, rank.pid, format_list(os.sched_getaffinity(0)))
        running.process.send_signal(signal.SIGTERM)
        running.over()
        assert rank.wait(PATIENCE_SECONDS) == -signal.SIGKILL
    assert running.end() == (0, "")
    assert list(target.iterdir()) == []


def failed(running: Running) -> dict[str, Any]:
    marker: dict[str, Any] = json.loads(
        (running.attempt / "nodes" / "n1.failed.json").read_text("utf-8")
    )
    return marker


def test_data_that_is_not_there_fails_the_node(
    start: Callable[..., Running], tmp_path: Path
) -> None:
    """The failed marker names the missing source; nothing is left."""
    target = tmp_path / "target"
    target.mkdir()
    running = start(stage("data", tmp_path / "none", target))
    assert running.end() == (1, "")  # wait-ready prints it, once for all nodes
    assert "No such file or directory" in failed(running)["message"]
    assert not running.marker.exists()
    assert list(target.iterdir()) == []


def test_told_to_end_while_it_stages(
    start: Callable[..., Running], tmp_path: Path, until: Until
) -> None:
    """SIGTERM in the middle of a copy ends it: no marker, no data, and the run may continue."""
    source = tmp_path / "large"
    source.mkdir()
    for number in range(200):
        (source / str(number)).touch()
    target = tmp_path / "target"
    target.mkdir()
    running = start(
        stage("data", source, target, kind="tree"),
        site=SiteLimits(opens_per_second=50),
        own=Checkpoint(enabled=True, requeue=("preemption",)),
    )
    until(lambda: list(target.glob("*/*/.data.partial-*")))
    running.process.send_signal(signal.SIGTERM)
    assert running.end()[0] == 0
    request = Attempt(running.attempt).stop_request()
    assert request is not None
    assert request["reason"] == "preemption"
    assert not running.marker.exists()
    assert not (running.attempt / "nodes" / "n1.failed.json").exists()
    assert list(target.iterdir()) == []


def record(attempt: Path, rank: int, pid: int, cpus: str) -> None:
    """Append what hpml-bind writes."""
    ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    inherited = format_list(os.sched_getaffinity(0))
    line = {"rank": rank, "local_rank": rank, "pid": pid, "start_ticks": ticks, "cpus": cpus}
    line |= {"inherited": inherited, "child_cpus": cpus, "threads": 1}
    append_line(attempt / "binding" / "n1.jsonl", json.dumps(line))


@pytest.fixture
def rank() -> Iterator[subprocess.Popen[bytes]]:
    """A real process that waits on one of this machine's CPUs."""
    one = str(min(os.sched_getaffinity(0)))
    with subprocess.Popen(["taskset", "-c", one, "cat"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def run_here(options: AgentOptions, during: Callable[[], object] = lambda: None) -> int:
    """Run an agent in this process, for what cannot be had on demand; returns its status.

    Once the node is ready, `during` is called, and then the job is over.
    """
    agent = Agent(options, node="n1")
    with ThreadPoolExecutor() as pool:
        status = pool.submit(agent.run)
        eventually(lambda: status.done() or (options.attempt / "nodes/n1.ready.json").exists())
        try:
            during()
        finally:
            (options.attempt / "over").touch()
            agent.on_signal(signal.SIGUSR1, None)
        return status.result(PATIENCE_SECONDS)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
@pytest.mark.parametrize("verify", ["warn", "strict"])
def test_it_looks_at_the_ranks(
    node: Node,
    rank: subprocess.Popen[bytes],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    verify: Verify,
) -> None:
    """A rank on one CPU of two is reported; if the job is strict the rank is ended, the job 79."""
    monkeypatch.setattr("hpml_orchestrator.node.watch.LOOKS_SECONDS", (0.1, 0.2))
    node.claim("1")
    proof = node.attempt / "binding" / "n1.proof.json"

    def during() -> None:
        eventually(lambda: len(os.sched_getaffinity(rank.pid)) == 1)
        record(node.attempt, 0, rank.pid, format_list(os.sched_getaffinity(0)))
        eventually(lambda: proof.exists() and "alone, not on its own" in proof.read_text("utf-8"))
        if verify == "strict":
            assert rank.wait(PATIENCE_SECONDS) == -signal.SIGTERM
        rank.kill()

    asked = Job("probe", binding=Binding(verify=verify))
    assert run_here(AgentOptions(node.attempt, asked), during) == 0
    err = capsys.readouterr().err
    assert err.startswith("hpml: n1: 1 rank bound (gpu-local), 1 core and 1 thread each, 1 wrong\n")
    assert err.count("alone, not on its own") == (verify == "warn")
    code = "0" if verify == "warn" else "143"
    _, status_of_script, told = node.call("finish", *node.places, code)
    assert status_of_script == ("0\n" if verify == "warn" else "79\n")
    assert told.startswith("hpml: binding: 1 of 1 ranks WRONG\n")
    assert told.count("alone, not on its own") == (verify == "strict")


def cannot_be_read(*_: object, **__: object) -> None:
    """A fake fault: a kernel without /sys cannot be had on demand."""
    raise InputError("/sys: no CPUs found", hint="is /sys mounted?")


@pytest.mark.parametrize("verify", ["warn", "strict"])
def test_a_node_that_cannot_be_planned(
    node: Node,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    verify: Verify,
) -> None:
    """Nothing is bound, with a warning; with `verify: strict` the node fails instead."""
    monkeypatch.setattr(planning, "read_sysfs", cannot_be_read)
    node.claim("1")
    asked = Job("probe", resources=Resources(ranks_per_node=2), binding=Binding(verify=verify))
    assert run_here(AgentOptions(node.attempt, asked)) == (verify == "strict")
    plan = node.attempt / "plan/n1.txt"
    if verify == "strict":
        marker = json.loads((node.attempt / "nodes/n1.failed.json").read_text("utf-8"))
        assert marker["message"] == "the ranks cannot be placed: /sys: no CPUs found"
        assert (marker["hint"], marker["exit_code"]) == ("is /sys mounted?", 79)
        assert not plan.exists()
    else:
        assert planfile.find(plan.read_text(), 1)["bind"] == "no"
        assert wait_ready(str(node.attempt), "1", str(os.getpid())) == 0
        assert capsys.readouterr().err == (
            "hpml: 1 node ready\nhpml: warning: n1: the ranks cannot be placed: /sys: no CPUs "
            "found; nothing is bound\n"
        )


def test_faults_of_hpmls_own_leave_the_job_alone(
    node: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A watch and a monitor that fail (fakes) are a line each, and the agent continues."""

    def fails(*_: object, **__: object) -> float:
        raise ZeroDivisionError("no CPUs")

    for step in ("act", "close"):
        monkeypatch.setattr(f"hpml_orchestrator.node.watch.Watch.{step}", fails)
    monkeypatch.setattr("hpml_orchestrator.node.monitor.NodeMonitor.start", fails)
    node.claim("1")
    asked = Job("probe", monitor=Monitor(enabled=True))
    assert run_here(AgentOptions(node.attempt, asked)) == 0
    assert sorted(caplog.messages) == [
        "n1: binding verification stopped: ZeroDivisionError: no CPUs",
        "n1: the job is not monitored: ZeroDivisionError: no CPUs",
    ]
