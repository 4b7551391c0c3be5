"""A user's templates change the script; errors in them have file and line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.runs.load import load_job
from hpml_orchestrator.runs.prepare import render_job
from hpml_orchestrator.script.render import Capabilities
from hpml_orchestrator.site.model import ResolvedSite, Site

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
        return render_job(load_job(self.job, list(fields.items()), site), HERE).script

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
        ("directives", "{{ super() }}#SBATCH --licenses=a:1\n", "#SBATCH --licenses=a:1"),
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
    """Values are quoted once."""
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
        ("user", "true )", "bash cannot read the script: line .*syntax error"),
        ("user", "cat <<END\nnothing ends this\n", "cannot read the script: .*here-document"),
    ],
)
def test_faults_name_file_and_line(office: Office, block: str, text: str, message: str) -> None:
    """Templates that Jinja2 or bash refuses."""
    (office.templates.parent / "secret.j2").write_text("secret")
    with pytest.raises(InputError, match=message) as caught:
        office.block(block, text)
    assert str(office.templates) in str(caught.value)
    assert (caught.value.field, caught.value.exit_code) == ("templates", 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{% extends "torchrun.sh.j2" %}', "torchrun.sh.j2: extends itself"),
        ("just text", "the script does not begin with #!"),
        ("", "the script does not begin with #!"),
    ],
)
def test_a_template_that_extends_nothing_of_hpmls(office: Office, text: str, message: str) -> None:
    """Without the prefix `hpml/`, or written from nothing: refused before sbatch sees it."""
    office.write("torchrun.sh.j2", text)
    with pytest.raises(InputError, match=message) as caught:
        office.render()
    assert "hpml/NAME.sh.j2" in caught.value.hint


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


def test_a_child_without_blocks_changes_nothing(office: Office) -> None:
    """The script stays equal to the byte; a directory that is missing is refused."""
    office.write("torchrun.sh.j2", '{% extends "hpml/torchrun.sh.j2" %}')
    assert office.render() == office.render(own=False)
    office.templates = office.templates / "none"
    with pytest.raises(InputError, match="templates: does not exist"):
        office.render()
