"""`hpml import`: where the job file goes, and what is said."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.unit.cli.support import Shell

SCRIPT = """\
#!/bin/bash
#SBATCH --time=5 --requeue
echo hello
python train.py --lr 0.1
"""
JOB = """\
# Made from job.sh by hpml import; relative paths count from this file.
# Not carried over: 1 line, see `hpml import`.
name: job
launcher: srun
script: train.py
args: [--lr, '0.1']
resources:
  time: 00:05:00
environment:
  setup: |
    echo hello
"""
REPORT = """\
job.sh:2: not carried over: --requeue
    hpml does not support requeue yet
    -> submit the job again by hand
job.sh:3: changed: echo hello
    kept in environment.setup: runs once, on the first node, before the ranks
"""


@pytest.fixture
def script(shell: Shell) -> str:
    """A script with one thing that cannot be carried over."""
    (shell.root / "job.sh").write_text(SCRIPT)
    return "job.sh"


def test_the_job_file_goes_to_standard_output_and_the_report_to_standard_error(
    hpml: Any, script: str
) -> None:
    """So that `hpml import job.sh > job.yaml` does what one thinks."""
    made = hpml("import", script)
    assert (made.code, made.out, made.err) == (0, JOB, REPORT)


def test_a_file_is_replaced_with_force_only(hpml: Any, script: str, shell: Shell) -> None:
    """What is there stays there, and nothing else is left."""
    assert hpml("import", script, "-o", "made.yaml").code == 0
    path = shell.root / "made.yaml"
    assert path.read_text() == JOB
    path.write_text("mine")
    refused = hpml("import", script, "-o", "made.yaml")
    assert refused.code == 2
    assert "exists already" in refused.err
    assert path.read_text() == "mine"
    assert hpml("import", script, "-o", "made.yaml", "--force").code == 0
    assert path.read_text() == JOB
    assert not list(shell.root.glob(".made*"))


def test_json_has_the_job_and_the_findings(hpml: Any, script: str) -> None:
    """Programs get all of it in one document."""
    made = hpml("import", script, "--json").json()
    assert made["output"] is None
    assert made["text"] == JOB
    assert made["job"]["args"] == ["--lr", "0.1"]
    assert made["findings"][0] == {
        "line": 2,
        "text": "--requeue",
        "kind": "lost",
        "why": "hpml does not support requeue yet",
        "todo": "submit the job again by hand",
    }


def test_what_is_made_is_rendered(hpml: Any, script: str) -> None:
    """The job file is one that hpml takes."""
    assert hpml("import", script, "-o", "taken.yaml").code == 0
    assert "--time=00:05:00" in hpml("render", "taken.yaml").out


@pytest.mark.parametrize(
    ("name", "text", "code", "part"),
    [
        ("pbs.sh", b"#!/bin/bash\n#PBS -l nodes=1\npython t.py\n", 2, "PBS"),
        ("binary.sh", b"\x7fELF\0\0", 2, "binary"),
        ("latin.sh", b"#!/bin/bash\n# \xe4\n", 2, "UTF-8"),
        ("open.sh", b"#!/bin/bash\npython 't.py\n", 2, "line 2"),
        ("missing.sh", None, 3, "no such script"),
    ],
)
def test_what_is_no_script_is_one_error(
    hpml: Any, shell: Shell, name: str, text: bytes | None, code: int, part: str
) -> None:
    """A line, a hint, the status, and nothing on standard output."""
    if text is not None:
        (shell.root / name).write_bytes(text)
    made = hpml("import", name, "-o", "never.yaml")
    assert made.code == code
    assert part in made.err
    assert "hint: " in made.err
    assert made.out == ""
    assert not (shell.root / "never.yaml").exists()


def test_toml_and_unwritable_places_are_refused(hpml: Any, script: str) -> None:
    """Before or after the work, with the file that was meant."""
    assert "written as YAML" in hpml("import", script, "-o", "job.toml").err
    made = hpml("import", script, "-o", "no/such/place.yaml")
    assert made.code == 2
    assert "cannot write" in made.err
