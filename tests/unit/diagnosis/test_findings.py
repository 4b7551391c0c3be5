"""From facts to findings: each fault is found, nobody is accused without data, costs decide."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpml_orchestrator.check.job import check_local
from hpml_orchestrator.diagnosis.apply import changed_job, choose_changes
from hpml_orchestrator.diagnosis.diagnose import diagnose
from hpml_orchestrator.diagnosis.model import (
    AllReduce,
    Change,
    DataArgument,
    Facts,
    GpuFacts,
    NodeFacts,
    Peaks,
    RankFacts,
    StageFacts,
)
from hpml_orchestrator.diagnosis.report import Report
from hpml_orchestrator.diagnosis.thresholds import THRESHOLDS
from hpml_orchestrator.runs.load import load_job
from hpml_orchestrator.scheduler.local.processes import LocalMachine
from tests.unit.diagnosis.jobs import complete

GIB = float(1 << 30)
DOCS = Path(__file__).parents[3] / "docs/reports.md"
JOB: dict[str, Any] = {
    "name": "digits",
    "script": "train.py",
    "args": ["--data=/data/digits", "--workers", "1", "--amp=off"],
    "resources": {
        "nodes": 2,
        "gpus": "a100:2",
        "ranks_per_node": 2,
        "ranks_per_gpu": 1,
        "cpus_per_rank": 4,
        "memory": "64G",
        "time": "02:00:00",
        "extra": ["--exclude=n7", "--reservation=course"],
        "exclusive": False,
    },
    "stage": [],
    "binding": {"policy": "gpu-local"},
}


def gpu(number: int, **more: Any) -> GpuFacts:
    """A GPU that is used well."""
    well: dict[str, Any] = {
        "name": "A100",
        "seconds": 3000.0,
        "has_process": True,
        "utilization_ratio": 0.95,
        "sm_active_ratio": 0.8,
        "tensor_active_ratio": 0.4,
        "dram_active_ratio": 0.4,
        "memory_peak_bytes": 60 * GIB,
        "memory_total_bytes": 80 * GIB,
        "power_watts": 300.0,
        "power_limit_watts": 400.0,
    }
    return GpuFacts(f"GPU-{number}", **{**well, **more})


def rank(number: int, **more: Any) -> RankFacts:
    """A rank of 1,000 steps of 3 s that waits for little."""
    well: dict[str, Any] = {
        "node": f"n{number // 2}",
        "samples": 64_000.0,
        "steps": 1000.0,
        "step_seconds": 3000.0,
        "data_wait_seconds": 30.0,
        "transfer_seconds": 20.0,
        "wait_seconds": 50.0,
        "comm_seconds": 150.0,
        "save_seconds": 30.0,
        "evaluation_seconds": 100.0,
        "cpus": [*range(number % 2 * 4, number % 2 * 4 + 4)],
        "bound_as_planned": True,
        "gpu": f"GPU-{number}",
    }
    return RankFacts(number, **{**well, **more})


def node(number: int, *gpus: GpuFacts, **more: Any) -> NodeFacts:
    """A node with two GPUs."""
    well: dict[str, Any] = {
        "seconds": 3500.0,
        "cpus": 8.0,
        "mean_cpus": 6.0,
        "memory_peak_bytes": 40 * GIB,
        "memory_limit_bytes": 64 * GIB,
        "read_bytes": 3500.0 * 50e6,
        "gpus_allocated": 2.0,
        "gpus_used": 2.0,
        "gpus": gpus or (gpu(2 * number), gpu(2 * number + 1)),
    }
    return NodeFacts(f"n{number}", **{**well, **more})


SOURCE = {"name": "data", "source": "/data/digits"}
DATA = DataArgument("args.0", "--data={stage.data}", SOURCE, 10 * GIB)


def facts(**more: Any) -> Facts:
    """A healthy run of an hour, of four ranks on two nodes."""
    well: dict[str, Any] = {
        "job": JOB,
        "phases": {"start-up": 20.0, "staging": 20.0, "launch": 20.0, "training": 3400.0},
        "elapsed_seconds": 3600.0,
        "limit_seconds": 7200.0,
        "node_count": 2,
        "gpu_count": 4,
        "core_count": 16,
        "world_size": 4,
        "channel": True,
        "monitored": True,
        "ranks": [rank(number) for number in range(4)],
        "nodes": [node(0), node(1)],
        "peaks": Peaks(shared_read=400e6, origin="measured"),
        "node_cpus": 16,
        "node_memory_bytes": 256 * GIB,
        "memory_bytes": 64 * GIB,
        "data": DATA,
    }
    well |= more
    return Facts("digits-1", "COMPLETED", over=True, **{**well, "job": complete(**well["job"])})


ALONE: dict[str, Any] = {"cpu_seconds": 1800.0, "helper_cpu_seconds": 0.0}
"""CPU time of a rank without loaders, which cannot cause its own waiting."""


def ranks(**each: Any) -> list[RankFacts]:
    """Four ranks with the same figures."""
    return [rank(number, **each) for number in range(4)]


def without_gpus(**more: Any) -> Facts:
    """The healthy run on CPUs alone."""
    job = {**JOB, "resources": {**JOB["resources"], "gpus": "0"}}
    cpus = [
        replace(node(number), gpus=(), gpus_allocated=None, gpus_used=None) for number in (0, 1)
    ]
    plain = [replace(one, gpu="", transfer_seconds=None) for one in ranks()]
    return facts(**{"job": job, "nodes": cpus, "ranks": plain, "gpu_count": 0, **more})


def slow(number: int = 1, **more: Any) -> list[RankFacts]:
    """Four ranks, of which one waits for nobody and the others 30 % of a step for it."""
    measured = more.get("measured_steps")
    each = {"wait_seconds": 900.0, "measured_steps": measured, "slowest_steps": measured and 0.0}
    others = [rank(one, **each) for one in range(4) if one != number]
    return sorted([*others, rank(number, wait_seconds=0.0, **more)], key=lambda one: one.rank)


def on_cpus(thread: float, python: float = 0.0, framework: float = 0.0, **more: Any) -> Facts:
    """The run on CPUs alone, of which each rank's threads used so many of 3,000 s."""
    helpers = python + framework
    used = {
        "cpu_seconds": thread + helpers,
        "helper_cpu_seconds": helpers,
        "loader_cpu_seconds": 0.0,
        "python_cpu_seconds": python,
        "cpu_wait_seconds": 100.0,
        **more,
    }
    return without_gpus(
        ranks=[replace(one, gpu="", transfer_seconds=None, **used) for one in ranks()]
    )


STAGE = {"name": "d", "source": "/data", "target": "local", "distribution": "shared"}
FAULTS: dict[str, tuple[Facts, list[str]]] = {
    "healthy": (facts(), []),
    "healthy without GPUs": (without_gpus(), []),
    "busy on CPUs": (on_cpus(2900.0, 100.0), []),
    "busy on CPUs in the framework's threads": (on_cpus(50.0, 600.0, 11e3), []),
    "a thread of the script": (on_cpus(650.0, 2200.0), ["own-threads"]),
    "a thread of the script beside": (on_cpus(2700.0, 2900.0), []),
    "much between the steps": (
        facts(ranks=ranks(seconds=3400.0, step_seconds=600.0)),
        ["uncounted-time"],
    ),
    "a long time between few steps": (
        facts(ranks=ranks(seconds=3400.0, steps=5.0, step_seconds=4.0)),
        ["uncounted-time"],
    ),
    "a little between the steps": (facts(ranks=ranks(seconds=3400.0)), []),
    "data": (facts(ranks=ranks(data_wait_seconds=900.0)), ["waits-for-data"]),
    "a little data": (facts(ranks=ranks(data_wait_seconds=299.0)), []),
    "data of one rank": (facts(ranks=slow(data_wait_seconds=930.0)), ["slow-rank"]),
    "data of all, and a slow rank": (
        facts(ranks=[replace(one, data_wait_seconds=600.0) for one in slow()]),
        ["slow-rank", "waits-for-data"],
    ),
    "slow rank": (facts(ranks=slow()), ["slow-rank"]),
    "slow rank in many of the measured steps": (
        facts(ranks=slow(measured_steps=20.0, slowest_steps=19.0)),
        ["slow-rank"],
    ),
    "slow link": (
        facts(
            ranks=[
                rank(n, wait_seconds=900.0 * (n > 0), comm_seconds=1800.0 - 900.0 * (n > 0))
                for n in range(4)
            ]
        ),
        ["communication"],
    ),
    "slow rank, collectives unmeasured": (
        facts(ranks=[replace(one, comm_seconds=None) for one in slow()]),
        ["slow-rank"],
    ),
    "slow rank by its data alone": (
        facts(
            ranks=[
                rank(n, wait_seconds=None, comm_seconds=900.0, data_wait_seconds=900.0 * (n == 2))
                for n in range(4)
            ]
        ),
        ["slow-rank"],
    ),
    "slow rank that is bound wrongly": (
        facts(ranks=slow(bound_as_planned=False)),
        ["wrong-binding"],
    ),
    "slow rank whose GPU is hot": (
        facts(
            ranks=slow(),
            nodes=[node(0, gpu(0), gpu(1, throttled_seconds={"hw_thermal": 1500.0})), node(1)],
        ),
        ["throttled"],
    ),
    "slow rank, while another's GPU is hot": (
        facts(
            ranks=slow(),
            nodes=[node(0), node(1, gpu(2, throttled_seconds={"hw_thermal": 1500.0}), gpu(3))],
        ),
        ["slow-rank", "throttled"],
    ),
    "power cap": (
        facts(nodes=[node(0, gpu(0, throttled_seconds={"sw_power": 3000.0}), gpu(1)), node(1)]),
        [],
    ),
    "shared cores": (
        facts(ranks=ranks(cpus=[0], bound_as_planned=None, data_wait_seconds=400.0)),
        ["wrong-binding"],
    ),
    "unbound": (facts(ranks=ranks(cpus=[*range(8)], bound_as_planned=None)), []),
    "communication": (facts(ranks=ranks(comm_seconds=1000.0)), ["communication"]),
    "copies": (facts(ranks=ranks(transfer_seconds=700.0)), ["host-to-device"]),
    "float32": (
        facts(
            nodes=[
                node(
                    n,
                    gpu(2 * n, tensor_active_ratio=0.01),
                    gpu(2 * n + 1, tensor_active_ratio=0.01),
                )
                for n in (0, 1)
            ]
        ),
        ["tensor-cores-idle"],
    ),
    "small kernels": (
        facts(
            nodes=[node(n, gpu(n, sm_active_ratio=0.06, tensor_active_ratio=0.01)) for n in (0, 1)]
        ),
        ["launch-bound"],
    ),
    "idle GPUs because of data": (
        facts(
            ranks=ranks(data_wait_seconds=2400.0),
            nodes=[node(n, gpu(n, sm_active_ratio=0.06, utilization_ratio=0.1)) for n in (0, 1)],
        ),
        ["waits-for-data"],
    ),
    "busy CPUs, idle GPUs": (
        facts(
            ranks=ranks(wait_seconds=0.0, comm_seconds=0.0),
            nodes=[
                node(n, gpu(n, utilization_ratio=0.3, sm_active_ratio=None), mean_cpus=7.9)
                for n in (0, 1)
            ],
        ),
        ["cpu-bound"],
    ),
    "forgotten GPUs": (
        facts(
            nodes=[
                node(n, gpu(2 * n), gpu(2 * n + 1, has_process=False), gpus_used=1.0)
                for n in (0, 1)
            ]
        ),
        ["gpu-unused"],
    ),
    "XID of the program": (
        facts(nodes=[node(0, gpu(0, xid_errors={"31": 2}), gpu(1)), node(1)]),
        [],
    ),
    "XID of the hardware": (
        facts(nodes=[node(0, gpu(0, xid_errors={"79": 1}), gpu(1)), node(1)]),
        ["faulty-gpu"],
    ),
    "memory": (facts(nodes=[node(0, memory_peak_bytes=63 * GIB), node(1)]), ["memory-pressure"]),
    "GPU memory": (
        facts(nodes=[node(0, gpu(0, memory_peak_bytes=79 * GIB), gpu(1)), node(1)]),
        ["memory-pressure"],
    ),
    "killed": (replace(facts(), state="OUT_OF_MEMORY"), ["memory-pressure"]),
    "idle CPUs": (facts(nodes=[node(0, mean_cpus=0.5), node(1, mean_cpus=0.5)]), ["cpus-unused"]),
    "idle CPUs of a whole node": (
        facts(
            job={**JOB, "resources": {**JOB["resources"], "exclusive": True}},
            nodes=[node(0, mean_cpus=0.5), node(1, mean_cpus=0.5)],
        ),
        [],
    ),
    "other processes on the CPUs": (
        facts(ranks=ranks(cpu_wait_seconds=1200.0, comm_seconds=1500.0, **ALONE)),
        ["cpu-contention"],
    ),
    "loaders on the ranks' own CPUs": (
        facts(ranks=ranks(cpu_wait_seconds=1200.0, cpu_seconds=12e3, helper_cpu_seconds=9e3)),
        ["own-contention"],
    ),
    "loaders and other processes on the CPUs": (
        facts(ranks=ranks(cpu_wait_seconds=1200.0, cpu_seconds=6e3, helper_cpu_seconds=4e3)),
        ["cpu-contention"],
    ),
    "a little of the CPUs' time": (facts(ranks=ranks(cpu_wait_seconds=100.0)), []),
    "idle CPUs of a failed run": (
        replace(facts(nodes=[node(0, mean_cpus=0.5), node(1, mean_cpus=0.5)]), state="FAILED"),
        [],
    ),
    "idle memory": (
        facts(nodes=[node(0, memory_peak_bytes=3 * GIB), node(1, memory_peak_bytes=9 * GIB)]),
        ["memory-over-asked"],
    ),
    "idle memory of one node": (
        facts(nodes=[node(0, memory_peak_bytes=3 * GIB), node(1)]),
        [],
    ),
    "time": (facts(limit_seconds=100 * 3600.0), ["time-over-asked"]),
    "time of a trial": (facts(elapsed_seconds=300.0, phases={}, ranks=[], limit_seconds=36e3), []),
    "start": (
        facts(
            elapsed_seconds=5000.0, phases={"start-up": 1400.0, "launch": 20.0, "training": 3400.0}
        ),
        ["slow-start"],
    ),
    "staging": (
        facts(
            job={**JOB, "stage": [STAGE]},
            elapsed_seconds=5000.0,
            phases={"staging": 1500.0, "training": 3400.0},
            stages=[StageFacts("d", "/data", "local", 1500.0, 10 * GIB, 1e6)],
        ),
        ["slow-staging"],
    ),
    "saving": (facts(ranks=ranks(save_seconds=800.0)), ["slow-saving"]),
    "evaluation": (facts(ranks=ranks(evaluation_seconds=1500.0)), ["slow-evaluation"]),
    "data and saving": (
        facts(ranks=ranks(data_wait_seconds=2000.0, save_seconds=700.0)),
        ["waits-for-data", "slow-saving"],
    ),
    "storage without the channel": (
        facts(
            ranks=[],
            channel=False,
            nodes=[node(0, read_bytes=3500 * 390e6), node(1)],
        ),
        ["slow-storage"],
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_and_nothing_else(name: str) -> None:
    """Each fault gives its finding, the costliest first; a healthy run none."""
    given_facts, kinds = FAULTS[name]
    found = diagnose(given_facts)
    assert [one.kind for one in found.findings] == kinds
    hours = [one.gain_hours or 0.0 for one in found.findings]
    assert hours == sorted(hours, reverse=True)
    for one in found.findings:
        assert one.level in ("critical", "warning")
        assert one.evidence
        assert one.changes
        assert one.gain is None or 0 <= one.gain <= 1
        assert bool(one.gain_if) == (one.gain is not None)
    assert found.healthy or kinds or not given_facts.ranks
    if given_facts.state == "FAILED":
        assert "hpml logs digits-1" in found.headline or kinds
    elif not kinds:
        assert found.headline == (
            "nothing found that holds it back"
            if given_facts.ranks
            else "not enough data to say what holds it back"
        )


@pytest.mark.parametrize("name", FAULTS)
def test_its_changes_make_a_job_file_that_loads(name: str, tmp_path: Path) -> None:
    """Every change with a field names a real one, with a value that is accepted."""

    def load(document: Mapping[str, Any]) -> dict[str, Any]:
        (tmp_path / "job.yaml").write_text(json.dumps(document))
        return load_job(tmp_path / "job.yaml").job.to_json()

    given_facts, _ = FAULTS[name]
    (tmp_path / "train.py").write_text("")
    before = load(given_facts.job.to_json())
    changes = [
        change
        for one in (*diagnose(given_facts).findings, *diagnose(given_facts).unknown)
        for change in one.changes
    ]
    for change in changes:
        document = given_facts.job.to_json()
        for field, value in {change.field: change.value, **change.also}.items():
            if field:
                put(document, field, value)
        after = load(document)
        assert not change.field or after != before, change


@pytest.mark.parametrize(("cpus", "gigabytes"), [(8, 64), (9, 70), (64, 500)])
@pytest.mark.parametrize("name", FAULTS)
def test_its_changes_pass_the_checks(name: str, cpus: int, gigabytes: int, tmp_path: Path) -> None:
    """The changed job asks for no more than a node of the run has, whatever its size."""
    run = replace(FAULTS[name][0], node_cpus=cpus, node_memory_bytes=gigabytes * GIB)
    machine = LocalMachine((*range(cpus),), ("0", "1"), gigabytes << 10)
    (tmp_path / "train.py").write_text("")
    for one in choose_changes(diagnose(run)).made:
        changed = changed_job(run.job, one.fields)
        (tmp_path / "job.yaml").write_text(json.dumps(changed.to_json()))
        job = load_job(tmp_path / "job.yaml").job
        refused = {error.code for error in check_local(job, machine)}
        assert refused <= {"local.nodes"}, one.change


def put(document: Any, field: str, value: Any) -> None:
    """Set a dotted field."""
    *above, last = field.split(".")
    for part in above:
        document = (
            document[int(part)] if isinstance(document, list) else document.setdefault(part, {})
        )
    document[int(last) if isinstance(document, list) else last] = value


def forgotten(draw: Any, value: Any) -> Any:
    """A copy of facts in which some of what can be unknown is unknown."""
    if is_dataclass(value) and not isinstance(value, type):
        changes: dict[str, Any] = {}
        for field in fields(value):
            old = getattr(value, field.name)
            if field.name in ("job", "state", "run", "over"):
                continue
            if field.default is None and draw(st.booleans()):
                changes[field.name] = None
            elif isinstance(old, (list, tuple)) and field.name != "cpus":
                changes[field.name] = [forgotten(draw, one) for one in old]
        return replace(value, **changes)
    return value


@given(st.data())
def test_less_data_accuses_nobody(data: st.DataObject) -> None:
    """Whatever is not known of a healthy run: nothing is found that holds it back."""
    name = data.draw(st.sampled_from(["healthy", "healthy without GPUs"]))
    known = forgotten(data.draw, FAULTS[name][0])
    assert diagnose(known).findings == ()


@given(st.data())
def test_unknown_figures_add_no_accusation(data: st.DataObject) -> None:
    """What is not known of a run with a fault leads to no other kind of finding."""
    name = data.draw(st.sampled_from([*FAULTS]))
    given_facts, kinds = FAULTS[name]
    found = {one.kind for one in diagnose(forgotten(data.draw, given_facts)).findings}
    # what is not counted is such a finding, which accuses nobody
    allowed = {*kinds, "uncounted-time"}
    # the cause of a slow rank is a figure, too: without it, what it leads to is left
    allowed |= {"slow-rank"} if {"wrong-binding", "throttled"} & {*kinds} else set()
    if kinds in (["wrong-binding"], ["slow-rank"], ["cpu-contention"]):
        allowed |= {"communication", "waits-for-data", "slow-rank"}
    assert found <= allowed


@pytest.mark.parametrize(
    ("steps", "seconds", "level", "had"),
    [
        (1000.0, 3000.0, "critical", ""),
        (19.0, 3000.0, None, "19 in 3000 s"),
        (1000.0, 30.0, "warning", ""),
        (1000.0, 4.96, None, "1000 in 4.9 s"),
        (0.0, 4.0, None, "none"),
    ],
)
def test_short_runs(steps: float, seconds: float, level: str | None, had: str) -> None:
    """Too few steps are not judged, and a short training is not critical.

    What is not judged is unknown, with the needed figure; the parts of the time are shown.
    """
    short = ranks(
        steps=steps,
        step_seconds=seconds,
        data_wait_seconds=seconds / 2,
        comm_seconds=0.0,
        wait_seconds=0.0,
        transfer_seconds=0.0,
        save_seconds=0.0,
        evaluation_seconds=0.0,
    )
    found = diagnose(facts(ranks=short, phases={"training": seconds}, elapsed_seconds=seconds))
    assert [one.level for one in found.findings] == ([level] if level else [])
    needs = {one.kind: one.needs for one in found.unknown}
    if level is None:
        wanted = "at least 20 steps and 5 s of training after the warm-up: there were "
        assert needs["waits-for-data"] == wanted + had
    asked = f"a run of 10 minutes: this one took {int(seconds)} s"
    assert needs.get("time-over-asked") == (asked if seconds < 600 else None)
    assert found.time == "training 100%; of the steps: waiting for data 50%, the rest 50%"
    assert f"\ntime      {found.time}\n" in str(Report(found))
    assert found.time in Report(found).markdown()
    assert Report(found).to_dict()["time"] == found.time


def test_who_waited_for_whom_in_the_uncounted_time_may_be_unknown() -> None:
    """A rank that works alone there may have waited for the others itself."""
    found = diagnose(facts(ranks=waited_for(1440.0, None))).findings
    assert found[0].verdict == "48% of the training lies outside of what the script counts"


def test_what_the_uncounted_time_is_known_to_hold() -> None:
    """Its rank and its CPU time; what is a share of the few counted steps accuses nobody."""
    cpu = {"cpu_seconds": 1500.0, "helper_cpu_seconds": 0.0}
    each = {"step_seconds": 600.0, "data_wait_seconds": 500.0, "wait_seconds": 20.0, **cpu}
    alone = [rank(n, **{**each, "seconds": 3400.0 * (n == 2)}) for n in range(4)]
    alone[2] = replace(alone[2], cpu_seconds=2500.0)
    found = diagnose(facts(ranks=alone))
    assert [one.kind for one in found.findings] == ["uncounted-time"]
    assert found.headline == "79% of the training lies outside of what the script counts"
    evidence = " ".join(found.findings[0].evidence)
    assert "44:30 on rank 2" in evidence
    assert "used 1770 to 2500 s of CPU there, and 1000 s more than" in evidence
    assert (
        "of the training: evaluation 3%, checkpoints 1%, outside of what the script counts 79%"
        in (found.time)
    )
    assert any("most of the training is not counted" in one.needs for one in found.unknown)
    counted = diagnose(facts(ranks=[replace(one, other_seconds=2600.0) for one in alone]))
    assert "uncounted-time" not in [one.kind for one in counted.findings]
    assert "other timed blocks 76%" in counted.time


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (on_cpus(500.0), "the thread of rank 0 used at most 18% of a core there"),
        (on_cpus(500.0, python_cpu_seconds=None), "needs the newest `hpml_channel.py`"),
        (on_cpus(500.0, 1000.0, wait_seconds=None), "its waits measured (`hpml_waits.py`)"),
        (on_cpus(500.0), "`--profile`"),
        (replace(on_cpus(500.0), gpu_count=4, nodes=facts().nodes), ""),
        (on_cpus(500.0, 0.0, 3000.0), ""),
        (on_cpus(1900.0), ""),
    ],
)
def test_a_large_rest_is_unknown_unless_something_computed(run: Facts, words: str) -> None:
    """Nothing is found in it, and that is not said; a thread, the framework or a GPU explain it."""
    found = diagnose(run)
    assert found.findings == ()
    assert found.is_clear != bool(words)
    assert words in " ".join(str(Report(found)).split())
    if words:
        assert "what 9" in found.headline
        assert "Nothing holds this run back" not in Report(found).html()


def test_where_the_time_went() -> None:
    """By phases, then saving and evaluation, then the parts of the steps."""
    assert diagnose(facts()).time == (
        "start-up 1%, staging 1%, launch 1%, training 98%; of the training: evaluation 3%, "
        "checkpoints 1%; of the steps: waiting for data 1%, host to device 1%, "
        "waiting for slower ranks 2%, communication 5%, the rest 92%"
    )
    stalled = diagnose(facts(ranks=ranks(wait_seconds=5000.0)))
    assert "waiting for slower" not in stalled.time
    assert not any("communication" in line for line in stalled.healthy)
    assert diagnose(facts(phases={})).time == ""


def start(took: dict[str, float], **more: Any) -> Facts:
    """A run that took that long until its first step, and trained for an hour."""
    phases = {**took, "training": 3400.0}
    return facts(phases=phases, elapsed_seconds=sum(phases.values()), **more)


@pytest.mark.parametrize(
    ("took", "nodes", "verdict", "advice"),
    [
        ({"rendezvous": 9.0, "preparation": 900.0}, 2, "the script's own preparation", "data, mod"),
        (
            {"preparation": 900.0},
            1,
            "the script's own preparation, with the rendezvous",
            "data, model",
        ),
        (
            {"preparation": 900.0},
            2,
            "the script's own preparation, with the rendezvous",
            "data, model",
        ),
        ({"rendezvous": 900.0, "preparation": 9.0}, 1, "rendezvous", "the first waits for the"),
        ({"rendezvous": 900.0, "preparation": 9.0}, 2, "rendezvous", "NCCL_SOCKET_IFNAME"),
    ],
)
def test_the_network_is_suspected_only_for_a_long_rendezvous_of_several_nodes(
    took: dict[str, float], nodes: int, verdict: str, advice: str
) -> None:
    """What a script prepares after it is its own work; without its end nobody knows the parts."""
    (found,) = diagnose(start(took, node_count=nodes)).findings
    assert found.verdict.endswith(f" before the first step, most of it {verdict}")
    changes = " ".join(change.text for change in found.changes)
    assert advice in changes
    assert ("NCCL" in changes) == (nodes > 1 and "IFNAME" in advice)
    assert ('event("preparation")' in changes) == ("rendezvous" not in took)
    alone = start(took, node_count=1, world_size=1, ranks=ranks()[:1])
    assert "rendezvous and" not in str(Report(diagnose(alone)))


def test_a_start_without_cpus_is_not_to_be_changed() -> None:
    """What other processes took the CPUs for is their doing: no container image helps."""
    lacking = ranks(cpu_wait_seconds=1200.0, **ALONE)
    found = {one.kind: one for one in diagnose(start({"launch": 900.0}, ranks=lacking)).findings}
    assert [*found] == ["cpu-contention", "slow-start"]
    assert any("other processes had the CPUs" in line for line in found["slow-start"].evidence)
    assert not found["slow-start"].changes
    calm = diagnose(start({"launch": 900.0})).findings
    assert "container image" in calm[0].changes[0].text


@pytest.mark.parametrize(
    ("told", "order"),
    [
        (
            start({"launch": 5000.0}, ranks=ranks(evaluation_seconds=1632.0)),
            ["slow-evaluation", "slow-start"],
        ),
        (
            start({"launch": 9000.0}, ranks=ranks(save_seconds=400.0)),
            ["slow-start", "slow-saving"],
        ),
        (
            facts(ranks=ranks(data_wait_seconds=900.0, save_seconds=800.0)),
            ["slow-saving", "waits-for-data"],
        ),
        (
            without_gpus(
                nodes=[node(one, gpus=(), mean_cpus=0.5, gpus_allocated=None) for one in (0, 1)],
                ranks=[replace(one, save_seconds=800.0) for one in without_gpus().ranks],
            ),
            ["slow-saving", "cpus-unused"],
        ),
    ],
    ids=["a start is paid once", "a very long start", "a guess counts less", "over-asked"],
)
def test_findings_are_in_the_order_of_what_a_change_is_worth(told: Facts, order: list[str]) -> None:
    """The share of the run that it saves, times how sure that is."""
    assert [one.kind for one in diagnose(told).findings] == order


@pytest.mark.parametrize(
    ("saving", "first", "others"),
    [
        ((8, None, None, None), "every 731 steps (33:20) takes 5%", 1),
        ((8, 8, 8, 8), "every 731 steps (33:20) takes 5%", 2),
        ((None, None, None, None), "save less often", 1),
    ],
)
def test_checkpoints_are_saved_where_the_next_attempt_finds_them(
    saving: tuple[int | None, ...], first: str, others: int
) -> None:
    """Less often, in the background, by fewer ranks; never to a node's own disk."""
    saved = [replace(one, saves=count) for one, count in zip(ranks(), saving, strict=True)]
    told = facts(ranks=[replace(one, save_seconds=800.0) for one in saved])
    (found,) = diagnose(told).findings
    assert found.changes[0].text.endswith(first)
    assert len(found.changes) == 1 + others
    assert not re.search("local.dir|collect", " ".join(change.text for change in found.changes))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"data_wait_seconds": 930.0}, "it waits for data"),
        ({"transfer_seconds": 920.0}, "its copies to the GPU are slow"),
        ({"samples": 90_000.0}, "it has more samples"),
        ({}, "the cause is not known"),
        ({"data_wait_seconds": 300.0}, "the cause is not known"),
    ],
)
def test_the_cause_of_a_slow_rank(more: dict[str, float], words: str) -> None:
    """It is named only if a figure of that rank explains the delay."""
    (found,) = diagnose(facts(ranks=slow(2, **more))).findings
    assert found.kind == "slow-rank"
    assert found.verdict.startswith("rank 2 on n1 slows the others down by ")
    assert found.verdict.endswith(words)


def waited_for(seconds: float, waited: float | None, **more: Any) -> list[RankFacts]:
    """Four ranks of 3,000 s, of which rank 0 works between its steps, without a CPU now and then.

    The others' steps take so much longer, and they wait in them as they measured.
    """
    nothing = {"save_seconds": 0.0, "evaluation_seconds": 0.0, "seconds": 3000.0, **ALONE}
    each = {**nothing, "wait_seconds": waited, "cpu_wait_seconds": 30.0}
    mine = {"wait_seconds": waited and 0.0, "cpu_wait_seconds": 950.0, **more}
    first = rank(0, **{**each, **mine, "step_seconds": 3000.0 - seconds})
    return [first, *(rank(number, **each) for number in (1, 2, 3))]


@pytest.mark.parametrize(
    ("late", "kinds", "words"),
    [
        (waited_for(1440.0, 1440.0, evaluation_seconds=1440.0), ["slow-evaluation"], "evaluation"),
        (waited_for(1440.0, 0.0, evaluation_seconds=1440.0), ["slow-evaluation"], "evaluation"),
        (waited_for(1440.0, None, evaluation_seconds=1440.0), ["slow-evaluation"], "evaluation"),
        (waited_for(720.0, 720.0, save_seconds=720.0), ["slow-saving"], "checkpoints"),
        (waited_for(600.0, 600.0, evaluation_seconds=600.0), ["slow-rank"], "it evaluates alone"),
        (waited_for(1440.0, 1440.0), ["uncounted-time"], "works alone there"),
        (waited_for(0.0, 900.0, cpu_seconds=2700.0), ["slow-rank"], "it computes more"),
        (waited_for(0.0, 900.0, samples=90_000.0), ["slow-rank"], "it has more samples"),
        # for a rank that saves within its step, as the script counts it
        (waited_for(0.0, 900.0, save_seconds=900.0), ["slow-saving"], "checkpoints"),
        (waited_for(0.0, 900.0), ["slow-rank"], "other processes have its CPUs"),
    ],
)
def test_what_a_rank_does_alone_is_the_cause_and_not_the_cpus(
    late: list[RankFacts], kinds: list[str], words: str
) -> None:
    """The others wait for what rank 0 does; that it lacks a CPU, too, stands beside it."""
    found = diagnose(facts(ranks=late)).findings
    assert [one.kind for one in found if one.kind != "cpu-contention"] == kinds
    for one in found[: len(kinds)]:
        assert words in one.verdict
        assert "rank 0 " in one.verdict
        ends = any("end the other processes" in change.text for change in one.changes)
        assert ends == ("other processes" in words)
        if not ends:
            assert "other processes also had its CPUs for " in " ".join(one.evidence)
            assert "cpu-contention" not in [other.kind for other in found]


def test_the_end_of_a_training_delays_no_step() -> None:
    """Rank 0 evaluates alone when all steps are done: nobody waits in a step."""
    late = [replace(one, seconds=None) for one in waited_for(0.0, 20.0, evaluation_seconds=600.0)]
    late = [replace(one, wait_seconds=20.0, cpu_wait_seconds=0.0) for one in late]
    assert diagnose(facts(ranks=late)).findings == ()


def test_a_rank_without_a_cpu_is_slow_for_that_reason() -> None:
    """Its contention is the first finding, and collectives are not accused."""
    late = [
        replace(one, **ALONE, cpu_wait_seconds=930.0 if one.rank == 2 else 20.0, comm_seconds=900.0)
        for one in slow(2)
    ]
    (found,) = diagnose(facts(ranks=late)).findings
    assert found.verdict.endswith("other processes have its CPUs")


@pytest.mark.parametrize(
    ("variables", "args", "node_cpus", "change"),
    [
        ({"OMP_NUM_THREADS": "8"}, [], 2, ("environment.variables.OMP_NUM_THREADS", "1")),
        ({}, ["--workers=2"], 8, ("resources.cpus_per_rank", 3)),
        ({}, ["--workers=2"], 4, ("", None)),
        ({}, ["--num_workers", "2"], None, ("", None)),
        ({}, [], 8, ("", None)),  # threads that the program starts by itself
    ],
)
@pytest.mark.parametrize("late", [(0, 1, 2, 3), (0,)])
def test_own_threads_are_not_the_processes_of_others(
    late: tuple[int, ...], variables: Any, args: list[str], node_cpus: int | None, change: Any
) -> None:
    """Eight threads, or two loader workers, on the one core of each rank or of a slow one."""
    alone = [replace(one, cpus=[one.rank % 2]) for one in (slow() if len(late) == 1 else ranks())]
    busy = {"cpu_wait_seconds": 2000.0, "cpu_seconds": 3100.0, "helper_cpu_seconds": 2200.0}
    busy = busy if len(late) > 1 else {**busy, "wait_seconds": 0.0}
    calm = {"cpu_wait_seconds": 0.0, **ALONE, "wait_seconds": 2000.0} if len(late) == 1 else {}
    own = [replace(one, **(busy if one.rank in late else calm)) for one in alone]
    resources = {**JOB["resources"], "cpus_per_rank": 1}
    environment = {"variables": variables}
    job = {**JOB, "resources": resources, "args": args, "environment": environment}
    (found,) = diagnose(facts(ranks=own, job=job, node_cpus=node_cpus, data=None)).findings
    assert found.kind == ("own-contention" if len(late) > 1 else "slow-rank")
    assert "own threads" in found.verdict
    assert (found.changes[0].field, found.changes[0].value) == change
    assert not any("other processes" in one.text for one in found.changes)


@pytest.mark.parametrize(("node_cpus", "kinds"), [(2, ["own-contention"]), (1, []), (None, [])])
def test_loaders_on_a_full_node_take_no_time_from_their_rank(
    node_cpus: int | None, kinds: list[str]
) -> None:
    """Without them the rank would do their work itself; where a node has more CPUs, these help."""
    busy: Any = {"cpu_wait_seconds": 2000.0, "cpu_seconds": 3100.0, "helper_cpu_seconds": 2200.0}
    own = [replace(one, **busy, cpus=[0], loader_cpu_seconds=2100.0) for one in ranks()[:1]]
    job = {**JOB, "resources": {**JOB["resources"], "cpus_per_rank": 1}}
    alone = facts(ranks=own, job=job, node_cpus=node_cpus, node_count=1, world_size=1)
    found = diagnose(alone).findings
    assert [one.kind for one in found] == kinds
    for one in found:
        assert (one.changes[0].field, one.changes[0].value) == ("resources.cpus_per_rank", 2)


@pytest.mark.parametrize("over", [True, False])
@pytest.mark.parametrize("on_slurm", [True, False])
def test_what_is_advised_can_be_done(over: bool, on_slurm: bool) -> None:
    """A run that has ended cannot be attached to; a local one has no nodes for itself."""
    late = facts(ranks=ranks(cpu_wait_seconds=1200.0, **ALONE), on_slurm=on_slurm)
    late = replace(late, over=over, state="COMPLETED" if over else "RUNNING")
    changes = diagnose(late).findings[0].changes
    assert any("hpml attach" in change.text for change in changes) != over
    assert any(change.field == "resources.exclusive" for change in changes) == on_slurm
    assert "of the steps, while other processes had the CPUs: " in diagnose(late).time
    (blind,) = (one.needs for one in diagnose(late).unknown if one.kind == "communication")
    again = "with `resources.exclusive: true`" if on_slurm else "or when the machine is idle"
    assert "run it again " in blind
    assert blind.endswith(again)


@pytest.mark.parametrize("nodes", [1, 2])
def test_communication_is_reduced_before_gradients_lose_digits(nodes: int) -> None:
    """On one node, too: a larger batch or accumulation; both train another model."""
    (found,) = diagnose(facts(ranks=ranks(comm_seconds=1000.0), node_count=nodes)).findings
    first, second, *_ = found.changes
    assert "a larger batch per rank" in first.text
    assert "no_sync" in first.text
    assert "bf16_compress_hook" in second.text
    assert first.touches_accuracy
    assert second.touches_accuracy


LINK = AllReduce(1e-3, 1e-8, 0.12, ranks=4)  # 1 ms, 100 MB/s
SMALL = {
    "gradient_bytes": 20e6,
    "gradient_buckets": 100,
}  # the ring: 0.6 s of latency, 0.3 of bytes
AS_PREDICTED = (
    "20 MB of gradients in 100 buckets by 4 ranks take 1 s per step; predicted: ring 900 ms, tree "
    "700 ms, parameter server 1.8 s (latency 1 ms, 100 MB/s with 4 ranks, bench)"
)
IMAGES = {**JOB, "script": "src/ddp_images.py", "args": ["--data=d"]}


@pytest.mark.parametrize(
    ("known", "comm", "job", "line", "change"),
    [
        ({}, 1000.0, JOB, None, None),
        (SMALL, 1000.0, JOB, AS_PREDICTED, ("", None)),
        (SMALL, 1000.0, IMAGES, "", ("args", ["--data=d", "--bucket-mb=4"])),
        (SMALL, 1000.0, {**IMAGES, "args": ["--bucket-mb=0.2"]}, "", ("args.0", "--bucket-mb=4")),
        (SMALL, 1000.0, {**IMAGES, "args": ["--bucket-mb", "1"]}, "", ("args.1", "4")),
        (SMALL, 2000.0, JOB, "2.2 times the ring's time: others use the link or the CPUs", None),
        ({**SMALL, "gradient_bytes": 200e6}, 1000.0, JOB, "3.6 times as fast as the ring", None),
        ({"gradient_bytes": 40e6, "gradient_buckets": 11}, 700.0, JOB, "in 11 buckets", None),
        ({**SMALL, "peaks": None}, 1000.0, JOB, "predicted: unknown (needs `hpml bench`)", None),
        ({**SMALL, "peaks": Peaks(allreduce={"nodes": [replace(LINK, ranks=2)]})}, 2000.0, JOB,
         "more ranks share the link or the CPUs than in `hpml bench`", None),
        ({**SMALL, "peaks": Peaks(allreduce={"node": [LINK]})}, 1000.0, JOB, "needs `hpml", None),
    ],
    ids=["not reported", "as predicted", "images", "changed", "two words", "slower", "faster",
         "large enough", "no bench", "fewer ranks", "other link"],
)  # fmt: skip
def test_buckets_follow_from_latency_and_bandwidth(
    known: dict[str, Any], comm: float, job: Any, line: str | None, change: tuple[str, Any] | None
) -> None:
    """P L / G / 0.1 are 4 MiB: 5 buckets save 0.57 s; only where the model describes the run."""
    peaks = Peaks(allreduce={"nodes": [LINK]}, origin="bench")
    found = diagnose(
        replace(facts(job=job, ranks=ranks(comm_seconds=comm)), **{"peaks": peaks, **known})
    )
    shown = " ".join(str(Report(found)).split())
    assert (line is not None) == ("averaging " in shown)
    assert (line or "") in shown
    assert ("## Averaging of gradients" in Report(found).markdown()) == (line is not None)
    assert (Report(found).to_dict()["averaging"] is not None) == (line is not None)
    changes = found.findings[0].changes
    first, *_ = changes
    assert ("enlarge DDP's buckets to 4 MiB" in first.text) == (change is not None)
    if change:
        assert (first.field, first.value) == change
        assert "5 buckets instead of 100 save about 570 ms of 1 s per step" in first.text
        assert "the ring's model is 11% off this run and 12% off the bench" in first.text
    measured = bool(known) and line is not None and "needs" not in line
    assert any("bucket_cap_mb`)" in one.text for one in changes) != measured


def test_a_run_that_ended_early_is_not_asked_for_the_channel() -> None:
    """It had no time to report anything; its reason is the verdict."""
    early = {"ranks": (), "channel": False, "phases": {"launch": 1.0}, "elapsed_seconds": 1.0}
    for state in ("COMPLETED", "FAILED", "RUNNING"):
        given = replace(facts(**early), state=state, reason="rank 0 exited with code 1")
        given = replace(given, over=state != "RUNNING")
        found = diagnose(given)
        longer = "a run that gets to its steps" if state == "FAILED" else "a longer run"
        assert f"{longer}: this one" in str(Report(found))
        assert "the channel" not in str(Report(found))
        assert ("rank 0 exited with code 1" in found.headline) == (state == "FAILED")


STAGED = {"stage": [STAGE]}
IN_RAM = {"stage": [{**STAGE, "target": "shm"}]}
COPIED = [StageFacts("d", "/data", "local", 30.0, 10 * GIB, 100.0)]
ALSO = {"args.0": "--data={stage.data}"}
BUSY = [node(0, mean_cpus=7.9), node(1, mean_cpus=7.9)]
UNKNOWN_SIZE = replace(DATA, size_bytes=None)
LARGE = {"stages": COPIED, "node_memory_bytes": 65 * GIB}
CPUS = {"resources.cpus_per_rank": 6}
CACHED = [node(n, read_bytes=0.0, syscall_read_bytes=3500 * 600e6) for n in (0, 1)]


def waiting_ranks(cpu_seconds: float, helper_cpu_seconds: float) -> list[RankFacts]:
    """Four ranks that wait 2,700 of 3,130 s for data, with these CPU times."""
    own = {"cpu_seconds": cpu_seconds, "helper_cpu_seconds": helper_cpu_seconds}
    return ranks(data_wait_seconds=2700.0, wait_seconds=0.0, comm_seconds=0.0, **own)


PREPARE = Change("prepare the data once, before the job")
ASLEEP = waiting_ranks(500.0, 200.0)
DECODING = waiting_ranks(3400.0, 3100.0)  # one worker is always busy
OWN_DECODING = waiting_ranks(3000.0, 0.0)
# other processes had the CPU for most of the time in which it would have decoded
CROWDED = [replace(one, cpu_wait_seconds=2100.0) for one in waiting_ranks(900.0, 0.0)]


def staged(target: str) -> Change:
    """The change that brings the data there."""
    return Change("", "stage", [{**SOURCE, "target": target}], also=ALSO)


@pytest.mark.parametrize(
    ("job", "known", "first"),
    [
        ({}, {}, staged("shm")),
        ({}, {"data": replace(DATA, size_bytes=200 * GIB)}, staged("local")),
        ({}, {"data": UNKNOWN_SIZE}, staged("auto")),
        ({}, {"node_memory_bytes": None}, staged("auto")),
        ({}, {"data": None}, Change("")),
        (STAGED, {"stages": COPIED}, Change("", "stage.0.target", "shm")),
        (STAGED, LARGE, Change("", "args.2", "3")),
        # what is in RAM needs no other storage: decoding is what is left
        (IN_RAM, {}, PREPARE),
        (IN_RAM, {"ranks": ASLEEP}, Change("", "args.2", "3")),
        (IN_RAM | {"args": []}, {"ranks": ASLEEP}, Change("")),
        (
            IN_RAM | {"args": ["--num_workers=4"]},
            {"ranks": ASLEEP},
            Change("", "args.0", "--num_workers=8"),
        ),
        # more workers need CPUs, which a node of two ranks has, has in part, or has not
        (IN_RAM, {"ranks": ASLEEP, "nodes": []}, Change("", "args.2", "3")),
        (STAGED, {**LARGE, "nodes": []}, Change("", "args.2", "3", also=CPUS)),
        (
            IN_RAM,
            {"ranks": ASLEEP, "nodes": BUSY, "node_cpus": 11},
            Change("", "args.2", "3", also={"resources.cpus_per_rank": 5}),
        ),
        (IN_RAM, {"ranks": ASLEEP, "nodes": BUSY, "node_cpus": 8}, Change("")),
        (STAGED, {**LARGE, "nodes": [], "node_cpus": None}, Change("")),
        (IN_RAM, {"nodes": BUSY}, PREPARE),
        # a loader that burns CPU needs less work, wherever the data are
        ({}, {"ranks": DECODING}, PREPARE),
        ({}, {"ranks": DECODING, "nodes": []}, PREPARE),
        ({"args": ["--workers=0"]}, {"ranks": OWN_DECODING, "nodes": []}, PREPARE),
        ({"args": ["--workers=0"]}, {"ranks": CROWDED, "nodes": []}, PREPARE),
        ({}, {"nodes": CACHED}, PREPARE),
        ({}, {"nodes": CACHED, "ranks": ASLEEP}, Change("", "args.2", "3")),
        ({}, {"ranks": ASLEEP, "nodes": []}, staged("shm")),
    ],
)
def test_what_helps_against_waiting_for_data(
    job: dict[str, Any], known: dict[str, Any], first: Change
) -> None:
    """The first change fits the job and its nodes: staged data, loader workers, CPUs."""
    waiting = facts(**{"ranks": ranks(data_wait_seconds=900.0), "job": {**JOB, **job}, **known})
    (found,) = (one for one in diagnose(waiting).findings if one.kind == "waits-for-data")
    change, *others = found.changes
    assert first.text in change.text
    if first.text:  # then nothing is applied
        assert not any(one.field for one in others)
    assert (change.field, dict(change.also)) == (first.field, dict(first.also))
    assert first.value is None or change.value == first.value


@pytest.mark.parametrize(
    ("read", "known", "stages", "gains"),
    [
        (390e6, {}, True, True),  # at the rate that `hpml bench` measured
        (50e6, {}, True, False),  # below it: the latency may be the reason, or the loader
        (390e6, {"peaks": None}, True, False),
        (0.0, {}, False, True),  # from the page cache
        (100e3, {}, False, True),  # the program itself
        (50e6, {"syscall_read_bytes": 600e6}, False, True),
        (50e6, {"mean_cpus": 7.9}, False, True),  # the CPUs are the limit
        (None, {}, True, False),
    ],
)
def test_staging_is_proposed_for_slow_storage(
    read: float | None, known: dict[str, Any], stages: bool, gains: bool
) -> None:
    """Not at all if figures show that storage is fast; with a gain only if they show it is slow."""
    figures = {"mean_cpus": 6.0, "syscall_read_bytes": None, **known}
    peaks = {"peaks": figures.pop("peaks")} if "peaks" in figures else {}
    if figures["syscall_read_bytes"]:
        figures["syscall_read_bytes"] *= 3500
    nodes = [node(n, read_bytes=None if read is None else 3500 * read, **figures) for n in (0, 1)]
    (found,) = diagnose(facts(ranks=ranks(data_wait_seconds=900.0), nodes=nodes, **peaks)).findings
    assert any(change.field == "stage" for change in found.changes) == stages
    assert (found.gain is not None) == gains
    assert any(line.startswith("unknown: whether storage is slow") for line in found.evidence) == (
        not gains
    )
    assert found.gain_hours == pytest.approx(4 * 0.3 * 3000 / 3600)  # that the waiting costs
    if gains:
        assert (
            "at most 25% of the run's time, if no step waited for data"
            in Report(
                diagnose(facts(ranks=ranks(data_wait_seconds=900.0), nodes=nodes, **peaks))
            ).markdown()
        )


FULL, _ = FAULTS["memory"]
BUSY_CPUS, _ = FAULTS["busy CPUs, idle GPUs"]
SHM = StageFacts("d", "/data", "shm", 30.0, 20 * GIB)


@pytest.mark.parametrize(
    ("run", "known", "field", "value"),
    [
        (FULL, {}, "resources.memory", "84G"),
        (FULL, {"node_memory_bytes": 70.5 * GIB}, "resources.memory", "70G"),
        (FULL, {"stages": [SHM]}, "resources.memory", "64G"),
        (FULL, {"node_memory_bytes": 64 * GIB}, "", None),
        (FULL, {"node_memory_bytes": None}, "", None),
        (replace(facts(nodes=[]), state="OUT_OF_MEMORY"), {}, "resources.memory", "84G"),
        (replace(facts(nodes=[]), state="OUT_OF_MEMORY"), {"memory_bytes": None}, "", None),
        (BUSY_CPUS, {}, "resources.cpus_per_rank", 8),
        (BUSY_CPUS, {"node_cpus": 12}, "resources.cpus_per_rank", 6),
        (BUSY_CPUS, {"node_cpus": 8}, "", None),
        (BUSY_CPUS, {"node_cpus": None}, "", None),
    ],
)
def test_a_change_asks_for_no_more_than_a_node_has(
    run: Facts, known: dict[str, Any], field: str, value: Any
) -> None:
    """If the size of the nodes is not known, it names no number, which could be refused."""
    (found, *_) = diagnose(replace(run, **known)).findings
    assert (found.changes[0].field, found.changes[0].value) == (field, value)
    if not field:
        assert not re.search(r"\d", found.changes[0].text)
        assert not any(change.field for change in found.changes)


def test_right_sized_cpus_keep_those_of_loader_workers() -> None:
    """`hpml check` would warn of fewer cores than ranks and workers."""
    idle = [node(0, mean_cpus=0.5), node(1, mean_cpus=0.5)]
    for workers, cpus in ((0, 1), (2, 3)):
        job = {**JOB, "binding": {"policy": "gpu-local", "loader_workers": workers}}
        (found,) = diagnose(facts(nodes=idle, job=job)).findings
        assert found.changes[0].value == cpus


@pytest.mark.parametrize(
    ("job", "known", "step"),
    [
        ({}, {}, "hpml report digits-1 --apply tuned.yaml, or --try"),
        ({"args": []}, {"data": None}, ""),  # advice alone
        (STAGED | {"args": []}, {"stages": COPIED}, "--apply tuned.yaml, or --try"),
        ({"environment": {"variables": {"SUBMITIT_EXECUTOR": "x"}}}, {}, ""),
        ({"checkpoint": {"enabled": True, "directory": "/mine"}}, {}, "--apply tuned.yaml"),
        ({"checkpoint": {"enabled": True, "directory": "/{run.id}"}}, {}, "tuned.yaml, or --try"),
        ({"checkpoint": {"enabled": True, "directory": "own"}}, {}, "tuned.yaml, or --try"),
        ({"checkpoint": {"enabled": False, "directory": "/mine"}}, {}, "tuned.yaml, or --try"),
    ],
)
def test_the_next_step_is_one_that_works(
    job: dict[str, Any], known: dict[str, Any], step: str
) -> None:
    """Only if a change of the job file can be made; tried only if runs share no checkpoints."""
    waiting = facts(ranks=ranks(data_wait_seconds=900.0), job={**JOB, **job}, **known)
    lines = [
        line for line in str(Report(diagnose(waiting))).splitlines() if line.startswith("next ")
    ]
    assert [line.endswith(step) for line in lines] == [True] * bool(step)


@pytest.mark.parametrize(
    ("measured", "slowest", "needs"),
    [
        (0.0, 0.0, "a longer run, or the newest `hpml_waits.py`: no step was measured"),
        (5.0, 5.0, "a longer run: 5 measured steps, at least 6 are needed"),
        (6.0, 6.0, ""),
        (20.0, 10.0, "a longer run: rank 1 waited least in 10 of 20 measured steps, which can "),
        (400.0, 170.0, ""),
        (40_000.0, 10_100.0, "a longer run: rank 1 waited least in 10100 of 40000 measured steps"),
    ],
)
def test_a_rank_is_accused_only_if_it_is_not_chance(
    measured: float, slowest: float, needs: str
) -> None:
    """Four ranks, of which the others wait 30 % of a step for one: by few steps, or by many."""
    found = diagnose(facts(ranks=slow(measured_steps=measured, slowest_steps=slowest)))
    assert [one.kind for one in found.findings] == ["slow-rank"] * (not needs)
    told = [one.needs for one in found.unknown if one.kind == "slow-rank"]
    assert len(told) == bool(needs)
    assert "".join(told).startswith(needs)
    assert not needs or not any("ranks differ" in line for line in found.healthy)


@pytest.mark.parametrize("steps", [5, 11, 26, 100])
def test_equal_ranks_are_accused_in_one_of_a_thousand_runs(steps: int) -> None:
    """Two ranks, each the slowest by the toss of a coin, whatever waits were measured of it."""
    accused = 0
    for first in range(steps + 1):
        lucky = int(first > steps - first)
        both = [
            rank(
                n,
                wait_seconds=900.0 * (n == lucky),
                measured_steps=float(steps),
                slowest_steps=float((first, steps - first)[n]),
            )
            for n in (0, 1)
        ]
        found = diagnose(facts(ranks=both, world_size=2)).findings
        accused += math.comb(steps, first) * bool(found)
    assert accused <= 0.001 * 2**steps


def test_nodes_are_excluded_beside_those_that_were() -> None:
    """Other options stay, and hosts that were excluded stay so."""
    (found,) = diagnose(FAULTS["XID of the hardware"][0]).findings
    assert found.changes[0].field == "resources.extra"
    assert found.changes[0].value == ["--reservation=course", "--exclude=n7,n0"]


def test_unknown_says_what_would_tell() -> None:
    """A run without channel and monitor has one unknown for each, and no accusation."""
    bare = facts(ranks=[], nodes=[], channel=False, monitored=False, peaks=None)
    found = diagnose(bare)
    assert found.findings == ()
    assert [(one.kind, one.needs) for one in found.unknown] == [
        ("waits-for-data", "the channel in the training (`hpml_channel.py`)"),
        ("gpu-unused", "`monitor: true`"),
    ]
    assert found.headline == "not enough data to say what holds it back"
    part = diagnose(facts(channel=False, peaks=None))  # monitored, but the waits are unknown
    assert part.healthy
    assert part.headline.startswith("not enough data to say what holds it back; as far as the mon")
    assert "Nothing holds this run back" not in Report(part).html()


@pytest.mark.parametrize("name", FAULTS)
def test_the_text_fits_a_terminal(name: str) -> None:
    """At most 40 lines of 100 columns, and the Markdown and JSON have every finding."""
    found = diagnose(FAULTS[name][0])
    lines = str(Report(found)).splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 100
    assert lines[0].startswith("run       digits-1  ")
    for one in found.findings:
        assert one.verdict in Report(found).markdown()
    assert json.loads(json.dumps(Report(found).to_dict()))["headline"] == found.headline


@pytest.mark.parametrize("length", range(1, 80, 6))
def test_no_change_is_cut(length: int) -> None:
    """It is wrapped between words, wherever the line ends: its paths and options stay whole."""
    source = "/data/" + "a-b/" * (length // 4) + "c" * (length % 4)
    data = replace(DATA, entry={**SOURCE, "source": source})
    printed = str(Report(diagnose(facts(ranks=ranks(data_wait_seconds=900.0), data=data))))
    assert max(map(len, printed.splitlines())) <= 100
    change = f"`stage: [{{name: data, source: {source}, target: shm}}]`"
    assert change in " ".join(printed.split())


def test_no_more_than_three_are_printed_in_full() -> None:
    """The others are in one line, by their verdicts."""
    many = facts(
        ranks=ranks(
            data_wait_seconds=900.0,
            comm_seconds=800.0,
            save_seconds=700.0,
            evaluation_seconds=1500.0,
            transfer_seconds=700.0,
        ),
        limit_seconds=1e6,
    )
    lines = str(Report(diagnose(many))).splitlines()
    assert len(diagnose(many).findings) == 6
    assert [line[0] for line in lines if re.match(r"\d  ", line)] == ["1", "2", "3"]
    assert any(line.startswith("also ") for line in lines)
    assert len(lines) <= 40


def test_the_page_has_the_thresholds() -> None:
    """docs/reports.md has a row for each kind, with its limits and their source."""
    rows = [
        f"| `{kind}` | {one.figure} | {one.text(one.warn)} | "
        f"{'—' if one.critical is None else one.text(one.critical)} | {one.source} |"
        for kind, one in THRESHOLDS.items()
    ]
    page = DOCS.read_text("utf-8")
    assert [line for line in page.splitlines() if line.startswith("| `") and line in rows] == rows


def test_ranks_that_share_a_gpu_are_told_to_have_one_each() -> None:
    """As a job with two ranks and one GPU was, which NCCL ended."""
    shared = {"bound_as_planned": False, "binding_faults": ["shares GPU 0000:00:06.0 with rank 1"]}
    first = diagnose(facts(ranks=ranks(**shared))).findings[0]
    assert "share a GPU" in first.verdict
    assert "fewer `ranks_per_node` or more `gpus`" in first.changes[0].text
