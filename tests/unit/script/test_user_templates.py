"""A user's templates change the script; errors in them have file and line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jinja2.nodes
import pytest

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.runs.prepare import render_job
from hpml_orchestrator.runs.templates import eject, templates
from hpml_orchestrator.script.render import Capabilities
from hpml_orchestrator.script.template import environment, own_directory
from hpml_orchestrator.spec.load import load_job
from hpml_orchestrator.spec.site import ResolvedSite, Site

HERE = Capabilities(interpreter="/usr/bin/python3")


class Office:
    """A directory of templates, and a job that is rendered with them."""

    def __init__(self, root: Path) -> None:
        self.templates = root / "templates"
        self.templates.mkdir()
        self.job = root / "job.yaml"
        self.job.write_text(json.dumps({"name": "a", "script": "train.py", "args": ["$(x)"]}))

    def write(self, name: str, text: str | bytes) -> None:
        (self.templates / name).write_bytes(text if isinstance(text, bytes) else text.encode())

    def render(self, *, own: bool = True, **fields: Any) -> str:
        """The script, with the user's templates or without."""
        site = ResolvedSite(Site(templates=str(self.templates))) if own else None
        return render_job(load_job(self.job, list(fields.items())), HERE, site=site).script

    def block(self, name: str, text: str) -> str:
        """The script, with that text as a block of torchrun's template, in line 2 of it."""
        child = '{% extends "hpml/torchrun.sh.j2" %}\n{% block '
        self.write("torchrun.sh.j2", child + name + " %}" + text + "{% endblock %}")
        return self.render()


@pytest.fixture
def office(tmp_path: Path) -> Office:
    return Office(tmp_path)


@pytest.mark.parametrize(
    ("block", "text", "line"),
    [
        ("user", "export SITE={{ job.name }}\n", "export SITE=a"),
        ("user", "export SITE={{ job.name }}", "export SITE=a"),
        ("directives", "{{ super() }}#SBATCH --licenses=a:1", "#SBATCH --licenses=a:1"),
        ("directives", "{{ super() }}#SBATCH --account=me  # mine", "#SBATCH --account=me  # mine"),
        ("setup", "{{ super() }}echo more\n", "echo more"),
        ("agent", "{{ super() }}", ""),
        ("user", "echo {{ job.args[0] }} {{ job.args[0] | safe }}", "echo '$(x)' '$(x)'"),
        ("user", "echo {{ 'a' ~ job.args[0] }}", "echo 'a$(x)'"),
        ("user", "{% macro m(x) %}echo {{ x }}{% endmacro %}{{ m(job.args[0]) }}", "echo '$(x)'"),
        ("user", '{% include "proxy.sh" %}', "export PROXY=1"),
    ],
)
def test_a_block_is_overridden_and_the_rest_stays(
    office: Office, block: str, text: str, line: str
) -> None:
    """Values are quoted once; a block in one line does not run into hpml's next line."""
    office.write("proxy.sh", "export PROXY=1\n")
    lines = office.block(block, text).split("\n")
    assert line in lines
    assert [other for other in lines if other not in ("", line)] == [
        other for other in office.render(own=False).split("\n") if other not in ("", line)
    ]


def test_a_base_of_ones_own_counts_for_every_launcher(office: Office) -> None:
    """Its new blocks may be filled by the launchers' templates; hpml/NAME stays hpml's own."""
    new = "{% block user %}echo both\n{% block limits %}{% endblock %}{% endblock %}"
    office.write("base.sh.j2", '{% extends "hpml/base.sh.j2" %}' + new)
    own = '{% extends "base.sh.j2" %}{% block limits %}ulimit -n 9\n{% endblock %}'
    office.write("srun.sh.j2", own + "{% block ranks %}hpml_run sleep 1\n{% endblock %}")
    assert "\necho both\n" in office.render()
    assert "\necho both\nulimit -n 9\n" in office.render(launcher="srun")


@pytest.mark.parametrize(
    ("block", "text", "message"),
    [
        ("user", "{{ nme }}", "torchrun.sh.j2:2: 'nme' is undefined"),
        ("user", "\n{{ job.nme }}", "torchrun.sh.j2:3: .*has no attribute 'nme'"),
        ("user", "{% if true %}", "torchrun.sh.j2:2: .*end"),
        ("user", "{{ 1 / 0 }}", "torchrun.sh.j2:2: ZeroDivisionError"),
        ("user", "{{ 'a;b' | directive }}", "torchrun.sh.j2:2: .*must not stand unquoted"),
        ("user", '{% include "../secret.j2" %}', "TemplateNotFound: ../secret.j2"),
        ("user", '{% include "/etc/passwd" %}', "TemplateNotFound: /etc/passwd"),
        ("usr", "true", "torchrun.sh.j2:2: unknown block 'usr'"),
        ("user", "{% endblock %}ulimit{% block ready %}", ":2: text outside of the blocks"),
        ("user", "#SBATCH --requeue\n", "no directive after the first command: #SBATCH --requeue"),
        ("user", "true )", "bash cannot read the script: line .*syntax error"),
        ("user", "cat <<END\nnothing ends this\n", "cannot read the script: .*here-document"),
        ("directives", "\n#SBATCH --nodes=1\n", "lacks `#SBATCH --job-name=a`"),
        *(
            (
                block,
                "\n# hpml_begin hpml_agents hpml_wait_ready hpml_run\n",
                f"needs of the block '{block}'",
            )
            for block in ("setup", "agent", "ready", "ranks")
        ),
        *(
            ("directives", "{{ super() }}#SBATCH " + line, f"#SBATCH {line}: a template cannot set")
            for line in (
                *"--array=0-3 --output=/tmp/out --open-mode=truncate --export=NONE".split(),
                *"--nodes=2 --time=10 --wrap=true --comment=x -N2 hetjob".split(),
                "-o /tmp/out",
            )
        ),
    ],
)
def test_faults_name_file_and_line(office: Office, block: str, text: str, message: str) -> None:
    """Templates that Jinja2, sbatch or bash would refuse, or read otherwise than it was meant."""
    (office.templates.parent / "secret.j2").write_text("secret")
    with pytest.raises(InputError, match=message) as caught:
        office.block(block, text)
    assert str(office.templates) in str(caught.value)
    assert (caught.value.field, caught.value.exit_code) == ("templates", 2)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("true\nfi", "line 2: syntax error near unexpected token `fi'"),
        ("if true\nthen", "syntax error: unexpected end of file"),
        ("true\ncat <<END\nhpml", "here-document"),
        ("shopt -s extglob\r\necho !(a)", ""),
    ],
)
def test_setup_has_to_be_shell(office: Office, lines: str, message: str) -> None:
    """Lines that bash cannot read, or that would swallow the rest of the script, are refused."""
    environment = {"setup": lines}
    if not message:
        assert "\necho !(a)\n\n" in office.render(own=False, environment=environment)
        return
    with pytest.raises(InputError) as caught:
        office.render(own=False, environment=environment)
    assert str(caught.value).startswith("environment.setup: bash cannot read it: ")
    assert message in caught.value.message
    assert "command line" in caught.value.hint


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("name", ["base", "srun"])
def test_an_ejected_template_changes_nothing(office: Office, name: str, whole: bool) -> None:
    """Until it is edited, scripts stay equal to the byte."""
    path = eject(name, office.templates, whole=whole)
    assert path == office.templates / f"{name}.sh.j2"
    assert office.render(launcher="srun") == office.render(own=False, launcher="srun")


def test_an_ejected_template_explains_every_block(office: Office) -> None:
    """And no other."""
    text = eject("srun", office.templates).read_text()
    listed = text.partition("order of the script:\n\n")[2].partition("#}")[0]
    blocks = {
        block.name
        for path in Path(own_directory()).glob("*.j2")
        for block in environment().parse(path.read_text()).find_all(jinja2.nodes.Block)
    }
    assert {line.split()[0] for line in listed.strip().split("\n")} == blocks


def test_an_existing_template_stays(tmp_path: Path) -> None:
    """Work is replaced with --force alone; a wrong name or place is refused."""
    path = eject("srun", tmp_path)
    path.write_text("mine")
    with pytest.raises(InputError, match="already exists"):
        eject("srun", tmp_path)
    assert path.read_text() == "mine"
    assert eject("srun.sh.j2", tmp_path, force=True).read_text() != "mine"
    with pytest.raises(InputError, match="must be one of base, horovodrun, mpirun, srun, torchrun"):
        eject("../srun", tmp_path)
    with pytest.raises(InputError, match="cannot be written: File exists"):
        eject("torchrun", path)


def test_the_list_shows_where_each_comes_from(office: Office) -> None:
    """The user's before hpml's of that name; parts that others include; faults before any job."""
    with eject("torchrun", office.templates).open("a") as stream:
        stream.write("{% block user %}{% include 'proxy.sh' %}{% endblock %}")
    office.write("proxy.sh", "export PROXY=1\n")
    listed = {template.name: template for template in templates(str(office.templates))}
    assert list(listed) == ["base", "horovodrun", "mpirun", "srun", "torchrun", "proxy.sh"]
    own = {name for name, template in listed.items() if template.origin != "hpml"}
    assert own == {"torchrun", "proxy.sh"}
    assert listed["torchrun"].blocks == ("user",)
    assert listed["srun"].purpose == "launcher srun"
    assert all(template.origin == "hpml" for template in templates())
    office.write("srun.sh.j2", "\n{% block user %}")
    with pytest.raises(InputError, match=r"srun\.sh\.j2:2: "):
        templates(str(office.templates))
    with pytest.raises(InputError, match="does not exist"):
        templates(str(office.templates / "none"))
