"""A site's rules on a real Slurm: options it takes, words it refuses, a comment left out."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.conftest import SlurmCluster
from tests.cluster.hpml_on_slurm import Desk

PROFILE = """
cluster = "devcluster"

[paths]
scratch = "$SITE_SCRATCH"

[defaults.resources]
partition = "low"

[defaults.environment.variables]
SITE_GREETING = "hello"

[directives.gpus-per-node]
rename = "--gres=gpu:{item}"

[directives.comment]
omit = true

[directives.nice]
default = "7"

[directives.mem]
forbid = "memory is not counted here"
"""


@pytest.fixture
def desk(slurm_cluster: SlurmCluster, tmp_path: Path) -> Desk:
    """A desk whose project has a site profile."""
    (tmp_path / "hpml.toml").write_text(PROFILE)
    (tmp_path / "data").write_text("staged")
    return Desk(slurm_cluster, tmp_path, {"SITE_SCRATCH": "/dev/shm"})


def test_a_job_through_a_profile_runs_as_the_site_wants_it(desk: Desk) -> None:
    """The site's default partition, option for GPUs and staging directory are used; no comment."""
    job = desk.job(
        "sited",
        command=["sh", "-c", 'echo "$SITE_GREETING" {stage.d} $(cat {stage.d}/data)'],
        resources={"gpus": 1},
        stage=[{"name": "d", "source": str(desk.directory / "data"), "kind": "file"}],
    )
    rendered = desk.hpml("render", job).stdout
    assert "#SBATCH --gres=gpu:1\n" in rendered
    assert "#SBATCH --nice=7\n" in rendered
    state = desk.json("run", job)
    assert state["state"] == "COMPLETED"
    output = Path(state["output"]).read_text("utf-8")
    assert "hello /dev/shm/hpml-" in output
    assert "staged" in output
    told = desk.slurm("scontrol", "show", "job", state["job_id"])
    assert "Partition=low" in told
    assert "Comment=" not in told
    assert "Nice=7" in told
    assert "gres/gpu:1" in told or "gres:gpu:1" in told
    assert desk.slurm("scontrol", "write", "batch_script", state["job_id"], "-") == rendered


def test_a_forbidden_option_is_refused_before_slurm_hears_of_it(desk: Desk) -> None:
    """Exit status 2 with the site's own words, and nothing in the queue or the records."""
    before = desk.slurm("scontrol", "show", "config").split("NEXT_JOB_ID")[1].split()[1]
    job = desk.job("hungry", command=["true"], resources={"memory": "1G"})
    done = desk.hpml("submit", job, code=2)
    assert "resources.memory: asks for --mem, which this site forbids" in done.stderr
    after = desk.slurm("scontrol", "show", "config").split("NEXT_JOB_ID")[1].split()[1]
    assert after == before, "no job id was used up"
    assert not list((desk.records / "submissions").glob("*"))


def test_ranks_that_a_template_never_starts_end_the_job_at_once(desk: Desk) -> None:
    """If only the job can detect it, the script reports it and does not wait for its agent."""
    templates = desk.directory / "templates"
    templates.mkdir()
    (desk.directory / "hpml.toml").write_text(f'templates = "templates"\n{PROFILE}')
    head = '{% extends "hpml/srun.sh.j2" %}\n'
    lines = 'if [[ -n "${NEVER_SET:-}" ]]; then\n  hpml_run srun true\nfi\n'
    block = f"{{% block ranks %}}\n{lines}{{% endblock %}}\n"
    (templates / "srun.sh.j2").write_text(head + block)
    state = desk.run("idle", command=["true"], resources={"time": "10:00"}, code=6)
    assert (state["state"], state["exit_code"]) == ("FAILED", 1)
    output = Path(state["output"]).read_text("utf-8")
    assert "hpml: the script ended before its ranks: hpml_run has to start them" in output
