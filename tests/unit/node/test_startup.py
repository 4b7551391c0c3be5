"""A job starts: one claims the run, all nodes get ready, the ranks get an address and a port."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hpml_orchestrator.errors import BindingError, HpmlError, StagingError
from hpml_orchestrator.node.startup import (
    EXIT_DUPLICATE,
    candidate_ports,
    ephemeral_range,
    rendezvous,
    wait_ready,
)
from hpml_orchestrator.records.files import write_json, write_text
from hpml_orchestrator.records.run import Attempt, Run
from hpml_orchestrator.testing.clock import FakeClock
from tests.patience import PATIENCE_SECONDS
from tests.unit.node.conftest import describe

if TYPE_CHECKING:
    from tests.unit.node.conftest import Node

END = {"exit_code": 0, "time": 1.0}


def test_the_first_job_gets_the_run(node: Node) -> None:
    """It prints the attempt's directory and writes down its id, its head node and its start."""
    allocated = {"SLURM_JOB_CPUS_PER_NODE": "72(x2),36", "SLURM_GPUS_ON_NODE": "4"}
    nodes = {"SLURM_NNODES": "3", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_JOB_PARTITION": "main"}
    status, out, err = node.claim("17", **nodes, **allocated)
    assert (status, out, err) == (0, f"{node.attempt}\n", "")
    assert (node.attempt / "started" / "job_id").read_text() == "17\n"
    head = json.loads((node.attempt / "head.json").read_text())
    assert head["node"] == head["names"][0] == "n1"
    assert not any(name.startswith("localhost") for name in head["names"])
    (attempt,) = node.store.run(node.run_directory.name).attempts()
    (event,) = attempt.events()
    assert (event.event, event.node) == ("started", "batch")
    expected = {"job_id": "17", "attempt": 0, "head": "n1", "nodes": "n[1-3]", "node_count": 3}
    expected |= {"cpus": 180, "gpus": 12, "partition": "main"}
    assert event.data == expected
    assert {path.name for path in node.attempt.iterdir()} >= {"nodes", "events", "binding"}


def test_another_job_of_the_same_run_is_a_duplicate(node: Node) -> None:
    """It exits 75, names the job that owns the run, and changes nothing."""
    node.claim("17")
    before = sorted(path.name for path in node.attempt.rglob("*"))
    for restart in ("0", "1"):
        status, out, err = node.claim("18", SLURM_RESTART_COUNT=restart)
        assert (status, out) == (EXIT_DUPLICATE, "") == (75, "")
        assert "this run belongs to job 17; job 18 is a duplicate" in err
    assert sorted(path.name for path in node.attempt.rglob("*")) == before


def test_a_requeued_job_gets_the_next_attempt(node: Node) -> None:
    """Attempts count on from the last one, whatever the restart count of the job is."""
    node.claim("17")
    assert (node.attempt / "stop").read_text() == ""
    status, out, _ = node.claim("17", SLURM_RESTART_COUNT="1")
    assert (status, out) == (0, f"{node.run_directory}/attempts/1\n")
    assert node.claim("17", SLURM_RESTART_COUNT="3")[1].endswith("/attempts/2\n")
    again = node.claim("17", SLURM_RESTART_COUNT="3")  # without a requeue: the same attempt
    assert again[1].endswith("/attempts/2\n")
    write_json(node.run_directory / "attempts/2/ended.json", {**END, "goes_on": True})
    assert node.claim("20")[1].endswith("/attempts/3\n")
    assert node.claim("20", SLURM_RESTART_COUNT="1")[1].endswith("/attempts/4\n")


@pytest.mark.parametrize(
    ("records", "right", "wrong"),
    [
        ({}, [], ["18"]),
        ({"ended.json": {**END, "goes_on": False}}, [], ["18"]),
        ({"ended.json": {**END, "goes_on": True}}, ["18"], ["19"]),
        ({"next.started": {"time": 1.0}}, ["18"], []),
        ({"next.json": {"how": "continuation", "job_id": "18", "time": 2.0}}, ["18"], ["17", "19"]),
        (
            {
                "ended.json": {**END, "goes_on": True},
                "next.json": {"how": "requeue", "job_id": "17", "time": 2.0},
            },
            ["17"],
            ["18", "19"],
        ),
    ],
)
def test_a_run_goes_on_in_one_job_only(
    node: Node, records: dict[str, dict[str, object]], right: list[str], wrong: list[str]
) -> None:
    """Another job may claim the next attempt if the run continues in it, by its records."""
    node.claim("17")
    for name, record in records.items():
        write_json(node.attempt / name, record)
    for job_id in (*wrong, *right, *wrong) if records.keys() & {"next.json"} else (*right, *wrong):
        status, out, err = node.claim(job_id, SLURM_RESTART_COUNT="1")
        expected = (0, f"{node.run_directory}/attempts/1\n") if job_id in right else (75, "")
        assert (status, out) == expected, (job_id, err)
    assert len(node.store.run(node.run_directory.name).attempts()) == 1 + len(right)


def test_the_same_job_started_again_forgets_its_markers(node: Node) -> None:
    """Without a requeue it is the same attempt: who was ready then need not be ready now."""
    node.claim("17")
    write_json(node.attempt / "nodes" / "n1.ready.json", {"node": "n1"})
    for name in ("plan/n1.txt", "binding/n1.jsonl", "binding/n1.proof.json"):
        write_text(node.attempt / name, "{}")
    write_text(node.attempt / "over", "")
    write_json(node.attempt / "ended.json", {"exit_code": 1})
    status, out, _ = node.claim("17")
    assert (status, out) == (0, f"{node.attempt}\n")
    for name in ("nodes", "plan", "binding"):
        assert list((node.attempt / name).iterdir()) == []
    assert not (node.attempt / "over").exists()
    assert not (node.attempt / "ended.json").exists()


def test_of_two_jobs_at_once_one_wins(node: Node) -> None:
    """However close their starts: one claims the run, the other names its owner."""
    for number in range(4):
        for path in (node.run_directory / "attempts").glob("*"):
            path.rename(node.store.root / f"old-{number}")
        words = ("claim", str(node.submission.directory))
        racers = {job_id: node.start(*words, job_id=job_id) for job_id in ("21", "22")}
        told = {
            job_id: racer.communicate(timeout=PATIENCE_SECONDS) for job_id, racer in racers.items()
        }
        statuses = {job_id: racer.returncode for job_id, racer in racers.items()}
        assert sorted(statuses.values()) == [0, EXIT_DUPLICATE]
        winner = next(job_id for job_id, status in statuses.items() if status == 0)
        loser = "22" if winner == "21" else "21"
        assert f"belongs to job {winner}" in told[loser][1]
        assert (node.attempt / "started" / "job_id").read_text() == f"{winner}\n"


@pytest.mark.parametrize("restart", ["0", "1"])
def test_a_claim_that_is_being_written_is_waited_for(node: Node, restart: str) -> None:
    """Between the winner's mkdir and its id another job waits, and does not take the run."""
    (node.attempt / "started").mkdir(parents=True)
    words = ("claim", str(node.submission.directory))
    late = node.start(*words, job_id="22", SLURM_RESTART_COUNT=restart)
    timer = threading.Timer(0.7, write_text, (node.attempt / "started" / "job_id", "21\n"))
    timer.start()
    _, err = late.communicate(timeout=PATIENCE_SECONDS)
    timer.join()
    assert late.returncode == EXIT_DUPLICATE
    assert "belongs to job 21" in err  # which it can only know from what came later


def test_an_array_task_claims_its_own_run(node: Node) -> None:
    """The table gives the run of each index; an index that it lacks is an error.

    Its output is in the submission and, from its first start on, also in its directory.
    """
    sid = "many-20240101-000000-abcdef"
    many = node.store.prepare(sid, script="", shared={}, submit={}, runs={0: {}, 7: {}})
    describe(many.directory)
    words = ("claim", str(many.directory))
    run = Run(node.store.runs_dir / f"{sid}.7")
    output = many.directory / "output" / "7.log"
    assert run.output == output
    output.write_text("hi\n")
    for restart in ("0", "1"):
        task = {"SLURM_ARRAY_TASK_ID": "7", "SLURM_RESTART_COUNT": restart}
        out = node.call(*words, job_id="9", **task)[1]
        assert out == f"{run.directory}/attempts/{restart}\n"
        assert run.output == run.directory / "output.log"
        assert run.output.read_text() == "hi\n"
    status, _, err = node.call(*words, job_id="9", SLURM_ARRAY_TASK_ID="3")
    assert (status, "has no run of index 3" in err) == (3, True)


def test_by_hand_there_is_no_table(node: Node, tmp_path: Path) -> None:
    """A script given to sbatch by hand keeps its records below its own directory, by job."""
    describe(tmp_path)
    task = {"SLURM_ARRAY_TASK_ID": "7", "SLURM_ARRAY_JOB_ID": "8"}
    for job_id, more, run in (("5", {}, "5"), ("6", {}, "6"), ("9", task, "8_7")):
        out = node.call("claim", str(tmp_path), job_id=job_id, **more)[1]
        assert out == f"{tmp_path}/runs/{run}/attempts/0\n"
    attempt = Attempt(tmp_path / "runs/8_7/attempts/0")
    assert (attempt.job_id, attempt.submitted_id) == ("9", "8")


@pytest.fixture
def attempt(tmp_path: Path) -> Path:
    """An attempt without markers."""
    (tmp_path / "nodes").mkdir()
    return tmp_path


def mark(attempt: Path, node: str, kind: str, **data: object) -> None:
    write_json(attempt / "nodes" / f"{node}.{kind}.json", {"node": node, **data})


def wait(attempt: Path, nodes: int, pid: int, clock: FakeClock | None = None) -> int:
    clock = clock or FakeClock()
    return wait_ready(str(attempt), str(nodes), str(pid), sleep=clock.sleep, clock=clock.monotonic)


def test_all_nodes_are_ready(attempt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It ends at once and sums up what was staged."""
    mark(attempt, "n1", "ready", bytes=10, files=2, seconds=0.5)
    mark(attempt, "n2", "ready", bytes=20, files=3, seconds=1.25)
    assert wait(attempt, 2, os.getpid()) == 0
    err = capsys.readouterr().err
    assert err == "hpml: 2 nodes ready, staged 5 files, 30 bytes, slowest 1.25 s\n"
    mark(attempt, "n3", "ready")
    assert wait(attempt, 1, os.getpid()) == 0


def test_the_script_learns_where_the_data_are(
    attempt: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the nodes have them; a node that has them elsewhere is named for hpml-bind."""
    both = [{"name": "a", "path": "/x/it's"}, {"name": "b", "path": "/x/b"}]
    for node in ("n1", "n2"):
        mark(attempt, node, "ready", stages=both)
    assert wait(attempt, 2, os.getpid()) == 0
    same = "export HPML_STAGE_A='/x/it'\"'\"'s'\nexport HPML_STAGE_B=/x/b\n"
    assert capsys.readouterr().out == same
    mark(attempt, "n2", "ready", stages=[both[0], {"name": "b", "path": "/x/b@1"}])
    assert wait(attempt, 2, os.getpid()) == 0
    other = 'export HPML_STAGE_ELSEWHERE=\'{"n2": {"/x/b": "/x/b@1"}}\'\n'
    assert capsys.readouterr().out == same + other


def test_it_waits_ever_more_rarely_and_says_so(
    attempt: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Half of the nodes are ready: it checks at least every second, and reports every 30 s."""
    clock = FakeClock()
    mark(attempt, "n1", "ready")
    naps = 0

    def sleep(seconds: float) -> None:
        nonlocal naps
        naps += 1
        clock.sleep(seconds)
        if clock.now > 1_800_000_061:
            mark(attempt, "n2", "ready")

    pid = str(os.getpid())
    assert wait_ready(str(attempt), "2", pid, sleep=sleep, clock=clock.monotonic) == 0
    assert 60 < naps < 80
    assert max(clock.sleeps) == 1.0
    assert capsys.readouterr().err.count("hpml: 1 of 2 nodes are ready\n") == 2


def test_a_node_that_failed_ends_the_waiting(attempt: Path) -> None:
    """The message names every failed node with its reason, and carries the first hint."""
    mark(attempt, "n1", "ready")
    mark(attempt, "n2", "failed", message="no space", hint="")
    mark(attempt, "n3", "failed", message="no source", hint="look there")
    with pytest.raises(StagingError, match="^n2: no space; n3: no source$") as caught:
        wait(attempt, 4, os.getpid())
    assert caught.value.hint == "look there"


def test_agents_that_die_end_the_waiting(attempt: Path) -> None:
    """When their step is gone and a node is still missing, it will never come."""
    agent = subprocess.Popen(["sleep", "0.2"])
    mark(attempt, "n1", "ready")
    with pytest.raises(HpmlError, match=r"ended before all nodes were ready \(1 of 2 are\)"):
        wait_ready(str(attempt), "2", str(agent.pid))
    # nobody has waited for the agent yet: a zombie counts as gone
    assert Path(f"/proc/{agent.pid}/stat").read_text().split()[2] == "Z"
    assert agent.wait() == 0


def test_a_node_that_cannot_place_its_ranks(attempt: Path) -> None:
    """The exit status shows the kind of failure; staging's counts if there are both kinds."""
    mark(attempt, "n1", "failed", message="no CPUs found", hint="is /sys there?", exit_code=79)
    with pytest.raises(BindingError, match="n1: no CPUs found") as caught:
        wait(attempt, 2, os.getpid())
    assert (caught.value.exit_code, caught.value.hint) == (79, "is /sys there?")
    mark(attempt, "n2", "failed", message="disk full", exit_code=8)
    with pytest.raises(StagingError, match="n1: no CPUs found; n2: disk full"):
        wait(attempt, 2, os.getpid())


USUAL = (32_768, 60_999)


@pytest.fixture
def _job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be a job of one node."""
    for name in ("SLURM_ARRAY_TASK_ID", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("SLURM_NNODES", "1")


@contextmanager
def taken(port: int, family: socket.AddressFamily, address: str) -> Iterator[None]:
    """Hold a port with a real listening socket."""
    with closing(socket.socket(family, socket.SOCK_STREAM)) as holder:
        if family == socket.AF_INET6:
            holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        holder.bind((address, port))
        holder.listen()
        yield


def test_candidates_lie_outside_the_ephemeral_range() -> None:
    """Every port of 10000 to 31999 comes up once; those that the kernel may give away come last."""
    ports = list(candidate_ports("17::", USUAL))
    assert sorted(ports) == list(range(10_000, 32_000))
    ports = list(candidate_ports("17::", (15_000, 61_000)))
    assert len(set(ports)) == 22_000
    assert max(ports[:5000]) < 15_000
    assert min(ports[5000:]) >= 15_000


@pytest.mark.parametrize(
    ("family", "address"),
    [
        (socket.AF_INET, "127.0.0.1"),
        (socket.AF_INET, "127.0.17.2"),  # as the nodes of a test cluster do
        (socket.AF_INET, "0.0.0.0"),  # noqa: S104
        (socket.AF_INET6, "::1"),
    ],
)
@pytest.mark.usefixtures("_job")
def test_a_taken_port_is_passed_over(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    family: socket.AddressFamily,
    address: str,
) -> None:
    """Whoever listens on the first choice, on whatever address, the next free one is taken."""
    rendezvous(str(tmp_path))
    first = int(capsys.readouterr().out.split()[1])
    try:
        with taken(first, family, address):
            rendezvous(str(tmp_path))
    except OSError as error:
        pytest.skip(f"no such address here: {error}")
    second = int(capsys.readouterr().out.split()[1])
    candidates = list(candidate_ports(str(tmp_path), ephemeral_range()))
    assert candidates.index(second) > candidates.index(first)


def nodes(attempt: Path, resolves: dict[str, list[str]]) -> None:
    (attempt / "nodes").mkdir()
    write_json(attempt / "head.json", {"node": "n1", "names": ["n1", "n1.cluster"]})
    for name, known in resolves.items():
        record = {"node": name, "resolves": dict.fromkeys(known, "10.0.0.1")}
        write_json(attempt / "nodes" / f"{name}.ready.json", record)


@pytest.mark.usefixtures("_job")
def test_nodes_meet_at_a_name_that_all_of_them_know(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm's name of the head node where all resolve it, else its full name; else an error."""
    monkeypatch.setenv("SLURM_NNODES", "2")
    nodes(tmp_path, {"n1": ["n1", "n1.cluster"], "n2": ["n1.cluster"]})
    rendezvous(str(tmp_path))
    assert capsys.readouterr().out.startswith("n1.cluster ")
    record = {"node": "n3", "resolves": {"n1": "10.0.0.1"}}
    write_json(tmp_path / "nodes" / "n3.ready.json", record)
    message = "known to all nodes: n2 resolves n1.cluster; n3 resolves n1$"
    with pytest.raises(HpmlError, match=message):
        rendezvous(str(tmp_path))
