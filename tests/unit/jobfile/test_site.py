"""Site profiles: search, precedence, and errors."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hpml_orchestrator.errors import InputError, NotFoundError
from hpml_orchestrator.jobfile.load import parse_setting
from hpml_orchestrator.runs.load import load_job
from hpml_orchestrator.site.model import load_site
from hpml_orchestrator.site.profile import find_profiles

if TYPE_CHECKING:
    from tests.unit.jobfile.conftest import LoadSite


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A project two directories deep, with a job file."""
    (tmp_path / "home" / "project" / "deep").mkdir(parents=True)
    job = tmp_path / "home" / "project" / "deep" / "job.yaml"
    job.write_text("name: a\nscript: x.py\n", "utf-8")
    return tmp_path


def profile(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")
    return path


def profiles(place: Path, **more: str) -> list[Path]:
    return find_profiles(
        place / "home" / "project" / "deep" / "job.yaml",
        {"HOME": str(place / "home")},
        system=str(place / "etc" / "site.toml"),
        **more,
    )


def test_the_projects_profile_is_over_the_users_and_the_systems(place: Path) -> None:
    """Three places, the weakest first; the nearest directory with a profile is the project."""
    assert profiles(place) == []
    system = profile(place / "etc" / "site.toml", "")
    user = profile(place / "home" / ".config" / "hpml" / "site.toml", "")
    far = profile(place / "home" / "hpml.toml", "")
    assert profiles(place) == [system, user, far]
    near = profile(place / "home" / "project" / "hpml.toml", "")
    assert profiles(place) == [system, user, near]


def test_a_profile_chosen_by_name_counts_alone(place: Path) -> None:
    """`--site FILE` is the only one, `--site none` is none."""
    profile(place / "etc" / "site.toml", "")
    assert profiles(place, chosen="none") == []
    assert profiles(place, chosen="/x/mine.toml") == [Path("/x/mine.toml")]
    with pytest.raises(NotFoundError, match="no such site profile: /x/mine.toml"):
        load_site(profiles(place, chosen="/x/mine.toml"))


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_a_strangers_profile_is_refused(place: Path) -> None:
    """A third person's hpml.toml above the job file could change what a job runs."""
    stranger = profile(place / "home" / "hpml.toml", "")
    stranger.chmod(0o666)
    with pytest.raises(InputError, match="can be written by everybody"):
        profiles(place)
    stranger.chmod(0o644)
    os.chown(stranger, 12345, 12345)
    with pytest.raises(InputError, match="belongs to somebody who is neither you") as caught:
        profiles(place)
    assert caught.value.field == "site profile"
    assert "--site none" in caught.value.hint
    os.chown(place / "home" / "project" / "deep" / "job.yaml", 12345, 12345)
    assert profiles(place) == [stranger], "who wrote the job file may write its profile"


@pytest.mark.parametrize("kind", ["link", "directory"])
def test_a_profile_that_is_none_is_not_passed_over(place: Path, kind: str) -> None:
    """A site whose shared profile is gone would lose its rules unnoticed."""
    path = place / "home" / "hpml.toml"
    if kind == "link":
        path.symlink_to("nowhere")
    else:
        path.mkdir()
    words = "is a link that leads nowhere" if kind == "link" else "is not a regular file"
    with pytest.raises(InputError, match=words) as caught:
        profiles(place)
    assert caught.value.field == "site profile"


def test_profiles_lie_over_one_another(site: LoadSite) -> None:
    """Mappings are joined key by key, the later file wins, and each value knows its file."""
    made = site(
        'cluster = "a"\n[defaults.resources]\npartition = "gpu"\naccount = "low"\n'
        '[directives.mem]\nforbid = "no"\n[directives.hint]\ndefault = "nomultithread"\n',
        '[defaults.resources]\naccount = "high"\n[directives.mem]\nomit = true\n'
        "[directives.hint]\n",
    )
    assert made.site.defaults == {"resources": {"partition": "gpu", "account": "high"}}
    assert made.site.directives["mem"].omit
    assert made.site.directives["mem"].forbid is None, "a rule replaces a rule whole"
    assert made.site.directives["hint"].default is None, "an empty rule takes one back"
    first, second = made.sources
    assert made.origin("defaults.resources.partition") == first
    assert made.origin("defaults.resources.account") == second
    assert made.origin("nothing") is None


def test_defaults_lie_below_the_job_file(site: LoadSite, tmp_path: Path) -> None:
    """Command line over job file over site profile over hpml's own defaults."""
    made = site(
        '[defaults.resources]\npartition = "gpu"\ntime = "02:00:00"\nqos = "long"\n'
        'account = "a"\n[defaults.environment.variables]\nA = "1"\nB = "1"\n',
    )
    job = tmp_path / "job.yaml"
    job.write_text(
        "name: a\nscript: x.py\nresources: {time: 10, qos: ~}\nenvironment: {variables: {B: 2}}\n",
        "utf-8",
    )
    resolved = load_job(job, [parse_setting("resources.account=b")], made)
    resources = resolved.job.resources
    assert (resources.partition, resources.time, resources.account) == ("gpu", 600, "b")
    assert resources.qos is None, "an empty field takes the site's default back"
    assert resolved.job.environment.variables == {"A": "1", "B": "2"}
    origins = resolved.origins
    assert origins["resources.partition"] == f"site profile {made.sources[0]}"
    assert origins["resources.time"] == "job file"
    assert origins["resources.account"] == "command line"
    assert origins["resources.nodes"] == "default"


def test_a_job_with_conda_does_without_the_sites_venv(site: LoadSite, tmp_path: Path) -> None:
    """Of two that exclude each other the job's choice counts."""
    made = site('[defaults.environment]\nvenv = "/opt/venv"\n')
    job = tmp_path / "job.yaml"
    job.write_text("name: a\nscript: x.py\nenvironment: {conda: torch}\n", "utf-8")
    environment = load_job(job, site=made).job.environment
    assert (environment.conda, environment.venv) == ("torch", None)


def test_paths_are_relative_to_their_profile(site: LoadSite, tmp_path: Path) -> None:
    """Wherever the job file is."""
    made = site(
        'templates = "templates"\n[node_types.a]\ntopology = "a.xml"\n'
        '[defaults.environment]\nvenv = "venv"\npython = "python3"\n',
    )
    here = tmp_path / "0"
    assert made.site.templates == str(here / "templates")
    assert made.site.node_types["a"].topology == str(here / "a.xml")
    assert made.site.defaults["environment"] == {"venv": str(here / "venv"), "python": "python3"}


def test_a_partition_stages_where_its_nodes_say(site: LoadSite) -> None:
    """Node types decide if they agree, else the value for all nodes."""
    made = site(
        '[paths]\nscratch = "/scratch"\n'
        '[node_types.a]\nscratch = "/nvme"\ninterfaces = ["ib0"]\n[node_types.b]\n'
        '[partitions.one]\nnode_types = ["a"]\n'
        '[partitions.both]\nnode_types = ["a", "b"]\ndefault = true\n',
    ).site
    assert made.path("scratch", "one") == "/nvme"
    assert made.path("scratch", "both") == "/scratch"
    assert made.path("scratch", None) == "/scratch", "the default partition"
    assert made.path("scratch", "unknown") == "/scratch"
    assert made.path("ram", "one") is None
    assert made.interfaces_of("one") == ["ib0"]
    assert made.interfaces_of("both") == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("clster = 'a'", "clster: unknown field; did you mean cluster?"),
        ("schema_version = 2", "schema_version: must be 1 (got 2)"),
        (
            "[partitions.gpu]\nmaxtime = 5",
            "partitions.gpu.maxtime: unknown field; did you mean partitions.gpu.max_time?",
        ),
        (
            "[partitions.gpu]\nmax_time = '5 days'",
            "partitions.gpu.max_time: must be a time limit: 2h, 90m",
        ),
        (
            "[partitions.gpu]\nnode_types = ['a']",
            "partitions.gpu.node_types: unknown node type a",
        ),
        ("[directives.mem]\nforbid = true", "directives.mem.forbid: must be text"),
        ("[directives.mem]\nforbid = 'x'\nomit = true", "give one of forbid, omit, rename and"),
        ("[directives.chdir]\nomit = true", "--chdir is an option that hpml needs"),
        ("[directives.gpus]\nrename = 'gres=gpu'", "must be one long sbatch option such as --gres"),
        ("[directives.nodes]\nrename = '--output={value}'", "--output is set by hpml for every"),
        ("[directives.gpus]\nrename = '--gres=`id`'", "must be one long sbatch option such as"),
        (
            "[directives.gpus]\nrename = '--gres={value}'\n[directives.gres]\nforbid = 'no'",
            "directives: gpus is renamed to --gres, which the rule of gres forbids",
        ),
        (
            "[directives.mem]\nrename = '--tmp={value}'\n[directives.tmp]\nomit = true",
            "directives: mem is renamed to --tmp, which the rule of tmp leaves out",
        ),
        (
            "[partitions.a]\ndefault = true\n[partitions.b]\n[partitions.c]\ndefault = true",
            "partitions: a and c are all the default partition",
        ),
        (
            "[defaults.resources]\npartion = 'a'",
            (
                "defaults.resources.partion: unknown field; "
                "did you mean defaults.resources.partition?"
            ),
        ),
        ("[defaults.resources]\ntime = -5", "defaults.resources.time: must be a time limit"),
    ],
)
def test_what_is_wrong_is_named_with_its_field_and_file(
    site: LoadSite, tmp_path: Path, text: str, message: str
) -> None:
    """Each finding has the right form and the file."""
    with pytest.raises(InputError) as caught:
        site(text + "\n")
    assert message in str(caught.value)
    assert str(tmp_path / "0" / "hpml.toml") in f"{caught.value}\n{caught.value.hint}"


def test_the_file_of_a_finding_is_the_one_that_holds_it(site: LoadSite, tmp_path: Path) -> None:
    """Of several profiles, the one with the wrong value is named."""
    with pytest.raises(InputError) as caught:
        site("[defaults.resources]\nnodes = 0\n", "cluster = 'a'\n")
    assert str(tmp_path / "0" / "hpml.toml") in caught.value.hint
    assert str(tmp_path / "1" / "hpml.toml") not in caught.value.hint


def test_the_default_partition_of_a_weaker_profile_is_taken_back(site: LoadSite) -> None:
    """Conflicting defaults of two files are refused, unless one of them is false."""
    weak, strong = "[partitions.a]\ndefault = true\n", "[partitions.b]\ndefault = true\n"
    with pytest.raises(InputError, match="a and b are all the default"):
        site(weak, strong)
    made = site(weak, f"{strong}[partitions.a]\ndefault = false\n").site
    assert made.partitions_of(None) == ["b"]
