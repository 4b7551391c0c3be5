"""Site profiles from the command line: which one counts, and how its mistakes are told."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hpml_orchestrator.topology.record import topology_json
from tests.unit.placement.machines import milan

if TYPE_CHECKING:
    from tests.unit.cli.support import Result, Shell

Hpml = Callable[..., "Result"]
SLURM = ("--backend", "slurm")


@pytest.fixture(autouse=True)
def project(shell: Shell) -> Iterator[Path]:
    """The project's profile of the shell's directory, gone after the test."""
    path = shell.root / "hpml.toml"
    yield path
    path.unlink(missing_ok=True)
    shell.variables.clear()


def test_a_profile_fills_in_what_the_job_file_leaves_open(
    shell: Shell, hpml: Hpml, project: Path
) -> None:
    """And `render --explain` names the file that a value came from."""
    project.write_text('[defaults.resources]\npartition = "gpu"\naccount = "physics"\n')
    job = shell.job(resources={"account": "mine"})
    script = hpml("render", job, *SLURM).out
    assert "#SBATCH --partition=gpu\n" in script
    assert "#SBATCH --account=mine\n" in script
    rows = {row["field"]: row for row in hpml("render", job, *SLURM, "--explain", "--json").json()}
    assert rows["resources.partition"]["origin"] == f"site profile {project}"
    assert rows["resources.account"]["origin"] == "job file"


def test_a_default_that_the_job_rules_out_leaves_no_origin(
    shell: Shell, hpml: Hpml, project: Path
) -> None:
    """A venv of the job takes the site's conda away: nothing came from the profile then."""
    project.write_text('[defaults.environment]\nconda = "base"\n')
    (shell.root / "config/hpml").mkdir(parents=True, exist_ok=True)
    user = shell.root / "config/hpml/site.toml"
    user.write_text('[defaults.resources]\naccount = "physics"\n')
    try:
        job = shell.job(environment={"venv": "/venv"})
        told = hpml("render", job, *SLURM, "--explain", "--json").json()
        rows = {row["field"]: row for row in told}
        assert rows["environment.conda"]["value"] is None
        named = {row["origin"] for name, row in rows.items() if name.startswith("environment.")}
        assert named == {"default", "job file"}
        project.write_text("[defaults.resources]\n")
        told = hpml("render", job, *SLURM, "--explain", "--json").json()
        (account,) = [row for row in told if row["field"] == "resources.account"]
        assert account["origin"] == f"site profile {user}"
    finally:
        user.unlink()


def test_site_chooses_another_profile_or_none(shell: Shell, hpml: Hpml, project: Path) -> None:
    """By option or by variable."""
    project.write_text('[defaults.resources]\npartition = "gpu"\n')
    other = shell.root / "other.toml"
    other.write_text('[defaults.resources]\nqos = "high"\n')
    job = shell.job()
    chosen = hpml("--site", str(other), "render", job, *SLURM).out
    assert "--qos=high" in chosen
    assert "--partition" not in chosen
    assert "--partition" not in hpml("--site", "none", "render", job, *SLURM).out
    shell.variables["HPML_SITE"] = "none"
    assert "--partition" not in hpml("render", job, *SLURM).out


def test_a_local_job_has_no_site(shell: Shell, hpml: Hpml, project: Path) -> None:
    """The profile describes the cluster; one that is chosen by name counts all the same."""
    project.write_text('[defaults.environment.variables]\nWHERE = "cluster"\n')
    job = shell.job(command=["sh", "-c", "echo at ${WHERE:-home}"])
    ended = hpml("run", job, "--local")
    assert "at home" in ended.out
    assert f"a local job uses no site profile or templates of yours ({project})" in ended.err
    assert "export WHERE" not in hpml("render", job, "--local").out
    assert "at cluster" in hpml("--site", str(project), "run", job, "--local").out


def test_the_record_names_the_profiles(shell: Shell, hpml: Hpml, project: Path) -> None:
    """Who reads a record later knows where its values came from."""
    project.write_text('[defaults.environment.variables]\nA = "1"\n')
    hpml("--site", str(project), "run", shell.job(), "--local")
    assert hpml("show", "--json").json()["record"]["site"] == [str(project)]


@pytest.mark.parametrize(
    ("profile", "resources", "words"),
    [
        ("[directives.mem]\nforbid = 'memory follows the CPUs'", {"memory": "4G"},
         "resources.memory: asks for --mem, which this site forbids: memory follows the CPUs"),
        ("[defaults.resources]\npartion = 'a'", {}, "did you mean defaults.resources.partition?"),
        ("[defaults]\nname = 'a'", {}, "name belongs to each job and has no default here"),
        ("[partitions.a]\nnode_types = ['b']", {}, "there is no node type b"),
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
        result = hpml(command, job, *SLURM)
        assert result.code == 2
        assert words in result.err
        assert str(project) in result.err
        assert result.err.count("hpml: error:") == 1
    assert sorted(shell.records.rglob("*")) == before


def test_a_profile_that_is_not_there_is_named(shell: Shell, hpml: Hpml) -> None:
    """With exit status 3, as everything that is not found."""
    result = hpml("--site", "nowhere.toml", "render", shell.job(), *SLURM)
    assert result.code == 3
    assert f"no such site profile: {shell.root}/nowhere.toml" in result.err


def test_profiles_cost_nothing_where_there_are_none(shell: Shell) -> None:
    """The model of a profile is not even loaded."""
    program = (
        "import sys; sys.argv = ['hpml', 'render', sys.argv[1], '--backend', 'slurm']\n"
        "from hpml_orchestrator.cli.main import main\n"
        "main()\n"
        "assert 'hpml_orchestrator.spec.site' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, shell.job()],
        env=shell.environment(), cwd=shell.root, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_explain_says_who_binds(shell: Shell, hpml: Hpml, project: Path) -> None:
    """The launcher, by the profile's topology; or each node, and what is missing for the other."""
    machine = shell.root / "node.json"
    machine.write_text(json.dumps(topology_json(milan())))
    project.write_text(
        '[partitions.gpu]\ndefault = true\nexclusive = true\nnode_types = ["big"]\n'
        '[node_types.big]\ntopology = "node.json"\n'
    )
    job = shell.job(resources={"gpus": 4})
    told = hpml("render", job, *SLURM, "--explain")
    assert told.err == "hpml: binding: the launcher binds, by map_ldom; each node checks it\n"
    assert " --cpu-bind=map_ldom:3,2,1,0 " in hpml("render", job, *SLURM).out
    told = hpml("render", job, *SLURM, "--explain", "--set", "resources.gpus=2")
    assert told.err == (
        "hpml: binding: each node plans for itself: the job asks for 2 of the 4 GPUs that nodes of "
        "type big have\n"
    )
    told = hpml("check", job, *SLURM, "--set", "resources.gpus=2", "--set", "binding.form=static")
    assert told.code == 2
    assert "binding.form: cannot be static: the job asks for 2 of the 4 GPUs" in told.err
    assert "map_ldom" not in hpml("--site", str(project), "render", job, "--local").out
    machine.write_text("<topology")
    told = hpml("render", job, *SLURM)
    assert told.code == 2
    assert f"node_types.big.topology: {machine}: " in told.err
    assert f"in {project}" in told.err
