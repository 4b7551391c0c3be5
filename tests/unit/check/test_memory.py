"""Memory advice from figures of short runs, and what `hpml check` says by the last run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpml_orchestrator.check.memory import Advice, advise, check_memory, extension_notes, needs_of
from hpml_orchestrator.check.memory_run import Measured
from hpml_orchestrator.records.files import write_json
from hpml_orchestrator.records.job import Job
from hpml_orchestrator.records.store import Store


def job_of(tmp_path: Path, **fields: Any) -> Job:
    return Job.from_json({"name": "a", "workdir": str(tmp_path), **fields})


FIGURES = {
    "weights": 4e9, "gradients": 4e9, "optimizer": 8e9, "activations": 10e9, "layers": 16,
    "peak_bytes": 30e9, "file_bytes": 1e9, "before_bytes": 6e9, "batch_bytes": 1e6, "ahead": 4,
    "pins": True,
}  # fmt: skip


def advice_of(job: Job, **given: Any) -> Advice:
    half = {**FIGURES, "activations": 5e9, "peak_bytes": 24e9, "batch_bytes": 5e5}
    host, device = needs_of(Measured({8: half, 16: FIGURES}, {8: 0.0, 16: 5e8}, 1.0), job)
    return advise(job, how="measured", batch=16, host=host, device=device, **given)


def test_host_and_device_of_a_job_with_gpus(tmp_path: Path) -> None:
    """Measured on a CPU, model and activations are on the device, the rest on the host."""
    (tmp_path / "train.py").touch()
    fields = {"script": str(tmp_path / "train.py"), "resources": {"gpus": "a100:1", "memory": "8G"}}
    advice = advice_of(job_of(tmp_path, **fields), device_memory=(40e9, "a100"))
    assert advice.host is not None
    # 6 GB before the first step without 1 GB of libraries and 4 GB of weights, CUDA, four batches
    assert advice.host.per_rank(16) == pytest.approx(1e9 + 2 * 1024**3 + 4e6 + 5e8)
    assert advice.options[0].need == pytest.approx(28e9)  # 16 GB of states, 10 + 2 GB
    assert (advice.fits, advice.replicas, advice.largest_batch) == (True, 1, 26)
    small = advice_of(job_of(tmp_path, **fields), device_memory=(24e9, "a10"))
    assert small.fits is False
    assert small.way is not None
    assert small.way.name == "gradient accumulation (micro-batch 1)"
    assert advice_of(job_of(tmp_path, **fields)).device_fits is None


@pytest.mark.parametrize(
    ("peaks", "batch", "noted"),
    [
        ((30e9, 30e9), 32, True),
        ((30e9, 30e9), 16, False),  # it ran at that batch
        ((24e9, 30e9), 32, False),
        ((30e9, 30e9), None, False),
    ],
)
def test_memory_that_does_not_grow_yet(
    peaks: tuple[float, float], batch: int | None, noted: bool, tmp_path: Path
) -> None:
    """Beyond the batches that ran, activations that their peak hides are named."""
    (tmp_path / "train.py").touch()
    job = job_of(tmp_path, script=str(tmp_path / "train.py"))
    half = {**FIGURES, "activations": 5e9, "peak_bytes": peaks[0]}
    found = Measured({8: half, 16: {**FIGURES, "peak_bytes": peaks[1]}}, {8: 0.0, 16: 0.0}, 1.0)
    notes = [*extension_notes(found, *needs_of(found, job), batch)]
    assert ["9.3 GiB more than listed at batch 32" in note for note in notes] == [True] * noted


def test_host_of_a_job_without_gpus(tmp_path: Path) -> None:
    """All of a process counts once per rank, libraries once per node; the batch is made smaller."""
    (tmp_path / "train.py").touch()
    fields: dict[str, Any] = {"script": str(tmp_path / "train.py")}
    advice = advice_of(job_of(tmp_path, **fields, resources={"ranks_per_node": 2, "memory": "50G"}))
    assert advice.host_bytes == pytest.approx(2 * (1.03 * 30e9 - 1e9 + 5e8) + 1e9)
    assert (advice.fits, advice.device_fits, advice.largest_batch) == (False, None, 11)
    assert advice.way is not None
    assert advice.way.name.startswith("gradient accumulation")
    assert advice_of(job_of(tmp_path, **fields, resources={"memory": "64G"})).fits is True


@pytest.mark.parametrize(
    ("state", "peak", "now", "expected"),
    [
        ("OUT_OF_MEMORY", 0, {}, ["memory.last_run"]),
        ("OUT_OF_MEMORY", 0, {"memory": "16G"}, []),
        ("OUT_OF_MEMORY", 0, {"ranks_per_node": 4}, []),
        ("FAILED", 0, {}, []),
        ("COMPLETED", 0.98, {}, ["memory.last_run"]),
        ("COMPLETED", 0.9, {}, []),
        ("COMPLETED", 0.9, {"memory": "6G"}, ["memory.last_run"]),
        ("COMPLETED", 0.98, {"memory": "16G"}, []),
    ],
)
def test_check_warns_by_the_last_run(
    state: str, peak: float, now: dict[str, Any], expected: list[str], tmp_path: Path
) -> None:
    """It was killed for memory, or used what is asked for now, with the same arguments."""
    store = Store(tmp_path / "records")
    (tmp_path / "train.py").touch()

    def job(**more: Any) -> Job:
        resources = {"memory": "8G", **more.pop("resources", {})}
        return job_of(tmp_path, script=str(tmp_path / "train.py"), resources=resources, **more)

    sid = "a-20260102-030405-abcdef"
    record = {
        "name": "a",
        "created": 1767322984,
        "job": job().to_json(),
        "backend": "slurm",
    }
    store.prepare(sid, script="", shared={}, submit=record, runs={0: {}})
    attempt = store.runs_dir / sid / "attempts" / "1"
    (attempt / "nodes").mkdir(parents=True)
    write_json(attempt / "ended.json", {"exit_code": 137, "state": state, "reason": "", "time": 1})
    used = {"memory_peak_bytes": peak * 8 * 1024**3}
    write_json(attempt / "nodes" / "n1.monitor.json", {"seconds": 900, "job": used})
    found = check_memory(job(resources=now), store)
    assert [finding.code for finding in found] == expected
    assert check_memory(job(args=["--batch-size=8"]), store) == []
    assert check_memory(job(name="a-20260102"), store) == []
    if expected:
        assert sid in found[0].message
