"""A training without the channel: the report says what its monitor saw, and accuses nobody."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hpml_orchestrator.diagnosis.diagnose import diagnose
from hpml_orchestrator.diagnosis.model import Facts, GpuFacts, NodeFacts, Peaks
from hpml_orchestrator.diagnosis.report import Report
from tests.unit.diagnosis.jobs import complete

MIB = float(1 << 20)


def silent(
    busy: float,
    *gpus: float,
    cpus: float = 2.0,
    storage: float | None = 0.0,
    in_all: float | None = None,
    seconds: float = 300.0,
    **more: Any,
) -> Facts:
    """A monitored run of one rank that reported nothing: CPUs busy, GPUs busy, bytes per second."""
    node = NodeFacts(
        "n0",
        seconds=seconds,
        cpus=cpus,
        mean_cpus=busy,
        read_bytes=None if storage is None else storage * seconds,
        syscall_read_bytes=None if in_all is None else in_all * seconds,
        gpus=[GpuFacts(f"GPU-{n}", utilization_ratio=gpu) for n, gpu in enumerate(gpus)],
    )
    given: dict[str, Any] = {
        "job": complete(command=["python", "train.py"]),
        "phases": {"launch": 1.0, "running": seconds},
        "elapsed_seconds": seconds,
        "node_count": 1,
        "core_count": int(cpus),
        "gpu_count": len(gpus),
        "world_size": 1,
        "monitored": True,
        "on_slurm": True,
        "nodes": [node],
    }
    return Facts("digits-1", "COMPLETED", over=True, **{**given, **more})


FAST = Peaks(shared_read=400 * MIB, origin="measured")


@pytest.mark.parametrize(
    ("known", "says"),
    [
        (silent(1.94), ("it computes, or decodes data: 97% of 2 CPUs busy",)),
        # one thread computes all the time: that most CPUs are idle is no waiting
        (silent(1.0, cpus=8.0), ("computes, or decodes data, in few threads", "12% of 8 CPUs")),
        (silent(0.24), ("waits for most of the time: 12% of 2 CPUs busy; hardly for storage",)),
        (silent(1.4, world_size=2), ("waits for a part of the time: 70% of 2 CPUs",)),
        (
            silent(0.24, storage=2 * MIB, in_all=80 * MIB),
            ("a network file system that", "2.0 MiB/s from storage, of 80.0 MiB/s that"),
        ),
        (silent(0.24, storage=40 * MIB), ("perhaps for storage", "40.0 MiB/s from storage")),
        (
            silent(0.24, storage=380 * MIB, peaks=FAST),
            ("; for storage: ", "380.0 MiB/s from storage (400.0 MiB/s are possible)"),
        ),
        (silent(0.24, storage=None), ("most of the time: 12% of 2 CPUs busy",)),
        (silent(0.24, on_slurm=False), ("it waits, or others have its CPUs, for most of",)),
        (silent(0.04, cpus=1.0), ("most of the time: 4% of 1 CPU busy",)),
        (silent(0.5, 0.9), ("it computes on the GPUs", "the GPUs 90% of the time")),
        (silent(1.85, 0.2), ("the GPUs may wait for the CPUs", "92% of 2 CPUs")),
        (silent(1.0, 0.2, cpus=8.0), ("the GPUs may wait for one thread of a rank",)),
        (silent(0.2, 0.1), ("waits for most of the time", "the GPUs 10% of the time")),
        (silent(0.2, 0.0), ("waits for most of the time", "the GPUs 0% of the time")),
    ],
)
def test_the_note_says_what_the_monitor_saw(known: Facts, says: tuple[str, ...]) -> None:
    """And no more: the channel stays what would tell the rest."""
    found = diagnose(known)
    printed = " ".join(str(Report(found)).split())
    note = printed.partition(" note ")[2].partition(" unknown ")[0]
    assert all(words in note for words in says), note
    assert "needs the channel in the training (`hpml_channel.py`); the note says what" in printed
    assert "## Notes" in Report(found).markdown()
    assert {one.kind for one in found.findings} <= {"slow-storage", "gpu-unused"}
    if not found.findings:
        seen = found.notes[0].verdict.partition(":")[0]
        assert found.headline.endswith(f"; as far as the monitor shows, {seen}")


@pytest.mark.parametrize(
    "known",
    [
        silent(0.2, channel=True),
        silent(0.2, seconds=40.0),
        silent(0.2, phases={"staging": 200.0, "running": 100.0}),  # the figures are of both
        silent(0.2, gpu_count=1),  # what the GPU does is unknown
        silent(2.0, 0.2),  # `cpu-bound` says it
        silent(0.2, nodes=()),
    ],
)
def test_without_figures_there_is_no_note(known: Facts) -> None:
    """Nor one that says again what a finding does."""
    assert diagnose(known).notes == ()
    assert "the note" not in str(Report(diagnose(known)))


@pytest.mark.parametrize(("seconds", "needs"), [(3.0, "a run that gets"), (300.0, "the channel")])
def test_a_failed_run_needs_no_longer_one(seconds: float, needs: str) -> None:
    """It has to get to its steps; after minutes it has, but did not report them."""
    failed = replace(silent(1.9, seconds=seconds), state="FAILED", reason="exit code 1")
    (words,) = (one.needs for one in diagnose(failed).unknown if one.kind == "waits-for-data")
    assert words.startswith(needs)
