"""Templates of a user's own change the script; what is wrong with them is told by file and line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jinja2.nodes
import pytest

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.runs.prepare import render_job
from hpml_orchestrator.runs.templates import eject, templates
from hpml_orchestrator.script import Capabilities
from hpml_orchestrator.script.template import environment, own_directory
from hpml_orchestrator.spec import load_job
from hpml_orchestrator.spec.site import Site
from hpml_orchestrator.spec.site_load import ResolvedSite

HERE = Capabilities(interpreter="/usr/bin/python3")
CHILD = '{% extends "hpml/torchrun.sh.j2" %}\n'


class Office:
    """A directory of templates, and a job that is rendered with them."""

    def __init__(self, root: Path) -> None:
        self.templates = root / "templates"
        self.templates.mkdir()
        self.job = root / "job.yaml"
        self.job.write_text(json.dumps({"name": "a", "script": "train.py", "args": ["$(x)"]}))

    def write(self, name: str, text: str | bytes) -> Path:
        path = self.templates / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    def render(self, text: str | bytes | None = None, **fields: Any) -> str:
        """The script, with that text as the template of torchrun."""
        if text is not None:
            self.write("torchrun.sh.j2", text)
        site = ResolvedSite(Site(templates=str(self.templates)))
        return render_job(load_job(self.job, list(fields.items())), HERE, site=site).script

    def block(self, name: str, text: str, **fields: Any) -> str:
        """The script, with that text as a block of torchrun's template, in line 2 of it."""
        return self.render(CHILD + "{% block " + name + " %}" + text + "{% endblock %}", **fields)

    def plain(self, **fields: Any) -> str:
        """The script without templates of the user's own."""
        return render_job(load_job(self.job, list(fields.items())), HERE).script


@pytest.fixture
def office(tmp_path: Path) -> Office:
    return Office(tmp_path)


@pytest.mark.parametrize(
    ("block", "text", "line"),
    [
        ("user", "export SITE={{ job.name }}\n", "export SITE=a"),
        ("user", "export SITE=1", "export SITE=1"),
        ("user", "export SITE={{ job.name }}", "export SITE=a"),
        ("user", "export SITE=1{%- if true %}{% endif %}\n", "export SITE=1"),
        ("directives", "{{ super() }}#SBATCH --licenses=a:1", "#SBATCH --licenses=a:1"),
        ("directives", "{{ super() }}#SBATCH --account=me  # mine", "#SBATCH --account=me  # mine"),
        ("directives", "{{ super() }}#SBATCH --nodes=1", "#SBATCH --nodes=1"),
        ("setup", "{{ super() }}echo more\n", "echo more"),
        ("user", "echo {{ job.args[0] }} {{ job.args[0] | safe }}", "echo '$(x)' '$(x)'"),
        ("user", "echo {{ 'a' ~ job.args[0] }}", "echo 'a$(x)'"),
        ("user", "{% macro m(x) %}echo {{ x }}{% endmacro %}{{ m(job.args[0]) }}", "echo '$(x)'"),
        ("user", "{% set x %}echo {{ job.args[0] }}{% endset %}{{ x }}", "echo '$(x)'"),
        ("user", '{% include "proxy.sh" %}', "export PROXY=1"),
    ],
)
def test_a_block_is_overridden_and_the_rest_stays(
    office: Office, block: str, text: str, line: str
) -> None:
    """Values are quoted once; a block in one line does not run into hpml's next line."""
    office.write("proxy.sh", "export PROXY=1\n")
    lines = office.block(block, text).split("\n")
    plain = office.plain().split("\n")
    assert line in lines
    assert [one for one in lines if one != line] == [one for one in plain if one != line] or (
        set(plain) <= set(lines)
    )


@pytest.mark.parametrize("text", ["{{ super() }}", "\n{{ super() }}\n"])
def test_a_block_that_changes_nothing(office: Office, text: str) -> None:
    """Every other line is hpml's."""
    assert office.block("agent", text).split() == office.plain().split()


def test_a_base_of_ones_own_counts_for_every_launcher(office: Office) -> None:
    """Its new blocks may be filled by the launchers' templates; hpml/NAME stays hpml's own."""
    new = "{% block user %}echo both\n{% block limits %}{% endblock %}{% endblock %}"
    office.write("base.sh.j2", '{% extends "hpml/base.sh.j2" %}' + new)
    office.write("hpml/torchrun.sh.j2", "#!/bin/bash\necho mine\n")
    own = '{% extends "base.sh.j2" %}{% block limits %}ulimit -n 9\n{% endblock %}'
    office.write("srun.sh.j2", own + "{% block ranks %}sleep 1 &\n{% endblock %}")
    assert "\necho both\n" in office.render()
    assert "\necho both\nulimit -n 9\n" in office.render(launcher="srun")
    assert "echo mine" not in office.render(CHILD)


def test_a_changed_template_counts_at_once(office: Office) -> None:
    """No text of a file is kept."""
    assert "\necho one\n" in office.block("user", "echo one")
    assert "\necho two\n" in office.block("user", "echo two")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{{ nme }}", "torchrun.sh.j2:2: 'nme' is undefined"),
        ("\n{{ job.nme }}", "torchrun.sh.j2:3: .*has no attribute 'nme'"),
        ("{% blok %}", "torchrun.sh.j2:2: .*unknown tag 'blok'"),
        ("{% if true %}", "torchrun.sh.j2:2: .*end"),
        ("{{ 'x' | nofilter }}", "torchrun.sh.j2:2: No filter named 'nofilter'"),
        ("{{ 1 / 0 }}", "torchrun.sh.j2:2: ZeroDivisionError"),
        ("{{ 'a;b' | directive }}", "torchrun.sh.j2:2: .*must not stand unquoted"),
        ("{% for i in range(10**9) %}{% endfor %}", "torchrun.sh.j2:2: OverflowError"),
        ('{% include "../secret.j2" %}', "torchrun.sh.j2:2: there is no template '../secret.j2'"),
        ('{% include "/etc/passwd" %}', "there is no template '/etc/passwd'"),
        ("{% endblock %}{% block usr %}", "torchrun.sh.j2:2: there is no block 'usr'"),
        ("{% endblock %}ulimit{% block ready %}", "torchrun.sh.j2:2: text outside of the blocks"),
        ("true\n#SBATCH --requeue\n", "no directive after the first command: #SBATCH --requeue"),
        ("true )", "bash cannot read the script: line .*syntax error"),
        ("cat <<END\nnothing ends this\n", "bash cannot read the script: .*here-document"),
        ("echo 'never closed\n", "bash cannot read the script: .*(EOF|syntax error)"),
    ],
)
def test_faults_name_file_and_line(office: Office, text: str, message: str) -> None:
    """What Jinja2, sbatch or bash would not take as it was meant."""
    (office.templates.parent / "secret.j2").write_text("secret")
    with pytest.raises(InputError, match=message) as caught:
        office.block("user", text)
    assert str(office.templates) in str(caught.value)
    assert (caught.value.field, caught.value.exit_code) == ("templates", 2)


@pytest.mark.parametrize(
    "trick",
    [
        "''.__class__",
        "job.__init__.__globals__",
        "job.resources.__dict__",
        "''|attr('__class__')",
        "[job]|map(attribute='__class__')|first",
        "'{0.__class__}'.format(job)",
        "job.parse_file('/etc/passwd')",
        "job.model_construct()",
        "job.model_config",
        "self.__init__.__globals__",
        "lipsum.__globals__",
        "job.args.append('x')",
        "directives.clear()",
    ],
)
def test_attribute_tricks_are_refused(office: Office, trick: str) -> None:
    """Nothing leads from a value to Python's insides, and no value is changed."""
    with pytest.raises(InputError, match=r"torchrun.sh.j2:2: (SecurityError|.*has no attribute)"):
        office.block("user", "{{ " + trick + " }}")


@pytest.mark.parametrize("block", ["setup", "finish", "agent", "ready"])
def test_a_script_without_the_claim_or_its_like_is_refused(office: Office, block: str) -> None:
    """A block that every job needs may be added to, not dropped; a comment does not stand in."""
    with pytest.raises(InputError, match=f"needs of the block '{block}'") as caught:
        office.block(block, "\n# claim finish agent\n")
    assert "super()" in caught.value.hint


@pytest.mark.parametrize(
    "line",
    [
        "--array=0-3",
        "--output=/tmp/out",
        "-o /tmp/out",
        "--open-mode=truncate",
        "--job-name=other",
        "--chdir=/tmp",
        "--export=NONE",
        "--nodes=2",
        "-N2",
        "--time=10",
        "--wrap=true",
        "--comment=x",
        "--requeue --nodes=2",
        "hetjob",
    ],
)
def test_a_directive_that_takes_the_job_from_hpml_is_refused(office: Office, line: str) -> None:
    """Added or changed, in whatever form."""
    with pytest.raises(InputError, match="a template cannot set this option") as caught:
        office.block("directives", "{{ super() }}#SBATCH " + line)
    assert f"#SBATCH {line}" in str(caught.value)


def test_a_directive_that_is_gone_is_named(office: Office) -> None:
    """A block without super() drops what the job asks for."""
    with pytest.raises(InputError, match="lacks `#SBATCH --job-name=a`") as caught:
        office.block("directives", "\n#SBATCH --nodes=1\n")
    assert "super()" in caught.value.hint


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"\xff\xfe", "is not UTF-8 text"),
        ("hello", "lacks what every job needs"),
        ('{% extends "torchrun.sh.j2" %}', "includes or extends itself"),
    ],
)
def test_what_is_no_template_is_refused(office: Office, text: str | bytes, message: str) -> None:
    """The directory is named."""
    with pytest.raises(InputError, match=message) as caught:
        office.render(text)
    assert str(office.templates) in str(caught.value)


def test_a_directory_that_does_not_exist(tmp_path: Path) -> None:
    """The field and its value are named."""
    with pytest.raises(InputError, match="no such directory") as caught:
        templates(str(tmp_path / "none"))
    assert (caught.value.field, caught.value.value) == ("templates", str(tmp_path / "none"))


def test_nothing_of_the_script_is_run(office: Office, tmp_path: Path) -> None:
    """Parsing it is all that bash does."""
    office.block("setup", "{{ super() }}touch " + str(tmp_path / "made"))
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("true\nfi", "line 2: syntax error near unexpected token `fi'"),
        ("true\necho 'a\n", "line 2: unexpected EOF while looking for"),
        ("if true\nthen", "syntax error: unexpected end of file"),
        ("true\ncat <<END\nhpml", "here-document"),
        ("shopt -s extglob\r\necho !(a)", ""),
    ],
)
def test_setup_has_to_be_shell(office: Office, lines: str, message: str) -> None:
    """Lines that bash cannot read, or that would swallow the rest of the script, are refused."""
    office.job.write_text(
        json.dumps({"name": "a", "command": ["true"], "environment": {"setup": lines}})
    )
    if not message:
        assert "\necho !(a)\n\n" in office.plain()
        return
    with pytest.raises(InputError) as caught:
        office.plain()
    assert caught.value.message.startswith("environment.setup: bash cannot read it: ")
    assert message in caught.value.message
    assert "job file" in caught.value.hint


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("name", ["base", "srun", "torchrun"])
def test_an_ejected_template_changes_nothing(office: Office, name: str, whole: bool) -> None:
    """Until it is edited, scripts stay equal to the byte."""
    path = eject(name, office.templates, whole=whole)
    assert path == office.templates / f"{name}.sh.j2"
    for launcher in ("srun", "torchrun"):
        assert office.render(launcher=launcher) == office.plain(launcher=launcher)


def test_an_ejected_template_explains_every_block(office: Office) -> None:
    """And no other."""
    text = eject("srun", office.templates).read_text()
    listed = text.partition("order of the script:\n\n")[2].partition("#}")[0]
    blocks = {
        block.name
        for path in Path(own_directory()).iterdir()
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


def test_the_list_says_where_each_comes_from(office: Office) -> None:
    """The user's before hpml's of that name; parts that others include; the blocks of each."""
    with eject("torchrun", office.templates).open("a") as stream:
        stream.write("{% block user %}{% include 'proxy.sh' %}{% endblock %}")
    office.write("proxy.sh", "export PROXY=1\n")
    found = {template.name: template for template in templates(str(office.templates))}
    assert list(found) == ["base", "horovodrun", "mpirun", "srun", "torchrun", "proxy.sh"]
    own = {name for name, template in found.items() if template.origin != "hpml"}
    assert own == {"torchrun", "proxy.sh"}
    assert found["torchrun"].blocks == ("user",)
    assert found["base"].blocks[:2] == ("directives", "setup")
    assert found["srun"].purpose == "launcher srun"
    assert found["proxy.sh"].purpose == "a part, for others to include"
    assert all(template.origin == "hpml" for template in templates())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"\n{% block user %}", r"srun\.sh\.j2:2: "),
        (b"\xff", "is not UTF-8"),
        (b'{% extends "hpml/srun.sh.j2" %}{% block usr %}true{% endblock %}', "no block 'usr'"),
    ],
)
def test_the_list_reports_faulty_templates(office: Office, text: bytes, message: str) -> None:
    """Before any job is rendered."""
    office.write("srun.sh.j2", text)
    with pytest.raises(InputError, match=message):
        templates(str(office.templates))
