"""The entry point: Ctrl-C before any command holds it back."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

LOADING = """
import os, signal, sys, types
from hpml_orchestrator.cli.__main__ import run
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "hpml_orchestrator.cli.main":
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt:
                pass  # lost, as in a callback of the import system
sys.meta_path.insert(0, Finder())
run()
"""
BEGINNING = """
import os, signal, sys, types
main = types.ModuleType("main")
main.main = lambda: os.kill(os.getpid(), signal.SIGINT)
sys.modules["hpml_orchestrator.cli.main"] = main
from hpml_orchestrator.cli.__main__ import run
run()
"""


@pytest.mark.parametrize("code", [LOADING, BEGINNING], ids=["loading", "beginning"])
def test_ctrl_c_at_the_very_beginning_ends_without_a_traceback(code: str) -> None:
    """While modules are loaded, and before the command is known."""
    done = subprocess.run(
        [sys.executable, "-c", code, "--version"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_shell_that_ignores_ctrl_c_is_obeyed() -> None:
    """As `hpml … &` of a script has it."""
    done = subprocess.run(
        [sys.executable, "-c", LOADING, "--version"],
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0
    assert done.stdout
