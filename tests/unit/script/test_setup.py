"""`environment.setup`: shell lines of the user's own run in the job; one that fails ends it."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import subprocess

    from tests.unit.script.conftest import Sandbox

# As environment modules and conda write theirs: nothing for `set -eu`.
LOOSE = """\
ls /nowhere 2>/dev/null
helper() { false; true; }
helper
trap 'echo "their trap"' EXIT
[ -n "$UNSET" ] || LOOSE=sourced
"""


def start(sandbox: Sandbox, lines: str) -> tuple[str, subprocess.CompletedProcess[bytes], Any]:
    """Run a job with these lines; return its script, how it ended, and the record of that."""
    (sandbox.root / "loose.sh").write_text(LOOSE)
    ranks = 'exec "$0" "$1" "$(ulimit -n)" "$LOOSE"'
    fields: dict[str, Any] = {
        "name": "probe",
        "launcher": "srun",
        "command": ["bash", "-c", ranks, sys.executable, str(sandbox.root / "recorder.py")],
        "environment": {"setup": lines, "variables": {"LATER": "variables"}},
    }
    done = sandbox.start(sandbox.load(fields).job)
    script = (sandbox.submission / "job.sh").read_text()
    (path,) = sandbox.submission.glob("runs/*/attempts/0/ended.json")
    return script, done, json.loads(path.read_text())


def test_ranks_find_what_the_lines_did(sandbox: Sandbox) -> None:
    """The lines stand word for word; their directory, exports and limits reach the ranks."""
    lines = """\
export VALUE=$(false; echo "it's")
false || echo "$UNSET"
source ./loose.sh
mkdir sub; cd sub; export LOOSE LATER=lines
ulimit -n 321
cat; read -r _ || true
trap 'echo mine' EXIT TERM
(trap 'echo subshell' EXIT)
(exit 3) & wait; set -xfCe; IFS=,; false || :
echo done \\"""
    script, done, ended = start(sandbox, lines)
    assert done.returncode == 0, done.stderr.decode()
    assert f"\n{lines}\n\n" in script
    seen = json.loads((sandbox.root / "record.json").read_text())
    assert seen["cwd"] == str(sandbox.root / "sub")
    assert seen["argv"] == ["321", "sourced"]
    assert (seen["env"]["VALUE"], seen["env"]["LATER"]) == ("it's", "variables")
    assert "subshell" in done.stdout.decode()
    assert "trap" not in done.stdout.decode()  # theirs: hpml's wrote the end
    assert ended["reason"] == "completed"


@pytest.mark.parametrize(
    ("lines", "line", "code", "command"),
    [
        ("true\n\nsource /no/where.sh", 3, 1, "source /no/where.sh"),
        ("f() {\n  (exit 4)\n  true\n}\nf", 2, 4, "(exit 4)"),
        ("if true; then\n  ls /no | cat\nfi", 2, 2, "ls /no | cat"),
        ("source ./loose.sh || exit 5\n[ 1 = 2 ] && true\nunknown", 3, 127, "unknown"),
        ("trap 'echo mine' EXIT; trap : ERR\nfalse", 2, 1, "false"),
        ("trap 'echo mine' EXIT\nset -e\nexit 6", 0, 6, ""),
        ("exit 0", 0, 1, ""),
        ("X=1\nset -u\necho $MISSING", 0, 1, ""),
    ],
)
def test_a_line_that_fails_ends_the_job(
    sandbox: Sandbox, lines: str, line: int, code: int, command: str
) -> None:
    """Its number and status stand in the output and the record; no rank starts, agents are gone."""
    _, done, ended = start(sandbox, lines)
    assert done.returncode == code
    assert not (sandbox.root / "record.json").exists()
    message = f"hpml: environment.setup, line {line}: exited with {code}: {command}"
    reason = f"environment.setup, line {line}, exited with {code}"
    assert (message in done.stderr.decode()) == bool(line)
    expected = reason if line else "environment.setup ended the script"
    assert (ended["exit_code"], ended["reason"]) == (code, expected)
    assert "mine" not in done.stdout.decode()
    assert list(sandbox.submission.glob("runs/*/attempts/0/over"))
