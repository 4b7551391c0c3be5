"""`make demo`, the first of the README's two commands."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.unit.local_runs import Desk

ROOT = Path(__file__).parents[2]


@pytest.mark.alone  # it trains on all cores
def test_the_demo_trains_and_prints_its_report(tmp_path: Path) -> None:
    """A real model is trained through the local backend, and the run is on record."""
    if shutil.which("make") is None or not (ROOT / ".venv" / ".train").exists():
        pytest.skip("NO DEMO: it is run by make, with the environment that make has made")
    done = subprocess.run(
        ["make", "-C", ROOT, "-o", ".venv/.train", "demo", f"DEMO={tmp_path}/demo"],
        env={**os.environ, "HPML_HOME": str(tmp_path / "records")},  # not the developer's own
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\naccuracy " in done.stdout
    assert (
        done.stdout.count("next:\n  .venv/bin/hpml report last ") == done.stdout.count("next:") == 1
    )
    (run,) = Desk(tmp_path).json("list")
    assert run["state"] == "COMPLETED"
