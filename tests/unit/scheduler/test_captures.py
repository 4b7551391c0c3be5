"""Captures of four real versions are read right, and every form of one job gives one record.

The expectations were written by hand from the files; ORIGIN.md says where those come from.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hpml_orchestrator.cluster.model import Gres, Limits, Node, Partition
from hpml_orchestrator.scheduler.model import JobState, JobStatus
from hpml_orchestrator.scheduler.slurm_columns import parse_accounted, parse_queued
from hpml_orchestrator.scheduler.slurm_detail import (
    GresAllocation,
    NodeAllocation,
    parse_detailed,
)
from hpml_orchestrator.scheduler.slurm_json_cluster import (
    parse_nodes_json,
    parse_partitions_json,
    parse_sinfo_json,
)
from hpml_orchestrator.scheduler.slurm_json_jobs import parse_sacct_json, parse_squeue_json
from hpml_orchestrator.scheduler.slurm_metrics import diagnostics_of, parse_metrics
from hpml_orchestrator.scheduler.slurm_pyslurm import (
    accounted_row_from,
    job_row_from,
    node_from,
    partition_from,
)
from hpml_orchestrator.scheduler.slurm_records import limits_from
from hpml_orchestrator.scheduler.slurm_records import node_from as node_from_text
from hpml_orchestrator.scheduler.slurm_scontrol import parse_config, parse_records
from hpml_orchestrator.scheduler.slurm_sdiag import (
    Calls,
    Diagnostics,
    parse_sdiag,
    parse_sdiag_json,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

DATA = Path(__file__).parent / "data"
VERSIONS = ("22.05.8", "24.11.5", "25.11.7", "26.05.5")
SACCT_COLUMNS = "JobID JobName State ExitCode Elapsed Start End AllocTRES NodeList Comment".split()
SQUEUE_COLUMNS = (
    "JobID Name State Reason Partition UserName NumNodes Tres-Per-Node SubmitTime StartTime Comment"
).split()
R, P, C, F = JobState.RUNNING, JobState.PENDING, JobState.COMPLETED, JobState.FAILED
A100 = (Gres("gpu", "a100", 4),)


def capture(version: str, name: str) -> str:
    return (DATA / version / name).read_text()


@pytest.fixture(autouse=True)
def _in_utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The captures were taken there; times without a zone are local times."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()


def summary(status: JobStatus) -> tuple[str, JobState, int | None, str]:
    return status.job_id, status.state, status.exit_code, status.nodes


@pytest.mark.parametrize(
    ("version", "jobs"),
    [
        (
            "22.05.8",
            [
                ("1", C, 0, "node1"),
                ("2", R, None, "node[1-2]"),
                ("3_0", F, 3, "node1"),
                ("3_1", F, 3, "node1"),
                ("3_2", F, 3, "node1"),
                ("3_3", F, 3, "node1"),
                ("7", P, None, ""),
                ("8", P, None, ""),
            ],
        ),
        ("24.11.5", [("3", R, None, "node[1-2]"), ("5", P, None, "")]),
        (
            "25.11.7",
            [
                ("2", R, None, "node1"),
                ("3_0", R, None, "node1"),
                ("4", P, None, ""),
                ("8", P, None, ""),
                ("3_1", R, None, "node1"),
                ("3_[2-3%2]", P, None, ""),
            ],
        ),
        ("26.05.5", [("4", R, None, "node[1-2]"), ("6", P, None, "")]),
    ],
)
def test_squeue_json(version: str, jobs: list[tuple[str, JobState, int | None, str]]) -> None:
    """Ids, states, exit codes and nodes in all three dialects."""
    rows = parse_squeue_json(capture(version, "squeue.json"))
    assert [summary(row.status) for row in rows] == jobs
    assert all(row.status.restarts == 0 for row in rows)


def test_one_job_of_squeue_json_in_full() -> None:
    """Times, name, directory and reason."""
    row = parse_squeue_json(capture("22.05.8", "squeue.json"))[2]
    assert (row.raw_id, row.shown_id) == ("4", "3_0")
    assert row.status == JobStatus(
        "3_0",
        F,
        raw_state="FAILED",
        reason="NonZeroExitCode",
        exit_code=3,
        nodes="node1",
        submitted=1795210739.0,
        started=1795210740.0,
        ended=1795210740.0,
        name="wrap",
        directory="/tmp/slurmbox",
    )
    big = parse_squeue_json(capture("25.11.7", "squeue.json"))[2].status
    assert (big.name, big.reason) == ("big", "BeginTime")
    assert big.started is None  # a prediction: it waits until 1795214886


@pytest.mark.parametrize(
    ("version", "jobs"),
    [
        (
            "22.05.8",  # its JSON says 0 of jobs that failed with 3: not known
            [
                ("1", C, 0, "node1"),
                ("2", C, 0, "node[1-2]"),
                ("3_3", F, None, "node1"),
                ("3_0", F, None, "node1"),
                ("3_1", F, None, "node1"),
                ("3_2", F, None, "node1"),
                ("7", C, 0, "node[1-4]"),
                ("8", C, 0, "node1"),
            ],
        ),
        (
            "24.11.5",
            [
                ("1", C, 0, "node1"),
                ("2", C, 0, "node[1-2]"),
                ("3", C, 0, "node[1-2]"),
                ("5", C, 0, "node[1-4]"),
                ("6", C, 0, "node1"),
                ("4_0", F, 3, "node1"),
                ("4_1", F, 3, "node1"),
                ("4_2", F, 3, "node1"),
                ("4_3", F, 3, "node1"),
            ],
        ),
        (
            "25.11.7",
            [
                ("1", C, 0, "node1"),
                ("2", R, None, "node1"),
                ("5", C, 0, "node1"),
                ("6", F, 3, "node1"),
                ("7", JobState.CANCELLED, 0, "node1"),
                ("3_0", R, None, "node1"),
                ("3_1", R, None, "node1"),
            ],
        ),
        (
            "26.05.5",
            [
                ("1", C, 0, "node1"),
                ("2", C, 0, "node[1-2]"),
                ("3", C, 0, "node[1-2]"),
                ("4", C, 0, "node[1-2]"),
                ("6", C, 0, "node[1-4]"),
                ("7", C, 0, "node1"),
                ("5_0", F, 3, "node1"),
                ("5_1", F, 3, "node1"),
                ("5_2", F, 3, "node1"),
                ("5_3", F, 3, "node1"),
            ],
        ),
    ],
)
def test_sacct_json(version: str, jobs: list[tuple[str, JobState, int | None, str]]) -> None:
    """Ids, states, exit codes and nodes in all three dialects."""
    found = parse_sacct_json(capture(version, "sacct.json"))
    assert [summary(job.status) for job in found] == jobs
    assert all(job.status.restarts == 0 for job in found)
    assert {(job.user, job.account, job.qos, job.cluster) for job in found} == {
        ("root", "root", "normal", "box")
    }


@pytest.mark.parametrize(
    ("version", "job_id", "tasks", "rss", "average", "node", "cpu", "elapsed"),
    [
        ("22.05.8", "2", 4, 1_720_320, 1_676_288, "node1", 0.006082, 8),
        ("24.11.5", "2", 8, 1_953_792, 1_865_728, "node1", 0.029317, 6),
        ("26.05.5", "2", 8, 2_043_904, 1_956_352, "node2", 0.027941, 6),
    ],
)
def test_steps_of_sacct_json(
    version: str,
    job_id: str,
    tasks: int,
    rss: int,
    average: int,
    node: str,
    cpu: float,
    elapsed: int,
) -> None:
    """Of the step that srun started: tasks, memory in bytes, CPU time, wall-clock time."""
    jobs = {job.job_id: job for job in parse_sacct_json(capture(version, "sacct.json"))}
    job = jobs[job_id]
    assert [step.step_id for step in job.steps] == ["batch", "0"]
    step = job.step("0")
    assert step is not None
    assert (step.state, step.exit_code, step.nodes) == (C, 0, "node[1-2]")
    assert (step.tasks, step.max_rss_bytes, step.average_rss_bytes) == (tasks, rss, average)
    assert step.max_rss_node == node
    assert step.cpu_seconds == pytest.approx(cpu)
    assert step.elapsed_seconds == elapsed
    assert step.usage_max["mem"] == rss
    assert "cpu" not in step.usage_total
    assert step.allocated_tres["gres/gpu:a100"] == job.allocated_tres["gres/gpu:a100"]
    assert job.cpu_seconds is not None
    assert job.cpu_seconds > cpu  # the batch step's too, although 22.05 says 0 of the job
    assert job.time_limit_seconds == 31_536_000


def test_a_short_or_running_step_has_no_memory() -> None:
    """Nobody measured: that is not 0 bytes."""
    jobs = {job.job_id: job for job in parse_sacct_json(capture("25.11.7", "sacct.json"))}
    short, running, cancelled = jobs["5"].steps[0], jobs["2"].steps[0], jobs["7"].steps[0]
    assert (short.step_id, short.max_rss_bytes, short.elapsed_seconds) == ("batch", None, 2)
    assert (running.state, running.exit_code, running.ended) == (R, None, None)
    assert (cancelled.state, cancelled.exit_code, cancelled.signal) == (
        *(JobState.CANCELLED, 0, 15),
    )
    assert jobs["2"].allocated_tres == {
        "cpu": 4,
        "mem": 4000,
        "node": 1,
        "billing": 4,
        "gres/gpu": 2,
        "gres/gpu:a100": 2,
    }
    assert jobs["2"].requested_tres["gres/gpu"] == 2
    assert jobs["2"].time_limit_seconds is None
    assert (jobs["3_1"].array_job_id, jobs["3_1"].array_task) == ("3", 1)


def test_text_and_json_of_sacct_agree() -> None:
    """25.11.7 printed both at the same moment; text has fewer columns."""
    from_json = {job.job_id: job for job in parse_sacct_json(capture("25.11.7", "sacct.json"))}
    from_text = parse_accounted(capture("25.11.7", "sacct.txt"), SACCT_COLUMNS)
    assert [job.job_id for job in from_text] == ["1", "2", "5", "6", "7", "3_0", "3_1"]
    for job in from_text:
        other = from_json[job.job_id]
        assert job.allocated_tres == other.allocated_tres
        assert job.elapsed_seconds == other.elapsed_seconds
        assert job.status == replace(
            other.status,
            submitted=None,
            directory="",
            reason="",
            raw_state=job.status.raw_state,  # text also says by whom: "CANCELLED by 0"
        )


def test_text_and_json_of_squeue_agree() -> None:
    """As above."""
    from_json = {row.shown_id: row for row in parse_squeue_json(capture("25.11.7", "squeue.json"))}
    from_text = parse_queued(capture("25.11.7", "squeue.txt"), SQUEUE_COLUMNS)
    assert [row.shown_id for row in from_text] == ["4", "3_[2-3%2]", "8", "2", "3_0", "3_1"]
    for row in from_text:
        assert row.status == replace(from_json[row.shown_id].status, nodes="", directory="")


def big_node(name: str, state: str) -> Node:
    return Node(
        name,
        states=frozenset({state}),
        partitions=("main", "low"),
        sockets=2,
        cores_per_socket=8,
        cpus=16,
        memory_mib=64_000,
        gres=A100,
        features=frozenset({"numa", "gpu"}),
    )


def four_nodes() -> list[Node]:
    states = {"node1": "MIXED", "node2": "MIXED", "node3": "IDLE", "node4": "IDLE"}
    return [big_node(name, state) for name, state in states.items()]


@pytest.mark.parametrize("version", ["24.11.5", "26.05.5"])
def test_nodes_json(version: str) -> None:
    """Four nodes of 16 CPUs and 4 GPUs, two of them in use."""
    assert list(parse_nodes_json(capture(version, "nodes.json"))) == four_nodes()


def test_nodes_of_the_small_cluster() -> None:
    """25.11.7 had two."""
    nodes = parse_nodes_json(capture("25.11.7", "nodes.json"))
    assert list(nodes) == [big_node("node1", "MIXED"), big_node("node2", "IDLE")]


def test_nodes_text() -> None:
    """The same from scontrol's text of 22.05."""
    records = parse_records(capture("22.05.8", "nodes.txt"))
    assert [node_from_text(record) for record in records] == four_nodes()
    assert records[0]["OS"] == "Linux 6.18.44-fc-v657 #1 SMP PREEMPT_DYNAMIC @0"


@pytest.mark.parametrize("version", VERSIONS)
def test_sinfo_json(version: str) -> None:
    """Nodes one by one (22.05) and in groups per partition (later) give the same nodes."""
    nodes, partitions = parse_sinfo_json(capture(version, "sinfo.json"))
    small = version == "25.11.7"
    wanted = [big_node("node1", "MIXED"), big_node("node2", "IDLE")] if small else four_nodes()
    assert sorted(nodes, key=lambda node: node.name) == wanted
    count = 2 if small else 4
    names = tuple(f"node{number}" for number in range(1, count + 1))
    assert list(partitions) == [
        # only 26.05 says in JSON which one is the default
        Partition("main", "UP", version == "26.05.5", names, count, 16 * count),
        Partition("low", "UP", nodes=names, total_nodes=count, total_cpus=16 * count),
    ]


def test_partitions_json() -> None:
    """Nothing is limited there."""
    names = ("node1", "node2")
    assert list(parse_partitions_json(capture("25.11.7", "partitions.json"))) == [
        Partition("main", nodes=names, total_nodes=2, total_cpus=32),
        Partition("low", nodes=names, total_nodes=2, total_cpus=32),
    ]


def test_config() -> None:
    """Of 25.11.7."""
    assert limits_from(parse_config(capture("25.11.7", "config.txt"))) == Limits(
        version=(25, 11, 7),
        cluster="box",
        accounting=True,
        default_memory_per_cpu_mib=1000,
        gres_names=("gpu",),
    )


IDX = (GresAllocation("gpu", "a100", 2, (0, 1)),)


@pytest.mark.parametrize(
    ("version", "jobs", "running", "allocations"),
    [
        (
            "22.05.8",
            ["1", "2", "3_0", "3_1", "3_2", "3_3", "7", "8"],
            "2",
            [NodeAllocation(node, (0, 1), 2000, IDX) for node in ("node1", "node2")],
        ),
        (
            "24.11.5",
            ["1", "2", "3", "4_0", "5", "6", "4_1", "4_2", "4_3"],
            "3",
            [NodeAllocation(node, (0, 1), 2000, IDX) for node in ("node1", "node2")],
        ),
        (
            "25.11.7",
            ["1", "2", "3_0", "4", "5", "6", "7", "8", "3_1", "3_[2-3%2]"],
            "2",
            [NodeAllocation("node1", (0, 1, 2, 3), 4000, IDX)],
        ),
        (
            "26.05.5",
            ["1", "2", "3", "4", "5_0", "6", "7", "5_1", "5_2", "5_3"],
            "4",
            [NodeAllocation(node, (0, 1), 2000, IDX) for node in ("node1", "node2")],
        ),
    ],
)
def test_details_of_jobs(
    version: str, jobs: list[str], running: str, allocations: list[NodeAllocation]
) -> None:
    """CPUs and GPUs of each node; those of jobs that have ended are told without indices."""
    found = {job.job_id: job for job in parse_detailed(capture(version, "show-job-d.txt"))}
    assert list(found) == jobs
    assert list(found[running].allocations) == allocations
    assert found["1"].status.state is C
    assert found["1"].time_limit_seconds == 60
    assert found["1"].allocations == (NodeAllocation("node1", (0,), 1000),)
    for job in found.values():
        assert (job.user, job.account, job.partition) == ("root", "root", "main")
        assert bool(job.allocations) is (job.status.state is not P)
        assert bool(job.allocated_tres) is (job.status.state is not P)
        if job.array_job_id and job.status.state is F:
            assert job.status.exit_code == 3


def test_one_detailed_job_in_full() -> None:
    """Texts of its user, and what it waits for."""
    jobs = {job.job_id: job for job in parse_detailed(capture("25.11.7", "show-job-d.txt"))}
    train, waiting, cancelled = jobs["2"], jobs["3_[2-3%2]"], jobs["7"]
    assert train.comment == "hpml:run-1"
    assert train.command == "/tmp/jobs/j.sh"
    assert train.submit_line == (
        "sbatch --parsable -J train-a -N1 -n2 -c2 --gpus-per-node=2 --comment=hpml:run-1 "
        "-o /dev/null j.sh 60"
    )
    assert (train.node_count, train.cpus, train.tasks, train.cpus_per_task) == (1, 4, 2, 2)
    assert train.time_limit_seconds is None
    assert train.requested_tres == {"cpu": 4, "mem": 4000, "node": 1, "billing": 4, "gres/gpu": 2}
    assert train.status == JobStatus(
        "2",
        R,
        raw_state="RUNNING",
        nodes="node1",
        submitted=1795211286.0,
        started=1795211286.0,
        name="train-a",
        directory="/tmp/jobs",
    )
    assert (waiting.array_job_id, waiting.array_tasks) == ("3", "2-3%2")
    assert waiting.status.reason == "JobArrayTaskLimit"
    assert (cancelled.status.exit_code, cancelled.status.signal) == (0, 15)
    assert jobs["8"].dependency == "afterok:7(failed)"
    older = {job.job_id: job for job in parse_detailed(capture("22.05.8", "show-job-d.txt"))}
    assert older["8"].dependency == "afterok:2(unfulfilled)"
    assert older["7"].requested_tres == {"cpu": 4, "mem": 4000, "node": 4, "billing": 4}
    assert older["7"].node_count == 4


def test_sdiag_text() -> None:
    """Of 22.05.8; RPC counts among them."""
    told = parse_sdiag(capture("22.05.8", "sdiag.txt"))
    assert replace(told, calls_by_type={}, calls_by_user={}) == Diagnostics(
        at=1795210742.0,
        since=1795210740.0,
        server_threads=3,
        agent_queue=0,
        dbd_agent_queue=0,
        jobs_submitted=8,
        jobs_started=6,
        jobs_completed=5,
        jobs_canceled=0,
        jobs_failed=0,
        jobs_pending=0,
        jobs_running=1,
        main_last_us=10,
        main_max_us=10,
        main_mean_us=10,
        main_cycles=1,
        main_queue=0,
        backfill_last_us=1752,
        backfill_max_us=1752,
        backfill_mean_us=1752,
        backfill_cycles=1,
        backfill_queue=2,
        backfill_at=1795210740.0,
        backfilled_jobs=5,
    )
    assert told.calls_by_type["REQUEST_NODE_INFO"] == Calls(3, 3039)
    assert told.calls_by_type["REQUEST_NODE_INFO"].average_microseconds == 1013
    assert len(told.calls_by_type) == 13
    assert dict(told.calls_by_user) == {"root": Calls(27, 17_886)}


@pytest.mark.parametrize(
    ("version", "submitted", "running", "main", "backfill", "at"),
    [
        ("24.11.5", 9, 0, (202, 202, 24, 53, 1), (988, 988, 843, 2, 4), 1795208776.0),
        ("25.11.7", 11, 6, (15, 1309, 35, 61, 0), (0, 0, 0, 0, 0), None),
        ("26.05.5", 8, 0, (114, 115, 22, 21, 1), (5063, 5063, 2808, 2, 4), 1795208787.0),
    ],
)
def test_sdiag_json(
    version: str,
    submitted: int,
    running: int,
    main: tuple[int, ...],
    backfill: tuple[int, ...],
    at: float | None,
) -> None:
    """Last, longest and mean cycle, cycles and queue of both schedulers."""
    told = parse_sdiag_json(capture(version, "sdiag.json"))
    assert (told.jobs_submitted, told.jobs_running) == (submitted, running)
    assert (
        told.main_last_us,
        told.main_max_us,
        told.main_mean_us,
        told.main_cycles,
        told.main_queue,
    ) == main
    assert (
        told.backfill_last_us,
        told.backfill_max_us,
        told.backfill_mean_us,
        told.backfill_cycles,
        told.backfill_queue,
    ) == backfill
    assert told.backfill_at == at
    assert told.calls_by_type["REQUEST_PARTITION_INFO"].count > 0
    assert set(told.calls_by_user) == {"root"}


def test_metrics_of_the_controller() -> None:
    """26.05.5 exports them by itself; its "bytes" are MiB."""
    metrics = parse_metrics(capture("26.05.5", "openmetrics.txt"))
    assert metrics.count("slurm_jobs_completed") == 3
    assert metrics.count("slurm_nodes_idle") == 4
    assert metrics.count("slurm_partition_gpus", partition="low") == 16
    assert metrics.by("slurm_node_gpus", "node") == dict.fromkeys(
        ("node1", "node2", "node3", "node4"), 4.0
    )
    assert metrics.value("slurm_node_memory_bytes", node="node1") == 64_000
    assert metrics.value("slurm_nothing") is None
    assert diagnostics_of(metrics) == Diagnostics(
        at=1795208776.0,
        since=1795208735.0,
        server_threads=0,
        agent_queue=0,
        dbd_agent_queue=0,
        jobs_submitted=1,
        jobs_started=1,
        jobs_completed=1,
        jobs_canceled=0,
        jobs_failed=0,
        jobs_pending=0,
        jobs_running=0,
        main_last_us=14,
        main_max_us=15,
        main_mean_us=12,
        main_cycles=15,
        main_queue=0,
        backfill_last_us=553,
        backfill_max_us=553,
        backfill_mean_us=553,
        backfill_cycles=1,
        backfill_queue=1,
        backfill_at=1795208738.0,
        backfilled_jobs=1,
    )


@pytest.fixture(scope="module")
def pyslurm() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capture("25.11.7", "pyslurm-25.11.2.json"))
    return found


def test_pyslurm_and_squeue_agree(pyslurm: dict[str, Any]) -> None:
    """The directory differs only because the captures' paths were normalised differently."""
    rows = {row.raw_id: row for row in map(job_row_from, pyslurm["jobs"].values())}
    assert sorted(rows, key=int) == [str(number) for number in range(1, 11)]
    for row in parse_squeue_json(capture("25.11.7", "squeue.json")):
        other = rows[row.raw_id]
        assert other.shown_id == row.shown_id
        assert replace(other.status, directory="") == replace(row.status, directory="")
    # of jobs that have ended, scontrol has both
    for job in parse_detailed(capture("25.11.7", "show-job-d.txt")):
        assert rows[job.raw_id].status == job.status
    assert rows["9"].shown_id == "3_0"  # pyslurm makes None of task 0


def test_pyslurm_and_sacct_agree(pyslurm: dict[str, Any]) -> None:
    """As above."""
    rows = {row.raw_id: row for row in map(accounted_row_from, pyslurm["db_jobs"].values())}
    jobs = parse_sacct_json(capture("25.11.7", "sacct.json"))
    assert len(rows) == len(jobs) == 7
    for job in jobs:
        assert replace(rows[job.raw_id].status, directory="") == replace(job.status, directory="")


def test_pyslurm_and_scontrol_agree_on_nodes_and_partitions(pyslurm: dict[str, Any]) -> None:
    """Only that JSON of 25.11 does not say which partition is the default one."""
    nodes = sorted(map(node_from, pyslurm["nodes"].values()), key=lambda node: node.name)
    assert nodes == list(parse_nodes_json(capture("25.11.7", "nodes.json")))
    partitions = {one.name: one for one in map(partition_from, pyslurm["partitions"].values())}
    assert {name: one.default for name, one in partitions.items()} == {"main": True, "low": False}
    for partition in parse_partitions_json(capture("25.11.7", "partitions.json")):
        assert replace(partitions[partition.name], default=False) == partition
