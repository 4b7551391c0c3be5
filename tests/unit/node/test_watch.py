"""Ranks are judged at their start and at two looks, and ended if strict: real processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hpml_orchestrator.node import watch
from hpml_orchestrator.node.planning import BindOptions, NodePlan, plan_node
from hpml_orchestrator.node.processes import ProcessTable, RankRecords, StartedRank
from hpml_orchestrator.node.watch import Watch
from hpml_orchestrator.placement.verify import NodeProof, proof_of_json
from hpml_orchestrator.records.process import read_stat
from hpml_orchestrator.topology.cpulist import format_list
from tests.patience import PATIENCE_SECONDS, eventually

Until = Callable[[Callable[[], object]], object]
CPUS = sorted(os.sched_getaffinity(0))
FIRST, SECOND = (str(one) for one in (CPUS * 2)[:2])
BOTH = format_list(CPUS)
needs_two = pytest.mark.skipif(len(CPUS) < 2, reason="needs two CPUs")
BUSY = "import time; began = time.time()\nwhile time.time() - began < 600: pass"
DEAF = "import signal, sys\nfor n in (15, 1, 2): signal.signal(n, signal.SIG_IGN)\n"
DEAF += "print('begun', flush=True); sys.stdin.read()"


def lives(pid: int) -> bool:
    stat = read_stat(pid)
    return stat is not None and not stat.ended


class Ranks:
    """Real processes, bound by taskset, with the records that hpml-bind would write."""

    def __init__(self, attempt: Path) -> None:
        self.attempt = attempt
        self.file = attempt / "binding" / "n1.jsonl"
        self.started: list[subprocess.Popen[str]] = []

    def start(
        self, rank: int, cpus: str, *command: str, ready: str = "", **env: str
    ) -> subprocess.Popen[str]:
        """Start a rank on CPUs (a cat that waits, or a command) and record it."""
        process = self.process(cpus, *command, ready=ready, **env)
        self.record(rank, process.pid, cpus=cpus, visible=env.get("CUDA_VISIBLE_DEVICES"))
        return process

    def process(
        self, cpus: str, *command: str, ready: str = "", **env: str
    ) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            ["taskset", "-c", cpus, *(command or ("cat",))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **env},
            start_new_session=True,
        )
        self.started.append(process)
        eventually(lambda: process.poll() is not None or self._began(process.pid))
        if ready:
            assert process.stdout is not None
            assert process.stdout.readline().strip() == ready
        return process

    @staticmethod
    def _began(pid: int) -> bool:
        program = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]
        return bool(program) and b"taskset" not in program  # empty in the midst of an exec

    def record(self, rank: int, pid: int, **fields: Any) -> None:
        """Append what hpml-bind records of a rank."""
        stat = read_stat(pid)
        cpus = fields.get("cpus", BOTH)
        line = {
            "rank": rank,
            "local_rank": rank,
            "pid": pid,
            "start_ticks": stat.start_ticks if stat else 1,
            "inherited": BOTH,
            "cpus": cpus,
            "child_cpus": cpus,
            "threads": 1,
            **fields,
        }
        with self.file.open("a") as stream:
            stream.write(json.dumps(line) + "\n")

    def end(self) -> None:
        for process in self.started:
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture
def attempt(tmp_path: Path) -> Path:
    """An attempt's directory as the claim makes it."""
    for name in ("nodes", "events", "binding", "plan"):
        (tmp_path / name).mkdir()
    return tmp_path


@pytest.fixture
def ranks(attempt: Path) -> Iterator[Ranks]:
    """Ranks of node n1, ended at the end."""
    ranks = Ranks(attempt)
    yield ranks
    ranks.end()


class Watching:
    """A watch of this machine whose clock the test turns."""

    def __init__(self, attempt: Path, ranks: int, verify: str = "warn", **env: str) -> None:
        self.node_plan: NodePlan = plan_node(
            BindOptions(ranks, verify=verify), env, node="n1", allowed=frozenset(CPUS)
        )
        self.said = ""
        self.now = 1000.0
        self.watch = Watch(attempt, self.node_plan, self.write)
        self._records = RankRecords(attempt / "binding" / "n1.jsonl")
        self._started: list[StartedRank] = []
        self.file = attempt / "binding" / "n1.proof.json"

    def write(self, text: str) -> None:
        self.said += text

    def turn(self, seconds: float) -> None:
        """Let time pass, in which the watch does what is due."""
        until = self.now + seconds
        while True:
            self.now += min(self.watch.act(self.now, self.started()), until - self.now)
            if self.now >= until:
                self.watch.act(self.now, self.started())
                return

    def started(self) -> list[StartedRank]:
        """What the ranks have recorded so far."""
        self._started += self._records.new()
        return self._started

    def proof(self) -> NodeProof:
        return proof_of_json(json.loads(self.file.read_text()))


@needs_two
def test_ranks_where_they_should_be(attempt: Path, ranks: Ranks) -> None:
    """No message; a proof from the records at once, and of live processes 10 s later."""
    watching = Watching(attempt, 2)
    watching.turn(5)
    assert (watching.watch.binding, watching.file.exists()) == (None, False)
    ranks.start(0, FIRST)
    watching.turn(2)
    ranks.start(1, SECOND)
    watching.turn(2)
    proof = watching.proof()
    assert (proof.right, [one.live for one in proof.ranks]) == (True, [False, False])
    assert watching.watch.binding == (2, 0)
    watching.turn(10)
    proof = watching.proof()
    assert (proof.right, [one.live for one in proof.ranks]) == (True, [True, True])
    assert [one.cpus for one in proof.ranks] == [FIRST, SECOND]
    watching.turn(3600)
    assert watching.proof().looks == 2
    assert watching.said == ""


@needs_two
@pytest.mark.parametrize(
    ("at", "found"),
    [
        pytest.param(5, 10, id="while it starts"),
        pytest.param(30, 60, id="by a library that it loads later"),
        pytest.param(65, None, id="after the second look"),
    ],
)
def test_a_rank_that_is_bound_again(
    attempt: Path, ranks: Ranks, at: float, found: float | None
) -> None:
    """The next look reports it, once; after the second look nobody notices it."""
    watching = Watching(attempt, 1)
    process = ranks.start(0, BOTH)
    watching.turn(at)
    os.sched_setaffinity(process.pid, {CPUS[0]})
    if found is None:
        watching.turn(3600)
        watching.watch.close(watching.started())
        assert (watching.said, watching.proof().right) == ("", True)
        return
    watching.turn(found - at - 1)
    assert (watching.said, watching.watch.binding) == ("", (1, 0))
    watching.turn(2)
    lines = watching.said.splitlines()
    assert lines[0].startswith("hpml: n1: 1 rank bound (gpu-local), 1 core and 1 thread each, 1 w")
    assert lines[1].split() == ["hpml:", "RANK", "NODE", "GPU", "CPUS", "NUMA", "WRONG"]
    assert lines[2].endswith(f"runs on CPUs {FIRST} alone, not on its own {BOTH}")
    assert watching.watch.binding == (0, 1)
    watching.turn(200)
    watching.watch.close(watching.started())
    assert watching.said.splitlines() == lines
    assert len(lines) == 3
    assert lives(process.pid), "warn only reports"
    assert watching.proof().ranks[0].cpus == FIRST


def test_a_pid_that_another_process_has_now(attempt: Path, ranks: Ranks) -> None:
    """The record is of a process that started earlier: that is not the rank, and gets no signal."""
    watching = Watching(attempt, 1, "strict")
    stranger = ranks.process(FIRST)
    ranks.record(0, stranger.pid, start_ticks=2, inherited="7")
    watching.turn(60)
    assert watching.proof().ranks[0].live is False
    assert "its ranks are ended" in watching.said
    assert lives(stranger.pid)


@needs_two
def test_a_fault_that_is_gone_before_a_look(attempt: Path, ranks: Ranks) -> None:
    """Programs bind themselves while they start: nothing is reported."""
    watching = Watching(attempt, 1, "strict")
    process = ranks.process(FIRST)
    ranks.record(0, process.pid)
    watching.turn(9)
    os.sched_setaffinity(process.pid, CPUS)
    watching.turn(100)
    assert (watching.said, watching.proof().right) == ("", True)
    assert lives(process.pid)


@needs_two
def test_a_rank_that_ends_before_the_second_look(attempt: Path, ranks: Ranks) -> None:
    """What the first look saw of it stays in the proof."""
    watching = Watching(attempt, 1, "strict")
    process = ranks.start(0, BOTH)
    watching.turn(12)
    os.sched_setaffinity(process.pid, {CPUS[0]})
    process.communicate()
    watching.turn(100)
    watching.watch.close(watching.started())
    assert (watching.said, watching.proof().right) == ("", True)
    assert watching.proof().ranks[0].live


@needs_two
def test_a_rank_that_starts_again_is_looked_at_again(attempt: Path, ranks: Ranks) -> None:
    """The two looks count from the last start."""
    watching = Watching(attempt, 1)
    ranks.start(0, BOTH)
    watching.turn(100)
    process = ranks.process(FIRST)
    ranks.record(0, process.pid)
    watching.turn(9)
    assert watching.said == ""
    watching.turn(5)
    assert "1 wrong" in watching.said


@needs_two
def test_strict_ends_the_ranks_with_all_they_started(attempt: Path, ranks: Ranks) -> None:
    """SIGTERM to the whole family; after ten seconds SIGKILL to those that ignore it."""
    watching = Watching(attempt, 2, "strict")
    command = f'"$0" -c "$1" & echo $!; taskset -pc {FIRST} $! >/dev/null; wait'
    shell = ranks.start(0, FIRST, "bash", "-c", command, sys.executable, BUSY)
    assert shell.stdout is not None
    child = int(shell.stdout.readline())
    deaf = ranks.start(1, FIRST, sys.executable, "-c", DEAF, ready="begun")
    watching.turn(12)
    assert "n1: binding.verify is strict: its ranks are ended" in watching.said
    shell.wait(PATIENCE_SECONDS)
    gone(child)
    assert lives(deaf.pid)
    watching.turn(5)
    assert lives(deaf.pid)
    watching.turn(5)
    deaf.wait(PATIENCE_SECONDS)
    assert deaf.returncode == -signal.SIGKILL


def gone(pid: int) -> None:
    eventually(lambda: not lives(pid))


def test_the_end_takes_in_what_came_last(attempt: Path, ranks: Ranks) -> None:
    """A rank that recorded between two looks, and a line that was torn, which does not count."""
    watching = Watching(attempt, 2)
    watching.turn(1)
    ranks.record(0, 1, cpus="7", child_cpus="7")
    with ranks.file.open("a") as stream:
        stream.write('{"rank": 1, "local_rank": 1')
    watching.watch.close(watching.started())
    proof = watching.proof()
    assert [one.rank for one in proof.ranks] == [0]
    assert "runs on CPUs 7" in watching.said
    assert "1 of 2 ranks bound" in watching.said


def kernel_s_table(root: Path, pid: int, parent: int, ticks: int, *cpus: int) -> None:
    """A fake process in the kernel's words, with a thread on each CPU."""
    name = f"program{pid}"
    place = root / str(pid)
    place.mkdir(parents=True)
    zeros = "0 " * 9
    (place / "stat").write_text(f"{pid} ({name}) S {parent} {zeros}{ticks} 0 {'0 ' * 6}7 0\n")
    (place / "cmdline").write_text(name)
    for number, cpu in enumerate(cpus):
        (place / "task" / str(pid + number)).mkdir(parents=True)
        status = f"Name:\t{name}\nCpus_allowed_list:\t{cpu}\nMems_allowed:\t1\n"
        (place / "task" / str(pid + number) / "status").write_text(status)


@pytest.mark.parametrize(
    ("seconds", "of_helper", "main"),
    [
        pytest.param(0.5, 4, 2000, id="a shell that waits"),
        pytest.param(5, 8, 1000, id="a program at work"),
        pytest.param(5, 100, 2000, id="a launcher that began long ago"),
    ],
)
def test_a_helper_that_works_more_than_the_program(
    tmp_path: Path, seconds: float, of_helper: int, main: int
) -> None:
    """A parent that used much CPU time is not a wrapper, however busy its child is."""
    ticks = os.sysconf("SC_CLK_TCK")
    kernel_s_table(tmp_path, 1000, 1, int(seconds * ticks), 0)
    kernel_s_table(tmp_path, 2000, 1000, of_helper * ticks, 0)
    table = ProcessTable(str(tmp_path))
    assert table.main_of(table.family(1000)).pid == main


LISTENING = "import socket, sys\ns = socket.create_server(('127.0.0.1', 0))\n"
CONNECTED = """\
import os, socket, sys
s = socket.socket()
s.bind(("127.0.0.1", 0))
t = socket.socket()
t.connect(("127.0.0.1", int(os.environ["MASTER_PORT"])))
"""
BEGUN = "print('begun', flush=True); sys.stdin.read()"


@pytest.mark.parametrize(
    ("program", "env", "seconds", "said"),
    [
        pytest.param("import sys\n", {}, 85, True, id="alone"),
        pytest.param("import sys\n", {}, 60, False, id="not watched for long"),
        pytest.param("import sys\n", {"PMIX_RANK": "1"}, 75, False, id="ranks of MPI"),
        pytest.param(LISTENING, {}, 85, False, id="with a port of Gloo or NCCL"),
        pytest.param(CONNECTED, {}, 85, False, id="with torchrun's store"),
    ],
)
def test_ranks_that_never_met(
    attempt: Path,
    ranks: Ranks,
    program: str,
    env: dict[str, str],
    seconds: int,
    said: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Reported once, at the end, if no process of any rank had a port in a minute of looks."""
    monkeypatch.setattr(watch, "CPU_SECONDS", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as store:
        env["MASTER_PORT"] = str(store.getsockname()[1])
        watching = Watching(attempt, 2)
        for rank, code in enumerate(("import sys\n", program)):
            command = (sys.executable, "-S", "-c", f"{code}{BEGUN}")
            ranks.start(rank, BOTH, *command, ready="begun", **env)
        watching.turn(seconds)
        assert watch.ALONE not in watching.said
        watching.watch.close(watching.started())
    assert watching.said.count(watch.ALONE) == said
    assert (watch.ALONE in watching.proof().warnings) == said
