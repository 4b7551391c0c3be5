"""A strong and a weak sweep of the digits job on this machine, to a report that adds up."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.sweepchecks import BASE, SWEEPS, check_report
from tests.unit.local_runs import Desk
from tests.unit.training_runs import JOBS, TRAINS

REPEATS = 6 if os.environ.get("HPML_LONG") else 2


@TRAINS
# The other mode of each scheduler is part of make test-long.
@pytest.mark.parametrize("mode", ["strong", pytest.param("weak", marks=pytest.mark.slow)])
def test_a_sweep_of_the_digits_ends_in_a_true_report(mode: str, few: Path, tmp_path: Path) -> None:
    """1, 2 and 4 ranks; on two cores, four are marked, and two runs give no 95 % interval."""
    for file in (*JOBS.glob("*.py"), JOBS / "digits.yaml"):
        shutil.copy(file, tmp_path)
    shutil.copytree(few, tmp_path / "digits")
    sweep = SWEEPS[mode] | {"repeats": REPEATS, "budget": {"parallel": 2}}
    sweep["set"] = BASE | {"environment.python": sys.executable}
    (tmp_path / "sweep.yaml").write_text(json.dumps(sweep))
    desk = Desk(tmp_path)

    report = desk.json("sweep", "run", "sweep.yaml", "--local")

    check_report(report, tmp_path / "records", mode, REPEATS)
    cores = len(os.sched_getaffinity(0))
    assert [s["oversubscribed"] for s in report["settings"]] == [
        REPEATS * (ranks > cores) for ranks in (1, 2, 4)
    ]
    status = desk.json("sweep", "status", "last")
    assert status["finished"]
    assert (tmp_path / "records/sweeps" / report["id"] / "report.html").stat().st_size > 10_000
