"""Whose data it is: the script's, and not that of a process in between."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hpml_orchestrator.staging.caller import calling_process

CODE = "from hpml_orchestrator.staging.caller import calling_process as c; print(c())"


def asked(script: str, shell: str = "bash") -> list[int]:
    """What a script's commands say; $ME is such a command, the first line is its own pid."""
    done = subprocess.run(
        [shell, "-c", f"echo $$\n{script}\ntrue"],
        env={**os.environ, "ME": f"{sys.executable} -c '{CODE}'"},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return [int(line) for line in done.stdout.split()]


@pytest.mark.parametrize("shell", ["bash", "sh"])
def test_a_scripts_commands_belong_to_the_script(shell: str) -> None:
    """Called plainly, in a substitution, in subshells, in a pipe, and by helpers."""
    script = """
eval "$ME"
echo $(eval "$ME"; true)
( ( eval "$ME"; true ); true )
eval "$ME" | cat
eval "timeout 50 $ME"
eval "env X=1 nice $ME"
echo $(eval "timeout 50 nice $ME"; true)
eval "xargs $ME" </dev/null
"""
    pid, *found = asked(script, shell)
    assert found == [pid] * 8


def test_another_script_is_another_owner() -> None:
    """A script that a script calls has its own data."""
    pid, inner, found = asked("""bash -c 'echo $$; eval "$ME"; true'""")
    assert inner != pid
    assert found == inner


def test_processes_that_are_gone_or_first() -> None:
    """A process whose parent is not known, or is the first one, is the answer itself."""
    assert calling_process(1) == 1
    assert calling_process(2**22 + 1) == 2**22 + 1
