"""Which variables of the submitting process go with a job."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from hpml_orchestrator.scheduler.command import job_environment


@pytest.mark.parametrize(
    ("environment", "inherit", "travels"),
    [
        ({"PATH": "/b", "HOME": "/h", "TOKEN": "x", "LC_ALL": "C"}, "minimal", "PATH HOME LC_ALL"),
        ({"CUDA_HOME": "/c", "TOKEN": "x", "A B": "y", "BASH_FUNC_f%%": "() {"}, "all", None),
        ({"SLURM_JOB_ID": "1", "SBATCH_ACCOUNT": "a", "SLURM_CONF": "/c"}, "all", "SLURM_CONF"),
        ({"RANK": "0", "MASTER_ADDR": "x", "PMI_RANK": "0", "OMPI_COMM": "1"}, "all", ""),
        ({"TMPDIR": "/t", "HOSTNAME": "h", "SSH_AUTH_SOCK": "/s", "HPML_HOME": "/r"}, "all", ""),
        ({"CUDA_VISIBLE_DEVICES": "0", "BASH_ENV": "/x", "ENV": "/y"}, "all", ""),
    ],
)
def test_what_travels(environment: Mapping[str, str], inherit: str, travels: str | None) -> None:
    """All but the session's, the scheduler's and the launcher's; or only what a login has."""
    kept = environment if travels is None else {name: environment[name] for name in travels.split()}
    assert job_environment(environment, inherit) == kept
