"""What scripts and their launchers need."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from hpml_orchestrator.errors import RecordError
from hpml_orchestrator.script.render import render
from hpml_orchestrator.site.model import ResolvedSite, Site
from tests.unit.script.support import HERE, job

if TYPE_CHECKING:
    from tests.unit.script.conftest import Sandbox


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
def test_a_launcher_that_is_not_there_ends_the_job(
    sandbox: Sandbox, launcher: str, message: str
) -> None:
    """Before any rank starts, with status 78."""
    missing = "/usr/bin/env bash -c 'exit 127' mpirun"
    (sandbox.bin / "mpirun").write_text(f"#!/bin/sh\n{missing}\n")
    (sandbox.bin / "mpirun").chmod(0o755)
    done = sandbox.start(job(launcher=launcher, workdir="/"))
    assert (done.returncode, message in done.stderr.decode()) == (78, True)


@pytest.mark.parametrize("name", ["hpml-node.pyz", "hpml-job.sh", "agent.json"])
def test_a_script_needs_its_files(sandbox: Sandbox, name: str) -> None:
    """Without one of them the job ends at once, and the error names it."""
    done = sandbox.start(job(workdir="/"), without=name)
    error = done.stderr.decode()
    assert error.count("hpml: ") == 1
    assert (done.returncode, name in error, "'hpml render -o DIR'" in error) == (78, True, True)
    assert not (sandbox.submission / "runs").exists()


@pytest.mark.parametrize("text", ["{", "[]", '{"job": 7}', '{"job": {"name": "a", "array": "x"}}'])
def test_a_damaged_agent_json_ends_the_job(sandbox: Sandbox, text: str) -> None:
    """Before an attempt is claimed, with a line that names the file and what to do."""
    done = sandbox.start(job(workdir="/"), agent=text)
    (line,) = done.stderr.decode().splitlines()
    assert done.returncode == RecordError.exit_code
    assert f"{sandbox.submission}/agent.json cannot be read" in line
    assert line.endswith("'hpml render -o DIR'")
    assert not (sandbox.submission / "runs").exists()
