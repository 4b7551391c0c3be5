"""What the scripts of all launchers have in common, and what mpirun and horovodrun need."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from hpml_orchestrator.script import render
from hpml_orchestrator.spec.site import ResolvedSite, Site
from tests.unit.script.support import HERE, LAUNCHERS, job


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_no_step_has_a_number_of_cpus_per_task(launcher: str) -> None:
    """With --cpus-per-task a step has one task's CPUs, and neither agent nor rank can have more."""
    script = render(job(launcher=launcher, resources={"gpus": 4, "cpus_per_rank": 8}), HERE)
    commands = [line for line in script.split("\n") if not line.startswith("#")]
    assert not any("--cpus-per-task" in line for line in commands)
    assert "unset -v SRUN_CPUS_PER_TASK SLURM_TRES_PER_TASK" in commands


@pytest.mark.parametrize(
    ("finish", "ends"), [("echo 79", 79), ("echo 7; exit 0", 7), ("exit 1", 3), ("kill -9 $$", 3)]
)
def test_what_ended_the_job_is_its_exit_status(tmp_path: Path, finish: str, ends: int) -> None:
    """The status that `finish`, a fake here, prints replaces the script's own."""
    pattern = r"^hpml_agent='' .*?^trap 'hpml_terminate TERM'"
    block = re.search(pattern, render(job(), HERE), re.MULTILINE | re.DOTALL)
    assert block is not None
    fake = tmp_path / "fake"
    fake.write_text(f"#!/bin/sh\n{finish}\n")
    fake.chmod(0o755)
    begin = f"set -euo pipefail; hpml_python=({fake}) hpml_attempt={tmp_path}\n"
    code = f"{begin}{block[0]} TERM\nexit 3\n"
    done = subprocess.run(["bash", "-c", code], check=False, timeout=120)
    assert done.returncode == ends


def test_mpirun_uses_the_sites_interfaces() -> None:
    """Open MPI's own variables name them, unless the job's do."""
    site = ResolvedSite(Site(interfaces=["ib0", "ib1"]))
    script = render(job(launcher="mpirun"), HERE, site)
    for name in ("OMPI_MCA_btl_tcp", "OMPI_MCA_oob_tcp", "PRTE_MCA_prte"):
        assert f'{name}_if_include="${{{name}_if_include:-ib0,ib1}}"' in script
    assert "OMPI_MCA" not in render(job(launcher="srun"), HERE, site)


@pytest.mark.parametrize(
    ("launcher", "message"),
    [("mpirun", "no mpirun of Open MPI on PATH"), ("horovodrun", "no horovodrun on PATH")],
)
def test_a_launcher_that_is_not_there_ends_the_job(launcher: str, message: str) -> None:
    """The lines before the launch say so, with status 78."""
    script = render(job(launcher=launcher), HERE)
    (fail,) = re.findall(r"^hpml_fail\(\) \{(?:.*\n)+?\}$", script, re.MULTILINE)
    (line,) = re.findall(rf"^(?:hpml_version=.*\n)?.*{message}.*$", script, re.MULTILINE)
    done = subprocess.run(
        ["/bin/bash", "-euo", "pipefail", "-c", f"{fail}\n{line}"],
        env={"PATH": "/nowhere"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (done.returncode, message in done.stderr) == (78, True)
