"""Commands about a site, and site profiles as other commands use them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.cli.support import Hpml, Shell

SLURM = ("--backend", "slurm")


@pytest.fixture(autouse=True)
def project(shell: Shell) -> Iterator[Path]:
    """The project's profile of the shell's directory, gone after the test."""
    path = shell.root / "hpml.toml"
    yield path
    path.unlink(missing_ok=True)
    shell.variables.clear()


def test_init_where_it_cannot_write_a_profile(shell: Shell, hpml: Hpml, tmp_path: Path) -> None:
    """Without Slurm none is needed; a file that exists is not replaced."""
    shell.variables["PATH"] = str(tmp_path)
    assert hpml("init").refuses(3, "Slurm")
    assert not (shell.root / "hpml.toml").exists()
    (shell.root / "there.toml").write_text("mine")
    assert hpml("init", "-o", "there.toml").refuses(2, "hint: --force replaces it")
    assert (shell.root / "there.toml").read_text() == "mine"


def test_doctor_and_schema(hpml: Hpml) -> None:
    """A table for people, a list for programs, a status for scripts; schemas for editors."""
    shown = hpml("doctor", "--json")
    results = {finding["check"]: finding["result"] for finding in shown.json()}
    assert shown.code == int("missing" in results.values())
    assert results["templates"] == "ok"
    assert hpml("doctor").out.startswith("CHECK\t")
    assert hpml("schema").json()["title"] == "hpml job file"
    assert hpml("schema", "site").json()["$schema"].endswith("2020-12/schema")


def test_a_template_of_ones_own(shell: Shell, hpml: Hpml, project: Path) -> None:
    """It has the site's line, and a profile of another site has not."""
    project.write_text('templates = "mine"\n')
    (shell.root / "mine").mkdir()
    (shell.root / "mine" / "srun.sh.j2").write_text(
        '{% extends "hpml/srun.sh.j2" %}{% block user %}echo {{ job.name }}\n{% endblock %}'
    )
    assert "\necho probe\n" in hpml("render", shell.job(), *SLURM).out
    assert "\necho probe\n" not in hpml("--site", "none", "render", shell.job(), *SLURM).out


def explained(hpml: Hpml, job: str) -> dict[str, Any]:
    """Each field of a job with its value and origin."""
    rows = hpml("render", job, *SLURM, "--explain", "--json").json()
    return {row["field"]: (row["value"], row["origin"]) for row in rows}


def test_a_profile_fills_in_what_the_job_file_leaves_open(
    shell: Shell, hpml: Hpml, project: Path
) -> None:
    """`render --explain` names the file of each value; what the job rules out has no origin."""
    user = shell.root / "config/hpml/site.toml"
    user.parent.mkdir(parents=True)
    user.write_text('[defaults.resources]\naccount = "physics"\n')
    project.write_text(
        '[defaults.resources]\npartition = "gpu"\n[defaults.environment]\nconda = "base"\n'
    )
    try:
        job = shell.job(environment={"venv": "/venv"})
        fields = explained(hpml, job)
    finally:
        user.unlink()
    assert fields["resources.partition"] == ("gpu", f"site profile {project}")
    assert fields["resources.account"] == ("physics", f"site profile {user}")
    assert fields["environment.conda"] == (None, "default")
    assert fields["environment.venv"] == ("/venv", "job file")


def test_site_chooses_another_profile_or_none(shell: Shell, hpml: Hpml, project: Path) -> None:
    """By option or by variable; the project's profile does not apply to local jobs."""
    project.write_text('[defaults.resources]\npartition = "gpu"\n')
    other = shell.root / "other.toml"
    other.write_text('[defaults.environment.variables]\nWHERE = "cluster"\n')
    job = shell.job()
    assert "--partition=gpu" in hpml("render", job, *SLURM).out
    chosen = hpml("--site", str(other), "render", job, *SLURM).out
    assert ("WHERE" in chosen, "--partition" in chosen) == (True, False)
    local = hpml("render", job, "--local")
    assert "--partition" not in local.out
    assert f"uses no site profile or templates of yours ({project})" in local.err
    project.write_text('backend = "local"\n[defaults.resources]\npartition = "gpu"\n')
    local = hpml("render", job)
    assert ("--partition" in local.out, "uses no site profile" in local.err) == (False, False)
    project.write_text('[defaults.resources]\npartition = "gpu"\n')
    assert "WHERE" in hpml("--site", str(other), "render", job, "--local").out
    shell.variables["HPML_SITE"] = "none"
    assert "--partition" not in hpml("render", job, *SLURM).out
    submitted = hpml("--site", str(other), "submit", "--local", "--json", job).json()
    assert hpml("show", "--json").json()["record"]["site"] == [str(other)]
    assert hpml("wait", submitted["id"]).code == 0


@pytest.mark.parametrize(
    ("profile", "resources", "words"),
    [
        ("[directives.mem]\nforbid = 'memory follows the CPUs'", {"memory": "4G"},
         "resources.memory: asks for --mem, which this site forbids: memory follows the CPUs"),
        ("[defaults.resources]\npartion = 'a'", {}, "did you mean defaults.resources.partition?"),
        ("cluster = 'a", {}, "is not TOML"),
    ],
)  # fmt: skip
def test_a_wrong_profile_stops_everything(
    shell: Shell, hpml: Hpml, project: Path, profile: str, resources: dict[str, str], words: str
) -> None:
    """One message with the field and the file, exit status 2, nothing written down."""
    project.write_text(profile + "\n")
    job = shell.job(resources=resources)
    before = sorted(shell.records.rglob("*"))
    for command in ("render", "submit"):
        assert hpml(command, job, *SLURM).refuses(2, words, str(project))
    assert sorted(shell.records.rglob("*")) == before
    for words_of in (["render", job, *SLURM], ["list"]):
        nowhere = hpml("--site", "nowhere.toml", *words_of)
        assert nowhere.refuses(3, f"no such site profile: {shell.root}/nowhere.toml")


def test_a_topology_that_cannot_be_read(shell: Shell, hpml: Hpml, project: Path) -> None:
    """The check that compares the job with the node type names the file and the profile."""
    machine = shell.root / "node.json"
    machine.write_text("<topology")
    project.write_text(
        '[partitions.gpu]\ndefault = true\nnode_types = ["big"]\n'
        '[node_types.big]\ntopology = "node.json"\n'
    )
    job = shell.job(resources={"gpus": 4})
    broken = hpml("check", job, *SLURM)
    assert broken.refuses(2, f"node_types.big.topology: {machine}: ", f"in {project}")
