"""The stop path: when ranks are asked to stop, by whom, and when they are ended."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpml_orchestrator.node import planning
from hpml_orchestrator.node.channel import ChannelReader, Peers
from hpml_orchestrator.node.continuation import AllocationState, Decision, decide
from hpml_orchestrator.node.environment import AgentOptions
from hpml_orchestrator.node.processes import StartedRank
from hpml_orchestrator.node.stopping import StopPath, collect_stacks
from hpml_orchestrator.placement import planfile
from hpml_orchestrator.placement.verify import Seen
from hpml_orchestrator.records.files import write_json
from hpml_orchestrator.records.job import Checkpoint, Job, Resources
from hpml_orchestrator.records.run import PRUNED, Attempt, end_margin, lead_seconds
from tests.patience import PATIENCE_SECONDS, eventually
from tests.unit.node.conftest import Node
from tests.unit.node.test_agent import run_here

NOW = 1_700_000_000.0
SAVES = Checkpoint(enabled=True)


@pytest.mark.parametrize(
    ("configured", "save", "step", "limit", "lead"),
    [
        (None, None, None, 7200, 300),  # the first attempt
        (None, None, None, None, 300),
        (None, None, None, 600, 150),  # a quarter of the limit at most
        (None, None, None, 20, 10),  # but 10 s at least
        (None, 60, 2, 7200, 77),
        (None, 60, None, 7200, 75),
        (None, 5000, 2, 7200, 1800),
        (None, 0.1, 0.01, 7200, 15.11),
        (40, 60, 2, 100, 40),  # as configured
        (2, None, None, 100, 2),
    ],
)
def test_lead(
    configured: float | None,
    save: float | None,
    step: float | None,
    limit: float | None,
    lead: float,
) -> None:
    """The lead is what was configured, or the slowest save and step with a margin."""
    assert lead_seconds(configured, limit, save=save, step=step) == pytest.approx(lead)


@pytest.mark.parametrize(("lead", "margin"), [(10, 5), (60, 15), (300, 30)])
def test_end_margin(lead: float, margin: float) -> None:
    """Ranks that still live are ended 5 to 30 s before the limit."""
    assert end_margin(lead) == margin


class Rig:
    """A stop path with a real channel and records; the clock, Slurm and kill are fakes."""

    def __init__(self, root: Path, **options: Any) -> None:
        self.environment = {"SLURM_JOB_ID": "7", "SLURM_NODEID": "0", "SLURM_NNODES": "2"}
        self.environment.update(options.pop("environment", {}))
        self.attempt = root / "runs" / "r" / "attempts" / "0"
        (self.attempt / "events").mkdir(parents=True, exist_ok=True)
        self.channel = ChannelReader(f"hpml-test-{os.getpid()}", root / "events.jsonl", "n1")
        self.now = 0.0
        self.states: list[AllocationState] = []
        self.killed: list[tuple[float, int, list[int]]] = []
        self.path = StopPath(
            Job("r", resources=Resources(time=1000), checkpoint=Checkpoint(True, **options)),
            self.attempt,
            "n1",
            self.channel,
            environment=self.environment,
            grace=lambda: 27.0,
            ask=self._ask,
            kill=self._kill,
            clock=lambda: NOW + self.now,
        )

    def _ask(self, _: Mapping[str, str]) -> AllocationState:
        return self.states.pop(0) if self.states else AllocationState()

    def _kill(self, ranks: Any, number: int) -> None:
        self.killed.append((self.now, number, [rank.pid for rank in ranks]))

    @property
    def requests(self) -> list[str]:
        """The reasons in the attempt's file."""
        file = self.attempt / "stop"
        lines = file.read_text("utf-8").splitlines() if file.exists() else []
        return [json.loads(line)["reason"] for line in lines]

    def until(self, end: float, ranks: list[StartedRank]) -> None:
        """Let the agent's loop run until a time."""
        while self.now < end:
            self.now += min(max(self.path.act(self.now, ranks), 0.01), 1.0, end - self.now + 1e-9)


@pytest.fixture
def sleeper() -> Iterator[StartedRank]:
    """A rank that uses no channel and handles no signal."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield StartedRank(Seen(0, 0, process.pid))
        process.kill()


@pytest.mark.parametrize(
    ("states", "requests", "killed_at"),
    [
        (["RUNNING"], ["preemption"], None),  # scancel --signal=TERM, GraceTime
        (["CANCELLED"], [], 1),
        (["PREEMPTED"], ["preemption"], 28),
        (["REQUEUED"], ["preemption"], 28),
        (["TIMEOUT"], ["time_limit"], 28),
        (["", "CANCELLED"], ["preemption"], 3),  # asked again
        (["", "", "REQUEUED"], ["preemption"], 28),
        ([""] * 20, ["preemption"], None),  # nobody answers
    ],
)
def test_a_sigterm_is_judged_by_the_state_of_the_job(
    tmp_path: Path,
    sleeper: StartedRank,
    states: list[str],
    requests: list[str],
    killed_at: float | None,
) -> None:
    """A cancelled job ends at once; else ranks may save, as long as Slurm gives them."""
    rig = Rig(tmp_path)
    rig.states = [AllocationState(state) for state in states]
    rig.now = 1.0
    rig.path.on_sigterm(1.0)
    with rig.channel:
        rig.until(40.0, [sleeper])
    assert rig.requests == requests
    assert [time for time, _, _ in rig.killed][:1] == (
        [] if killed_at is None else [pytest.approx(killed_at, abs=0.1)]
    )
    assert {(number, *pids) for _, number, pids in rig.killed} <= {(signal.SIGKILL, sleeper.pid)}


def limits(seconds: float, **more: str) -> dict[str, str]:
    """The variables of a job that its limit ends after so many seconds."""
    end = str(int(NOW + seconds))
    return {"SLURM_JOB_START_TIME": str(int(NOW)), "SLURM_JOB_END_TIME": end, **more}


@pytest.mark.parametrize(
    ("node", "answers", "requested_at", "killed_at"),
    [
        ("0", [NOW + 1000, NOW + 1000], 900, 975),
        ("0", [], 900, 975),  # nobody answers
        ("0", [NOW + 1000, NOW + 2000, NOW + 2000], 1900, 1975),  # it was extended
        ("0", [NOW + 500, NOW + 500], 400, 475),  # it began with another than the script has
        ("0", [NOW + 1000, None], None, None),  # it was taken away
        ("1", [NOW + 1000] * 9, None, None),  # the first node watches
    ],
)
def test_the_first_node_watches_the_limit(
    tmp_path: Path,
    sleeper: StartedRank,
    node: str,
    answers: list[float | None],
    requested_at: float | None,
    killed_at: float | None,
) -> None:
    """Ranks are asked to stop before the limit that Slurm has by then, and ended before it."""
    rig = Rig(tmp_path, lead=100, environment=limits(1000, SLURM_NODEID=node))
    rig.states = [AllocationState("RUNNING", end) for end in answers]
    with rig.channel:
        rig.until(2100.0, [sleeper])
    request = Attempt(rig.attempt).stop_request()
    asked = None if request is None else request["time"] - NOW
    assert asked == (requested_at and pytest.approx(requested_at, abs=2.1))
    assert [time for time, _, _ in rig.killed][:1] == (
        [] if killed_at is None else [pytest.approx(killed_at, abs=0.1)]
    )


def test_the_other_nodes_ask_for_the_end_of_the_job(tmp_path: Path, sleeper: StartedRank) -> None:
    """A limit that was changed since the start counts for their ranks, too."""
    rig = Rig(tmp_path, environment=limits(1000, SLURM_NODEID="1"))
    rig.states = [AllocationState("RUNNING", NOW + 2000)]
    Attempt(rig.attempt).request_stop("time_limit", by="n0", now=NOW + 1900)
    Attempt(rig.attempt).request_stop("hang", by="n2", now=NOW + 1901)  # the first one counts
    rig.now = 1901.0
    with rig.channel:
        rig.until(1990.0, [sleeper])
    assert rig.path.reason == "time_limit"
    assert rig.killed[0][0] == pytest.approx(1975, abs=0.1)


def test_ranks_that_do_not_hear_a_request_are_ended(tmp_path: Path, sleeper: StartedRank) -> None:
    """After `hpml requeue` they get as long as before a time limit."""
    rig = Rig(tmp_path, lead=40)
    with rig.channel:
        Attempt(rig.attempt).request_stop("requested", by="login1", now=NOW)
        rig.until(39, [sleeper])
        assert not rig.killed
        rig.until(42, [sleeper])
    assert rig.killed[0][1:] == (signal.SIGKILL, [sleeper.pid])


def test_the_lead_is_learned_from_earlier_attempts(tmp_path: Path) -> None:
    """The slowest save and step of all attempts count, those of this one too."""
    for number, (save, step) in enumerate([(20, 3), (50, None), ("x", 1)], start=1):
        earlier = tmp_path / "runs" / "r" / "attempts" / str(number)
        earlier.mkdir(parents=True)
        end = {"exit_code": 0, "time": 1.0, "slowest_save": save, "slowest_step": step}
        write_json(earlier / "ended.json", end)
    rig = Rig(tmp_path, environment=limits(1000))
    with rig.channel, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as rank:
        rig.until(900.0, [])
        assert rig.requests == []
        send(rank, rig.channel.name, "event", "checkpoint", seconds=80)
        eventually(lambda: rig.channel.peers.slowest.save)
        rig.until(901.5, [])
        rig.until(903.0, [])  # 1000 - 80 - 3 - 15 = 902
    assert rig.requests == ["time_limit"]


def send(rank: socket.socket, name: str, kind: str, event: str, **data: Any) -> None:
    """Send a datagram as hpml_channel.py does."""
    message = {"v": 1, "type": kind, "event": event, "rank": 0, "local_rank": 0, "world_size": 1}
    rank.sendto(json.dumps({**message, "time": time.time(), "data": data}).encode(), "\0" + name)


def test_silence_after_a_step_is_a_hang(tmp_path: Path) -> None:
    """A datagram of any kind and a suspended job begin the time anew; a debugger does, too."""
    rig = Rig(tmp_path, hang=60)
    me = StartedRank(Seen(0, 3, os.getpid()))

    def hear(event: str) -> None:
        heard = rig.channel.peers.heard
        send(rank, rig.channel.name, "event", event)
        eventually(lambda: rig.channel.peers.heard > heard)

    with rig.channel, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as rank:
        hear("warm-up")
        rig.until(500.0, [me])  # it may compile for hours before its first step
        hear("step")
        rig.until(550.0, [me])
        hear("evaluation")
        rig.until(600.0, [me])
        rig.now += 5000.0  # this agent did not run, either
        rig.until(5605.0, [me])
        with subprocess.Popen(["sleep", "600"]) as traced:
            assert ptrace(PTRACE_ATTACH, traced.pid) == 0
            os.waitpid(traced.pid, 0)  # it stops
            rig.until(5800.0, [me])
            traced.kill()
        rig.until(5801.0, [])  # all ranks have ended
        assert rig.requests == []
        rig.until(5900.0, [me])
    assert rig.requests == ["hang"]
    (event,) = [one for one in Attempt(rig.attempt).events() if one.event == "hang"]
    assert event.data["ranks"] == [3]
    assert 60 <= event.data["seconds"] < 63
    asked = Attempt(rig.attempt).stop_request()
    assert asked is not None
    assert rig.killed[0][0] == pytest.approx(asked["time"] - NOW + 10, abs=0.1)


PTRACE_ATTACH = 16


def ptrace(request: int, pid: int) -> int:
    """Call a function that Python does not have."""
    status: int = ctypes.CDLL(None).ptrace(request, pid, None, None)
    return status


# A rank that speaks the channel's format, without hpml_channel.py.
PREAMBLE = """\
import faulthandler, json, os, signal, socket, sys, time
channel = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
channel.bind("")
def send(kind, event, **data):
    message = {"v": 1, "type": kind, "event": event, "rank": int(os.environ["RANK"]), "data": data}
    channel.sendto(json.dumps(message).encode(), chr(0) + os.environ["HPML_CHANNEL"])
"""
WAITS_FOR_THE_REQUEST = (
    'send("hello", "hello"); print("up", flush=True); print(json.loads(channel.recv(999)))'
)
OUTLIVES = 'print("up", flush=True); time.sleep(600)'
HANDLES = (
    "signal.signal(signal.SIG{0}, lambda *_: (print(1, flush=True), os._exit(5)));"
    'print("up", flush=True); time.sleep(600)'
)


class Running:
    """A real agent on node n1 whose job saves checkpoints, and ranks under a real hpml-bind."""

    def __init__(self, node: Node, root: Path, own: Checkpoint, **more: str) -> None:
        node.describe(checkpoint=own)
        status, out, err = node.claim("1")
        assert status == 0, err
        self.node = node
        self.attempt = Path(out.strip())
        self.state = root / "0.json"
        variables = {"HPML_LOCAL_KILL_WAIT": "5", **more}
        variables["HPML_LOCAL_STEPS"] = f"{root}/steps-0"
        self.process = node.start("agent", *node.places, **variables)
        self.ranks: list[subprocess.Popen[str]] = []
        eventually((self.attempt / "nodes" / "n1.ready.json").exists)

    def start_rank(self, code: str) -> subprocess.Popen[str]:
        """Start a program as rank 0; it has printed that it is up."""
        words = ("bind", str(self.attempt), "--", sys.executable, "-c", PREAMBLE + code)
        rank = self.node.start(*words, SLURM_PROCID="0", SLURM_STEP_NUM_TASKS="1")
        self.ranks.append(rank)
        assert rank.stdout is not None
        assert rank.stdout.readline() == "up\n", rank.communicate()
        return rank

    def end(self) -> int:
        """End the job and return the agent's status."""
        (self.attempt / "over").touch()
        self.process.send_signal(signal.SIGUSR1)
        _, err = self.process.communicate(timeout=PATIENCE_SECONDS)
        assert "Traceback" not in err, err
        return self.process.returncode

    def told(self) -> list[str]:
        """The reasons of the node's events `stop`."""
        return [one.data["reason"] for one in Attempt(self.attempt).events() if one.event == "stop"]


@pytest.fixture
def start(node: Node, tmp_path: Path) -> Iterator[Callable[..., Running]]:
    """Start agents, and end what is left of them and their ranks."""
    started: list[Running] = []

    def make(own: Checkpoint = SAVES, **more: str) -> Running:
        started.append(Running(node, tmp_path, own, **more))
        return started[-1]

    yield make
    for running in started:
        for process in (running.process, *running.ranks):
            if process.poll() is None:
                process.kill()
            process.communicate()


def test_ranks_hear_a_request_through_the_channel(start: Callable[..., Running]) -> None:
    """Those that run when it is made, and those that start later; the node has it on record."""
    running = start()
    first = running.start_rank(WAITS_FOR_THE_REQUEST)
    Attempt(running.attempt).request_stop("requested", by="a user", now=1.0)
    assert first.communicate(timeout=PATIENCE_SECONDS) == ("{'v': 1, 'stop': 'requested'}\n", "")
    newcomer = running.start_rank(WAITS_FOR_THE_REQUEST)
    assert "requested" in newcomer.communicate(timeout=PATIENCE_SECONDS)[0]
    assert running.process.poll() is None
    assert running.end() == 0
    assert running.told() == ["requested"]
    assert "hello" not in (running.attempt / "events" / "n1.jsonl").read_text("utf-8")


def test_a_search_stops_a_trial_that_saves_no_checkpoints(start: Callable[..., Running]) -> None:
    """The request reaches ranks that run and those that start later, as with checkpoints."""
    running = start(Checkpoint())
    first = running.start_rank(WAITS_FOR_THE_REQUEST)
    Attempt(running.attempt).request_stop(PRUNED, by="search", now=1.0)
    assert "'pruned'" in first.communicate(timeout=PATIENCE_SECONDS)[0]
    newcomer = running.start_rank(WAITS_FOR_THE_REQUEST)
    assert "'pruned'" in newcomer.communicate(timeout=PATIENCE_SECONDS)[0]
    assert running.end() == 0


@pytest.mark.parametrize("stopping", [True, False])
def test_no_trial_continues_that_a_search_gave_up(stopping: bool) -> None:
    """It ends as it ends: with status 0 it is complete, and the search calls it pruned."""
    known: dict[str, Any] = {"state": "COMPLETED", "exit_code": 0, "channel": True}
    assert decide(SAVES, asked=PRUNED, stopping=stopping, **known, progress=[True]) == Decision()


@pytest.mark.parametrize(
    ("state", "reason", "code", "status"),
    [
        ({"state": "RUNNING"}, "preemption", WAITS_FOR_THE_REQUEST, 0),
        ({"state": "COMPLETING", "reason": "TimeLimit"}, "time_limit", WAITS_FOR_THE_REQUEST, 0),
        ({"state": "COMPLETING", "reason": "TimeLimit"}, "time_limit", OUTLIVES, -signal.SIGKILL),
        ({"state": "COMPLETING", "reason": "cancelled"}, "", OUTLIVES, -signal.SIGKILL),
        ({"state": "COMPLETING", "reason": "cancelled"}, "", HANDLES.format("TERM"), 5),
    ],
)
def test_ranks_survive_a_sigterm_until_they_have_saved(
    start: Callable[..., Running], state: dict[str, str], reason: str, code: str, status: int
) -> None:
    """Only a cancelled job ends at once, and one whose time is over in time."""
    running = start(HPML_LOCAL_KILL_WAIT="60" if reason == "" else "4")
    running.state.write_text(json.dumps({"reason": "", **state}))
    rank = running.start_rank(code)
    rank.send_signal(signal.SIGTERM if "SIGTERM" not in code else 0)
    running.process.send_signal(signal.SIGTERM)
    assert rank.wait(PATIENCE_SECONDS) == status
    assert running.told() == ([reason] if reason else [])
    if state["state"] == "RUNNING":  # the script decides when the job is over
        assert running.process.poll() is None
    else:
        assert running.process.wait(PATIENCE_SECONDS) == 0
    assert running.end() == 0


def test_ranks_are_ended_before_the_time_limit(start: Callable[..., Running]) -> None:
    """The script then requeues the job while it still runs."""
    end = str(int(time.time()) + 8)
    running = start(replace(SAVES, lead=7), SLURM_JOB_END_TIME=end)
    running.state.write_text('{"state": "RUNNING", "reason": ""}')
    rank = running.start_rank(OUTLIVES)
    assert rank.wait(PATIENCE_SECONDS) == -signal.SIGKILL
    assert time.time() < int(end)
    assert running.told() == ["time_limit"]
    assert running.end() == 0


def test_a_program_without_the_channel_gets_its_signal_once(start: Callable[..., Running]) -> None:
    """Its first process that handles it: a shell around it does not, and survives."""
    running = start(replace(SAVES, signal="USR1"))
    program = f"import subprocess; subprocess.run([sys.executable, '-c', {PREAMBLE + HANDLES!r}])"
    rank = running.start_rank(program.replace("{0}", "USR1") + "; print(2)")
    Attempt(running.attempt).request_stop("requested", by="a user", now=1.0)
    assert rank.communicate(timeout=PATIENCE_SECONDS) == ("1\n2\n", "")
    assert running.end() == 0


def test_the_stacks_of_a_hang_are_kept(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a rank that writes them; for another the reason is kept; then all are ended."""
    monkeypatch.setattr("hpml_orchestrator.node.stopping._HANG_SECONDS", 3.0)
    monkeypatch.setenv("HPML_LOCAL_STEPS", f"{tmp_path}/steps-0")
    node.claim("1")
    stuck = """
fd = os.memfd_create("stacks")
number = signal.SIGRTMAX - 3
faulthandler.register(number, file=fd, all_threads=True)
send("hello", "hello", stacks_fd=fd, stacks_signal=number)
send("event", "step", steps_total=1)
def stuck_in_a_collective():
    print("up", flush=True)
    while True:
        time.sleep(60)
stuck_in_a_collective()
"""
    ranks = []

    def during() -> None:
        for number, code in enumerate([stuck, OUTLIVES]):
            words = ("bind", str(node.attempt), "--", sys.executable, "-c", PREAMBLE + code)
            local = {"SLURM_PROCID": str(number), "SLURM_LOCALID": str(number)}
            ranks.append(node.start(*words, SLURM_STEP_NUM_TASKS="2", **local))
        assert [rank.wait(PATIENCE_SECONDS) for rank in ranks] == [-signal.SIGKILL] * 2

    asked = Job("r", resources=Resources(ranks_per_node=2), checkpoint=replace(SAVES, hang=1))
    assert run_here(AgentOptions(node.attempt, asked), during) == 0
    text = (node.attempt / "stacks" / "n1.txt").read_text("utf-8")
    assert "in stuck_in_a_collective" in text
    assert f"rank 1, process {ranks[1].pid}\nno stacks: " in text
    for rank in ranks:
        rank.communicate()


@pytest.mark.parametrize("trick", ["not its own signal", "no handler", "no file"])
def test_no_hello_can_have_a_process_killed(tmp_path: Path, trick: str) -> None:
    """Signals that it does not handle are not sent, whatever its hello contains."""
    hello: dict[str, Any] = {"stacks_fd": 1, "stacks_signal": int(signal.SIGRTMIN) + 3}
    if trick == "not its own signal":
        hello["stacks_signal"] = int(signal.SIGKILL)
    elif trick == "no file":
        hello["stacks_fd"] = 999
    with subprocess.Popen(["sleep", "600"]) as process:
        peers = Peers()
        peers.hear(process.pid, 0, b"")
        peers.hello(process.pid, hello)
        collect_stacks(
            [StartedRank(Seen(0, 0, process.pid))], peers.by_pid(), tmp_path / "stacks" / "n1.txt"
        )
        assert process.poll() is None
        process.kill()
    assert "no stacks" in (tmp_path / "stacks" / "n1.txt").read_text("utf-8")


def test_the_flight_recorder_is_triggered(tmp_path: Path) -> None:
    """A pipe that a rank reads is written to; a file, or a pipe without a reader, is not."""
    os.mkfifo(tmp_path / "r_0.pipe")
    os.mkfifo(tmp_path / "r_1.pipe")
    (tmp_path / "r_2.pipe").touch()
    reader = os.open(tmp_path / "r_0.pipe", os.O_RDONLY | os.O_NONBLOCK)
    environment = {**os.environ, "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": f"{tmp_path}/r_"}
    with subprocess.Popen(["sleep", "600"], env=environment) as process:
        for rank in range(3):
            collect_stacks([StartedRank(Seen(0, rank, process.pid))], {}, tmp_path / "n1.txt")
        process.kill()
    assert os.read(reader, 99) == b"1\n"
    os.close(reader)
    assert (tmp_path / "r_2.pipe").read_bytes() == b""


@pytest.mark.parametrize(
    ("hang", "gpu", "head"),
    [
        (None, "0000:01:00.0", {}),
        (0, "0000:01:00.0", {"sigterm": "ignore"}),
        (60, None, {"sigterm": "ignore"}),
        (60, "0000:01:00.0", {"sigterm": "ignore", "recorder": "{attempt}/stacks/nccl_rank_"}),
    ],
)
def test_ranks_are_told_what_the_job_needs(
    node: Node,
    monkeypatch: pytest.MonkeyPatch,
    hang: int | None,
    gpu: str | None,
    head: dict[str, str],
) -> None:
    """NCCL's flight recorder is for GPUs and a watch for hangs; its pipes do not stay."""
    node.claim("1")
    made = planning.unbound(
        planning.BindOptions(1), {}, node="n1", allowed=os.sched_getaffinity(0), why="a test"
    )
    rank = replace(made.plan.ranks[0], gpu=gpu)
    made = replace(made, plan=replace(made.plan, ranks=(rank,)))
    monkeypatch.setattr(planning, "plan_node", lambda *_, **__: made)
    pipe = node.attempt / "stacks" / "nccl_rank_0.pipe"

    def during() -> None:
        if "recorder" in head:
            words = ("bind", str(node.attempt), "--", "true")
            assert node.call(*words, SLURM_PROCID="0", SLURM_STEP_NUM_TASKS="1")[0] == 0
            assert pipe.is_fifo()

    checkpoint = Checkpoint() if hang is None else replace(SAVES, hang=hang)
    asked = Job("r", checkpoint=checkpoint)
    assert run_here(AgentOptions(node.attempt, asked), during) == 0
    text = (node.attempt / "plan" / "n1.txt").read_text("utf-8")
    told = {n: v for n, v in planfile.header(text).items() if n in ("sigterm", "recorder")}
    assert told == {n: v.format(attempt=node.attempt) for n, v in head.items()}
    assert not pipe.exists()
