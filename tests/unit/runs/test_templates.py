"""Templates of one's own begin as hpml's, and each is listed with where it comes from."""

from __future__ import annotations

import json
from pathlib import Path

import jinja2.nodes
import pytest

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.runs.templates import BLOCKS, eject, templates
from hpml_orchestrator.script import Capabilities, render, template
from hpml_orchestrator.script.user_template import own_directory
from hpml_orchestrator.spec import load_job
from hpml_orchestrator.spec.site import Site
from hpml_orchestrator.spec.site_load import ResolvedSite

HERE = Capabilities(interpreter="/usr/bin/python3")


def script(tmp_path: Path, launcher: str, directory: Path | None = None) -> str:
    path = tmp_path / "job.yaml"
    path.write_text(json.dumps({"name": "a", "script": "x.py", "launcher": launcher}))
    site = ResolvedSite(Site(templates=str(directory))) if directory else None
    return render(load_job(path).job, HERE, site)


def test_every_block_is_explained_and_no_other() -> None:
    """What an ejected template lists is what hpml's templates have."""
    there = set()
    for path in Path(own_directory()).iterdir():
        parsed = template.environment().parse(path.read_text())
        there |= {block.name for block in parsed.find_all(jinja2.nodes.Block)}
    assert set(BLOCKS) == there


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("name", ["base", "srun", "torchrun"])
def test_an_ejected_template_changes_nothing(tmp_path: Path, name: str, whole: bool) -> None:
    """Until it is edited, scripts stay equal to the byte."""
    path = eject(name, tmp_path / "mine", whole=whole)
    assert path == tmp_path / "mine" / f"{name}.sh.j2"
    for launcher in ("srun", "torchrun"):
        assert script(tmp_path, launcher, tmp_path / "mine") == script(tmp_path, launcher)


def test_a_template_that_is_there_stays(tmp_path: Path) -> None:
    """Work is replaced with --force alone."""
    path = eject("srun", tmp_path)
    path.write_text("mine")
    with pytest.raises(InputError, match="is there already"):
        eject("srun", tmp_path)
    assert path.read_text() == "mine"
    assert eject("srun.sh.j2", tmp_path, force=True).read_text() != "mine"


def test_what_cannot_be_ejected(tmp_path: Path) -> None:
    """No such template, and no such place."""
    with pytest.raises(
        InputError, match="must be one of base, horovodrun, mpirun, srun, torchrun"
    ) as caught:
        eject("../srun", tmp_path)
    assert caught.value.field == "NAME"
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be made: File exists"):
        eject("srun", tmp_path / "file")


def test_the_list_says_where_each_comes_from(tmp_path: Path) -> None:
    """The user's before hpml's of that name; parts that others include; what blocks each writes."""
    eject("torchrun", tmp_path)
    with (tmp_path / "torchrun.sh.j2").open("a") as stream:
        stream.write("{% block user %}{% include 'proxy.sh' %}{% endblock %}")
    (tmp_path / "proxy.sh").write_text("export PROXY=1\n")
    listed = {one.name: one for one in templates([str(tmp_path)])}
    assert list(listed) == ["base", "horovodrun", "mpirun", "srun", "torchrun", "proxy.sh"]
    assert {name: one.origin for name, one in listed.items()} == {
        "base": "hpml",
        "horovodrun": "hpml",
        "mpirun": "hpml",
        "srun": "hpml",
        "torchrun": str(tmp_path),
        "proxy.sh": str(tmp_path),
    }
    assert listed["torchrun"].blocks == ("user",)
    assert set(listed["base"].blocks) == set(BLOCKS)
    assert listed["srun"].purpose == "launcher srun"
    assert listed["proxy.sh"].purpose == "a part, for others to include"
    assert all(one.origin == "hpml" for one in templates())


def test_a_template_with_a_mistake_is_told_by_line(tmp_path: Path) -> None:
    """The list does not hide what rendering would refuse."""
    (tmp_path / "srun.sh.j2").write_text("\n{% block user %}")
    with pytest.raises(InputError, match=r"srun\.sh\.j2:2: "):
        templates([str(tmp_path)])
    (tmp_path / "srun.sh.j2").write_bytes(b"\xff")
    with pytest.raises(InputError, match="is not UTF-8"):
        templates([str(tmp_path)])


def test_the_list_refuses_a_block_that_would_be_left_out(tmp_path: Path) -> None:
    """A misspelt block is told before any job is rendered."""
    path = eject("srun", tmp_path)
    with path.open("a") as stream:
        stream.write("{% block usr %}true{% endblock %}")
    with pytest.raises(InputError, match="no block 'usr'"):
        templates([str(tmp_path)])
