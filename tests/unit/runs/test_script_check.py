"""What templates of the user's own make is a script that sbatch and bash take as hpml meant it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.runs.prepare import render_job
from hpml_orchestrator.script import Capabilities
from hpml_orchestrator.spec import load_job
from hpml_orchestrator.spec.site import Site
from hpml_orchestrator.spec.site_load import ResolvedSite

HERE = Capabilities(interpreter="/usr/bin/python3")
CHILD = '{% extends "hpml/srun.sh.j2" %}\n'


class Office:
    """A template of the user's own, and a job that is rendered with it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.template = root / "templates" / "srun.sh.j2"
        self.template.parent.mkdir()

    def render(self, block: str, text: str, **fields: Any) -> str:
        """The script, with that text behind hpml's own in a block."""
        path = self.root / "job.yaml"
        job = {"name": "a", "command": ["true"], "launcher": "srun", **fields}
        path.write_text(json.dumps(job))
        whole = "{% block " + block + " %}\n{{ super() }}\n" + text + "{% endblock %}\n"
        self.template.write_text(CHILD + whole)
        rules = Site.model_validate(
            {
                "templates": str(self.template.parent),
                "directives": {"gpus-per-node": {"rename": "--gres=gpu:{item}"}},
            }
        )
        return render_job(load_job(path), HERE, site=ResolvedSite(rules)).script

    def refused(self, block: str, text: str, words: str, **fields: Any) -> InputError:
        """The error of that text, which must say `words`."""
        with pytest.raises(InputError, match=words) as caught:
            self.render(block, text, **fields)
        assert caught.value.field == "templates"
        assert caught.value.exit_code == 2
        return caught.value


@pytest.fixture
def office(tmp_path: Path) -> Office:
    return Office(tmp_path)


@pytest.mark.parametrize(
    "line",
    [
        "--array=0-3",
        "-o /tmp/out",
        "--output=/tmp/out",
        "-e /tmp/err",
        "--open-mode=truncate",
        "--job-name=other",
        "-J other",
        "-D /tmp",
        "--chdir=/tmp",
        "--export=NONE",
        "--open=truncate",
        "--nodes=2",
        "-N2",
        "-n 8",
        "--cpus-per-task=9",
        "--gpus=4",
        "--gres=gpu:4",
        "--time=10",
        "--mem=1G",
        "--wrap=true",
        "--comment=x",
    ],
)
def test_a_directive_that_takes_the_job_from_hpml_is_refused(office: Office, line: str) -> None:
    """Added or changed, in any of sbatch's spellings: the template's line is named."""
    resources = {"gpus": 2, "memory": "2G"}
    text = f"#SBATCH --requeue\n#SBATCH {line}\n"
    error = office.refused("directives", text, "hpml", resources=resources)
    assert f"{office.template}:5: " in str(error), "the super() and --requeue stand above"


def test_other_directives_of_a_template_are_taken(office: Office) -> None:
    """What hpml does not write for this job is the user's; so is a line that changes nothing."""
    text = "#SBATCH --requeue --licenses=fs:1\n#SBATCH -N 1\n#SBATCH --account=me # mine\n"
    assert text in office.render("directives", text)


def test_a_directive_that_is_gone_is_told(office: Office) -> None:
    """A block without super() drops what the job asks for."""
    office.render("user", "")
    office.template.write_text(CHILD + "{% block directives %}\n#SBATCH -N 1\n{% endblock %}\n")
    asked = load_job(office.root / "job.yaml")
    site = ResolvedSite(Site(templates=str(office.template.parent)))
    with pytest.raises(InputError, match="lacks `#SBATCH --job-name=a`") as caught:
        render_job(asked, HERE, site=site)
    assert "super()" in caught.value.hint


def test_a_directive_behind_the_first_command_is_refused(office: Office) -> None:
    """Sbatch does not read it any more, so that it would have no effect."""
    error = office.refused("user", "true\n#SBATCH --requeue\n", "behind the first command")
    assert f"{office.template}:5: " in str(error)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("hetjob", "heterogeneous"),
        ("--licenses='x", "unmatched '"),
        ("--licenses", "value is missing"),
    ],
)
def test_a_header_that_sbatch_would_not_take_is_refused(
    office: Office, line: str, words: str
) -> None:
    """With the line of the template."""
    error = office.refused("directives", f"#SBATCH {line}\n", words)
    assert f"{office.template}:4: " in str(error)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("true\nif then\n", 5),
        ("true )\n", 4),
        ("cat <<END\nnothing ends this\n", 4),
    ],
)
def test_broken_shell_is_refused(office: Office, text: str, line: int) -> None:
    """Bash reads the script and runs nothing; the line of the template is named."""
    error = office.refused("user", text, "bash cannot read the script")
    assert f"{office.template}:{line}: " in str(error)


@pytest.mark.parametrize("text", ["if true; then\n", "echo 'never closed\n", "echo $(true\n"])
def test_what_is_left_open_is_refused(office: Office, text: str) -> None:
    """Bash finds it far behind the mistake, and some versions do not say where it began."""
    error = office.refused("user", text, "bash cannot read the script")
    assert str(office.template.parent) in str(error)


def test_nothing_of_the_script_is_run(office: Office, tmp_path: Path) -> None:
    """Reading it is all that bash does."""
    made = tmp_path / "made"
    office.render("setup", f"touch {made}\n")
    assert not made.exists()


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("true\nfi", "line 2: bash cannot read it: syntax error near unexpected token `fi'"),
        ("true\necho 'a\n", "line 2: bash cannot read it: unexpected EOF while looking for"),
        ("if true\nthen", "line 3: bash cannot read it: syntax error: unexpected end of file"),
        ("true\ncat <<END\nhpml", "line 2: bash cannot read it: warning: here-document"),
        ("shopt -s extglob\r\necho !(a)", ""),
    ],
)
def test_setup_has_to_be_shell(office: Office, lines: str, said: str) -> None:
    """Lines that bash cannot read, or that would swallow the rest of the script, are refused."""
    path = office.root / "job.yaml"
    job = {"name": "a", "command": ["true"], "environment": {"setup": lines}}
    path.write_text(json.dumps(job))
    if not said:
        assert "\necho !(a)\n\n" in render_job(load_job(path), HERE).script
        return
    with pytest.raises(InputError) as caught:
        render_job(load_job(path), HERE)
    assert caught.value.message.startswith(f"environment.setup: {said}")
    assert "job file" in caught.value.hint
