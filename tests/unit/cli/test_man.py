"""Manual pages and command reference come from the commands, are current and correct roff."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest

from hpml_orchestrator.cli.main import COMMANDS
from tests.unit.cli.support import HPML, Hpml, Shell, in_terminal

ROOT = Path(__file__).parents[3]
PAGES = ROOT / "docs" / "man" / "man1"
LINTERS = ["groff -Kutf8 -ww -man -z", "mandoc -Tlint -Werror"]


def test_pages_and_reference_are_current() -> None:
    """`make docs` after a change of commands: the wheel installs these pages."""
    made = runpy.run_path(str(ROOT / "docs" / "make_commands.py"))
    assert (ROOT / "docs" / "commands.md").read_text("utf-8") == made["markdown"]()
    assert {path.name: path.read_text("utf-8") for path in PAGES.iterdir()} == made["pages"]()
    assert {f"hpml-{name}.1" for name in COMMANDS} < {path.name for path in PAGES.iterdir()}


@pytest.mark.parametrize("linter", LINTERS)
def test_a_page_is_correct_roff(linter: str) -> None:
    """No formatter warns of any page."""
    words = linter.split()
    if shutil.which(words[0]) is None:
        pytest.skip(f"NOT TESTED: {words[0]} is not installed (apt-get install groff mandoc)")
    for path in sorted(PAGES.iterdir()):
        done = subprocess.run([*words, path], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, ""), (path.name, done.stdout)


def test_man_in_a_pipe_and_on_a_terminal(hpml: Hpml, shell: Shell) -> None:
    """The command's help without a terminal or without man(1); else the manual page."""
    shown = hpml("man", "submit")
    assert (shown.code, shown.err) == (0, "")
    assert "Submit a job and return immediately." in shown.out
    assert hpml("man", "hpml-submit").out == shown.out
    assert "--older" in hpml("man", "stage", "clean").out
    if shutil.which("man") is None or shutil.which("groff") is None:
        pytest.skip("NOT TESTED: man is not installed (apt-get install man-db groff)")
    environment = {**shell.environment(), "TERM": "xterm", "PAGER": "cat", "MANPAGER": "cat"}
    page = re.sub("\x1b.*?m|.\b", "", in_terminal([HPML, "man", "wait"], environment))
    assert re.search(r"hpml.wait\(1\) +hpml manual +hpml.wait\(1\)", page, re.IGNORECASE)


def test_pages_are_installed(hpml: Hpml, tmp_path: Path) -> None:
    """All of them, where man(1) finds them; a wrong call writes nothing."""
    assert hpml("man", "--output", str(tmp_path)).code == 0
    assert len(list((tmp_path / "man1").iterdir())) == len(list(PAGES.iterdir()))
    (tmp_path / "file").write_text("")
    wrong = hpml("man", "sumbit")
    assert wrong.refuses(2, "COMMAND: no such command (got 'sumbit')\nhint: did you mean submit?")
    wrong = hpml("man", "--output", str(tmp_path / "file"))
    assert wrong.refuses(2, "--output: cannot be written")
