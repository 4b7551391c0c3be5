"""Odd forms of ids, states, times and numbers, and texts that are no answer at all."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpml_orchestrator.errors import HpmlError, InputError, SchedulerUnavailable
from hpml_orchestrator.scheduler.command import Completed
from hpml_orchestrator.scheduler.model import JobState
from hpml_orchestrator.scheduler.slurm_columns import parse_accounted, parse_queued
from hpml_orchestrator.scheduler.slurm_detail import GresAllocation, parse_detailed
from hpml_orchestrator.scheduler.slurm_json import exit_of, load, number, state_word
from hpml_orchestrator.scheduler.slurm_json_cluster import (
    parse_nodes_json,
    parse_partitions_json,
    parse_sinfo_json,
)
from hpml_orchestrator.scheduler.slurm_json_jobs import parse_sacct_json, parse_squeue_json
from hpml_orchestrator.scheduler.slurm_metrics import parse_metrics
from hpml_orchestrator.scheduler.slurm_parse import UNIT
from hpml_orchestrator.scheduler.slurm_pyslurm import (
    PyslurmReader,
    job_row_from,
    node_from,
    partition_from,
)
from hpml_orchestrator.scheduler.slurm_sacct import ACCOUNTED_COLUMNS, read_accounted
from hpml_orchestrator.scheduler.slurm_sdiag import parse_sdiag, parse_sdiag_json
from hpml_orchestrator.scheduler.slurm_version import slurm_version
from hpml_orchestrator.testing import FakeRunner

DATA = Path(__file__).parent / "data"
JSON_READERS = (
    parse_squeue_json,
    parse_sacct_json,
    parse_nodes_json,
    parse_partitions_json,
    parse_sinfo_json,
    parse_sdiag_json,
)


def job(**fields: Any) -> str:
    return json.dumps({"jobs": [{"job_id": 7, "nodes": "n1", "job_state": ["RUNNING"], **fields}]})


@pytest.mark.parametrize(
    ("states", "state"),
    [
        (["RUNNING", "COMPLETING"], JobState.COMPLETING),
        (["COMPLETED", "COMPLETING"], JobState.COMPLETING),
        (["PENDING", "REQUEUED"], JobState.REQUEUED),
        (["PENDING", "SPECIAL_EXIT"], JobState.REQUEUED),
        (["RUNNING", "UPDATE_DB"], JobState.RUNNING),
        (["FAILED", "LAUNCH_FAILED"], JobState.FAILED),
        (["RUNNING", "BRAND_NEW"], JobState.RUNNING),
        ("CANCELLED", JobState.CANCELLED),
        ([], JobState.UNKNOWN),
        (None, JobState.UNKNOWN),
    ],
)
def test_a_list_of_states(states: Any, state: JobState) -> None:
    """A flag says more than the base state, where it says anything of the job."""
    (row,) = parse_squeue_json(job(job_state=states))
    assert row.status.state is state


def test_ids_of_heterogeneous_jobs_and_arrays() -> None:
    """As squeue shows them."""
    is_set = {"set": True, "infinite": False}
    for fields, shown in (
        (
            {"het_job_id": {**is_set, "number": 28}, "het_job_offset": {**is_set, "number": 1}},
            "28+1",
        ),
        ({"het_job_id": 28, "het_job_offset": 0}, "28+0"),
        ({"het_job_id": 0, "het_job_offset": 0}, "7"),
        ({"array_job_id": 3, "array_task_id": 2, "array_task_string": ""}, "3_2"),
        ({"array_job_id": 3, "array_task_id": None, "array_task_string": "4-9%2"}, "3_[4-9%2]"),
    ):
        assert parse_squeue_json(job(**fields))[0].shown_id == shown


def test_exit_codes_of_all_dialects() -> None:
    """A wait status, 22.05's signal_id, and the later objects."""
    over = JobState.FAILED
    assert exit_of(768, over) == (3, 0)
    assert exit_of(9, over) == (0, 9)
    assert exit_of({"status": "SIGNALED", "return_code": 0, "signal": {"signal_id": 9}}, over) == (
        *(0, 9),
    )
    unset = {"set": False, "infinite": False, "number": 0}
    signal = {"id": {"set": True, "infinite": False, "number": 15}, "name": "TERM"}
    assert exit_of({"status": ["SIGNALED"], "return_code": unset, "signal": signal}, over) == (
        *(0, 15),
    )
    assert exit_of({"status": "SUCCESS", "return_code": 0}, over) is None
    assert exit_of({"status": "SUCCESS", "return_code": 0}, JobState.COMPLETED) == (0, 0)
    assert exit_of(None, over) is None


def test_numbers_that_are_none() -> None:
    """Slurm's own for "not set", and what is no number."""
    values: list[Any] = [4294967294, 2**64 - 1, -2, True, [], {}, "many", float("nan")]
    for value in values:
        assert number(value) is None
    assert number({"set": True, "infinite": True, "number": 3}) is None
    assert number(2.5) == 2.5
    assert state_word(["running"]) == "RUNNING"


def test_json_that_is_no_answer() -> None:
    """Slurm's own words where it has some."""
    with pytest.raises(SchedulerUnavailable, match="no JSON: slurm_load_jobs error") as caught:
        load("slurm_load_jobs error: Unable to contact", "jobs")
    assert caught.value.hint
    failed = json.dumps({"errors": [{"description": "Connection refused", "error": "x"}]})
    with pytest.raises(SchedulerUnavailable, match="no jobs: Connection refused"):
        parse_squeue_json(failed)
    with pytest.raises(SchedulerUnavailable, match="no JSON"):
        parse_sacct_json("[" * 100_000)


SACCT = [name.lower() for name in ACCOUNTED_COLUMNS]


def sacct_row(**values: str) -> str:
    return UNIT.join(values.get(name, "") for name in SACCT)


def test_steps_restarts_and_odd_names_in_text() -> None:
    """A newline and a separator in a name, two starts of one job, a step of a component."""
    rows = [
        sacct_row(
            jobid="3_1",
            jobidraw="9",
            state="REQUEUED",
            exitcode="0:0",
            start="1795211286",
            end="1795211290",
            nodelist="n1",
            elapsed="00:00:04",
            jobname="a\n7|b",
        ),
        sacct_row(jobid="3_1.batch", jobidraw="9.batch", state="CANCELLED", exitcode="0:15"),
        sacct_row(
            jobid="3_1",
            jobidraw="9",
            state="OUT_OF_MEMORY",
            exitcode="0:125",
            start="2026-11-20T21:48:06",
            end="Unknown",
            nodelist="n1",
            timelimitraw="UNLIMITED",
            totalcpu="1-02:03:04",
            reqtres="cpu=1,mem=62.50G",
        ),
        sacct_row(
            jobid="3_1.0",
            state="COMPLETED+",
            exitcode="0:0",
            maxrss="1680K",
            averss="0",
            totalcpu="00:00.012",
            ntasks="2",
            tresusageinmax="cpu=00:00:01,energy=0,fs/disk=27615,mem=11328K,pages=4",
        ),
        sacct_row(jobid="28+1", jobidraw="29", state="CANCELLED by 0", nodelist="None assigned"),
        sacct_row(jobid="28+1.extern", state="CANCELLED"),
        sacct_row(jobid="30.0", state="COMPLETED"),
    ]
    first, second, part = parse_accounted("\n".join(rows) + "\n", ACCOUNTED_COLUMNS, UNIT)
    assert first.status.name == "a\n7|b"
    assert (first.status.state, first.status.restarts, first.over) == (JobState.REQUEUED, 0, True)
    assert (first.status.started, first.status.ended) == (1795211286.0, 1795211290.0)
    assert [(step.step_id, step.signal) for step in first.steps] == [("batch", 15)]
    assert (second.status.restarts, second.status.signal) == (1, 125)
    assert second.status.ended is None
    assert second.time_limit_seconds is None
    assert second.cpu_seconds == 93_784
    assert second.requested_tres == {"cpu": 1, "mem": 64_000}
    (step,) = second.steps
    assert (step.state, step.tasks) == (JobState.COMPLETED, 2)
    assert (step.max_rss_bytes, step.average_rss_bytes) == (1_720_320, 0)
    assert step.cpu_seconds == pytest.approx(0.012)
    assert step.usage_max == {"energy": 0, "fs/disk": 27_615, "mem": 11_599_872, "pages": 4}
    assert (part.job_id, part.raw_id, part.het_job_id, part.het_offset) == ("28+1", "29", "28", 1)
    assert part.status.nodes == ""
    assert [step.step_id for step in part.steps] == ["extern"]


def test_sacct_is_asked_once_and_for_ids_only() -> None:
    """Without accounting there is nothing; a silent slurmdbd is an error."""
    run = FakeRunner({"sacct": [Completed(0, sacct_row(jobid="7", jobidraw="7") + "\n")]})
    assert [one.job_id for one in read_accounted(run, ["7", "7", "$(rm)"])] == ["7"]
    assert run.calls[0].argv[-1] == "--jobs=7"
    assert read_accounted(run, ["x"]) == ()
    assert run.count("sacct") == 1
    off = Completed(1, "", "Slurm accounting storage is disabled\n")
    assert read_accounted(FakeRunner({"sacct": [off]}), ["7"]) == ()
    down = Completed(1, "", "sacct: error: Problem talking to the database: refused\n")
    with pytest.raises(SchedulerUnavailable, match="Problem talking") as caught:
        read_accounted(FakeRunner({"sacct": [down]}), ["7"])
    assert "slurmdbd" in caught.value.hint


def test_gres_of_several_kinds_on_one_node() -> None:
    """Each with its own indices; a shared one has counts instead."""
    (found,) = parse_detailed(
        "JobId=29 HetJobId=28 HetJobOffset=1 JobName=x\n"
        "   JobState=RUNNING Reason=None Restarts=2\n   NodeList=n[1-2]\n"
        "     Nodes=n1 CPU_IDs=0-1,4 Mem=1G GRES=gpu:a100:2(IDX:0,3),gpu:v100:1(IDX:1),mps:50\n"
        "     Nodes=n2 CPU_IDs= Mem=0 GRES=(null)\n"
    )
    assert (found.job_id, found.het_job_id, found.het_offset) == ("28+1", "28", 1)
    assert found.status.restarts == 2
    first, second = found.allocations
    assert first.cpu_ids == (0, 1, 4)
    assert first.memory_mib == 1024
    assert first.gres == (
        GresAllocation("gpu", "a100", 2, (0, 3)),
        GresAllocation("gpu", "v100", 1, (1,)),
        GresAllocation("mps", "", 50),
    )
    assert (second.cpu_ids, second.gres) == ((), ())


def test_the_version_is_asked_once() -> None:
    """Unless it is to be fresh; no version is an error."""
    run = FakeRunner(
        {"sbatch": [Completed(0, "slurm-wlm 22.05.8\n"), Completed(0, "slurm 26.05.0-0rc1\n")]}
    )
    assert slurm_version(run) == slurm_version(run) == (22, 5, 8)
    assert run.count("sbatch") == 1
    assert slurm_version(run, fresh=True) == (26, 5, 0)
    with pytest.raises(SchedulerUnavailable, match="no version"):
        slurm_version(FakeRunner({"sbatch": [Completed(0, "hello\n")]}))
    with pytest.raises(SchedulerUnavailable, match="sbatch: broken"):
        slurm_version(FakeRunner({"sbatch": [Completed(1, "", "sbatch: error: broken\n")]}))


def test_differing_nodes_of_one_group() -> None:
    """Each gets what the least of them has; a second partition adds its name."""
    group = {
        "node": {"state": ["IDLE"]},
        "nodes": {"nodes": ["a", "b"]},
        "cpus": {"minimum": 8, "maximum": 16},
        "memory": {"minimum": 1000, "maximum": 2000},
        "resource_spec": {"memory": 100},
        "gres": {"total": "gpu:2"},
        "partition": {"name": "p"},
    }
    other = {**group, "partition": {"name": "q", "maximums": {"oversubscribe": {"jobs": 0}}}}
    nodes, partitions = parse_sinfo_json(json.dumps({"sinfo": [group, other]}))
    assert [(one.name, one.cpus, one.memory_mib, one.partitions) for one in nodes] == [
        ("a", 8, 900, ("p", "q")),
        ("b", 8, 900, ("p", "q")),
    ]
    assert [(one.name, one.exclusive) for one in partitions] == [("p", False), ("q", True)]


def test_limits_of_a_partition_in_json() -> None:
    """Times are minutes there; 26.05 has words for who shares."""
    is_set = {"set": True, "infinite": False}
    said = {
        "name": "p",
        "flags": ["DEFAULT", "ROOT_ONLY"],
        "partition": {"state": ["DRAIN"], "exclusive": "NODE", "oversubscribe": "NO"},
        "maximums": {
            "time": {**is_set, "number": 90},
            "nodes": {**is_set, "number": 2},
            "partition_memory_per_cpu": {**is_set, "number": 2000},
        },
        "defaults": {"time": {**is_set, "number": 30}},
        "accounts": {"allowed": "a,b", "deny": ""},
        "qos": {"allowed": "ALL", "deny": "x", "assigned": "part"},
    }
    (one,) = parse_partitions_json(json.dumps({"partitions": [said]}))
    assert (one.state, one.default, one.root_only, one.exclusive) == ("DRAIN", True, True, True)
    assert (one.max_seconds, one.default_seconds, one.max_nodes) == (5400, 1800, 2)
    assert one.max_memory_per_cpu_mib == 2000
    assert (one.allow_accounts, one.deny_accounts) == (("a", "b"), ())
    assert (one.allow_qos, one.deny_qos, one.qos) == (None, ("x",), "part")


class _PyslurmError(Exception):
    pass


def pyslurm(**collections: Any) -> SimpleNamespace:
    """Stands in for the module, which no machine of this project can run; answers are real."""

    def loading(answer: Any) -> SimpleNamespace:
        def load(*_: Any) -> dict[str, SimpleNamespace]:
            if isinstance(answer, Exception):
                raise answer
            return {
                key: SimpleNamespace(to_dict=lambda one=one: one) for key, one in answer.items()
            }

        return SimpleNamespace(load=load)

    made = {name: loading(answer) for name, answer in collections.items()}
    made["db"] = SimpleNamespace(Jobs=made.get("db_jobs"), JobFilter=lambda ids: ids)
    return SimpleNamespace(error=SimpleNamespace(PyslurmError=_PyslurmError), **made)


def test_the_reader_of_pyslurm() -> None:
    """Loads collections and turns each object into a record."""
    real = json.loads((DATA / "25.11.7" / "pyslurm-25.11.2.json").read_text())
    reader = PyslurmReader(
        pyslurm(
            Jobs=real["jobs"],
            Nodes=real["nodes"],
            Partitions=real["partitions"],
            db_jobs=real["db_jobs"],
        )
    )
    assert len(reader.jobs()) == 10
    assert {node.name for node in reader.nodes()} == {"node1", "node2"}
    assert {one.name for one in reader.partitions()} == {"main", "low"}
    assert {row.raw_id for row in reader.accounted([2, 5])} == set(real["db_jobs"])
    down = PyslurmReader(pyslurm(Nodes=_PyslurmError("Unable to contact slurm controller")))
    with pytest.raises(SchedulerUnavailable, match="pyslurm: Unable to contact"):
        down.nodes()


def test_without_pyslurm() -> None:
    """It is not installed here: what to do is said."""
    with pytest.raises(InputError, match="pyslurm cannot be used") as caught:
        PyslurmReader()
    assert "pip install 'pyslurm==" in caught.value.hint


KEYS = st.sampled_from(
    "jobs nodes sinfo partitions statistics errors job_id job_state state current array task_id "
    "time start exit_code return_code signal id steps step tres requested max type count name "
    "set infinite number partition cpus minimum gres rpcs_by_user user nodelist".split()
)
ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=5),
    max_leaves=20,
)


@given(ANY_JSON, st.sampled_from(["jobs", "nodes", "sinfo", "partitions", "statistics"]))
@settings(max_examples=200, deadline=None)
def test_any_json_is_read_or_refused(value: Any, key: str) -> None:
    """No other error than ours."""
    for document in (
        value,
        {key: value},
        {key: [value]},
        {key: [{"name": "x", "job_id": 1, **(value if isinstance(value, dict) else {})}]},
    ):
        for read in JSON_READERS:
            try:
                read(json.dumps(document))
            except HpmlError:
                continue
    if isinstance(value, dict):
        for convert in (job_row_from, node_from, partition_from):
            convert(value)


@given(st.text(max_size=120))
def test_any_text_is_read_or_refused(text: str) -> None:
    """As above."""
    for read in (*JSON_READERS, parse_metrics):
        try:
            read(text)
        except HpmlError:
            continue
    parse_sdiag(text)
    parse_detailed(f"JobId=1 {text}\n   A={text}\n     Nodes={text} CPU_IDs={text} GRES={text}")
    parse_queued(f"1|{text}", ["JobID", "State", "Name"])
    parse_accounted(f"1|{text}\n1.0|{text}|{text}", ["JobID", "State", "Elapsed"])


def _replaced(value: Any, path: list[int], new: Any) -> Any:
    """The same JSON with one value somewhere inside changed."""
    if not path or not isinstance(value, (dict, list)) or not value:
        return new
    if isinstance(value, list):
        index = path[0] % len(value)
        return [_replaced(one, path[1:], new) if i == index else one for i, one in enumerate(value)]
    key = sorted(value)[path[0] % len(value)]
    return {**value, key: _replaced(value[key], path[1:], new)}


SMALL = {
    name: json.loads((DATA / "25.11.7" / name).read_text())
    for name in ("squeue.json", "sacct.json", "nodes.json", "partitions.json", "sinfo.json")
}
SMALL = {
    name: {key: one[:1] for key, one in said.items() if isinstance(one, list)}
    for name, said in SMALL.items()
}


@given(
    st.sampled_from(sorted(SMALL)),
    st.lists(st.integers(0, 200), min_size=2, max_size=7),
    st.none() | st.integers() | st.text(max_size=5) | st.just([]) | st.just({"set": 1}),
)
@settings(max_examples=200, deadline=None)
def test_a_changed_answer_is_read_or_refused(name: str, path: list[int], new: Any) -> None:
    """A real answer with one value of another form, as the next version may have it."""
    said = json.dumps(_replaced(SMALL[name], path, new))
    for read in JSON_READERS:
        try:
            read(said)
        except HpmlError:
            continue
