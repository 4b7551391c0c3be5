"""A strong and a weak sweep of the digits job on Slurm, to a report that adds up."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.cluster.hpml_on_slurm import PYTHON, ROOT, Desk
from tests.sweepchecks import BASE, SWEEPS, check_report
from tests.sweeprecords import attempts_of

REPEATS = 6 if os.environ.get("HPML_LONG") else 2


# `make test` sweeps the digits on this machine, and smaller jobs on Slurm.
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["strong", "weak"])
def test_a_sweep_of_the_digits_ends_in_a_true_report(mode: str, desk: Desk, tmp_path: Path) -> None:
    """1, 2 and 4 ranks; one array per scale and repeat; Slurm has each task once."""
    jobs = ROOT / "training_jobs"
    for file in (*jobs.glob("*.py"), jobs / "digits.yaml"):
        shutil.copy(file, tmp_path)
    desk.call(PYTHON, "make_digits.py", "digits")
    sweep = SWEEPS[mode] | {"repeats": REPEATS, "budget": {"submits_per_minute": 600}}
    sweep["set"] = BASE | {"environment.python": str(PYTHON), "resources.memory": "1G"}
    (tmp_path / "sweep.yaml").write_text(json.dumps(sweep))

    desk.seconds = 800
    report = desk.json("sweep", "run", "sweep.yaml")

    check_report(report, desk.records, mode, REPEATS)
    tasks = [run.name for _, run in attempts_of(desk.records, report["id"])]
    assert len(tasks) == len(set(tasks)) == 3 * REPEATS
    for attempt in report["attempts"]:
        assert attempt["row"]["verified"] is not None
        state = desk.slurm("sacct", "-XnP", "-o", "State", "-j", attempt["row"]["job_id"])
        assert state.split() == ["COMPLETED"]


def test_a_scale_beyond_the_partition_is_refused_before_anything_starts(desk: Desk) -> None:
    """The error names the scale; no sweep is written, no job submitted."""
    job = desk.job("big", command=["true"], args=["--batch-size=8"])

    refused = desk.hpml("sweep", "run", job, "--weak", "nodes=1,9", code=2)

    assert "resources.nodes" in refused.stderr
    assert "at nodes = 9" in refused.stderr
    assert not (desk.records / "sweeps").exists()
    assert not (desk.records / "submissions").exists()
