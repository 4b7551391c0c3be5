"""Whose data it is: the script's, and not that of a process in between."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

CODE = "from hpml_orchestrator.staging.caller import calling_process as c; print(c())"


def asked(script: str, shell: str = "bash") -> list[int]:
    """What a script's commands say; $ME is such a command, the first line is its own pid."""
    with tempfile.NamedTemporaryFile("w") as file:
        file.write(f"echo $$\n{script}\ntrue")
        file.flush()
        done = run([shell, file.name])
    return [int(line) for line in done.stdout.split()]


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        env={**os.environ, "ME": f"{sys.executable} -c '{CODE}'"},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )


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
sh -c 'eval "$ME"; true'
bash -ec 'timeout 50 sh -c "$ME"; true'
"""
    pid, *found = asked(script, shell)
    assert found == [pid] * 10


def test_another_script_is_another_owner(tmp_path: Path) -> None:
    """A script that a script calls has its own data."""
    (tmp_path / "inner").write_text('echo $$; eval "$ME"; true')
    pid, inner, found = asked(f"bash {tmp_path}/inner")
    assert inner != pid
    assert found == inner


@pytest.mark.parametrize("how", ["nohup", "setsid --wait"])
def test_a_command_that_outlives_its_shell_is_its_own_owner(how: str) -> None:
    """The shell that started it may be gone while it trains."""
    pid, inner, found = asked(f"""{how} sh -c 'echo $$; eval "$ME"; true' 2>/dev/null""")
    assert inner != pid
    assert found == inner


@pytest.mark.parametrize("runner", ["uv", "conda"])
def test_runners_of_environments_are_no_owners(tmp_path: Path, runner: str) -> None:
    """They start a process or a script and wait for it, as stand-ins of their names do here."""
    (tmp_path / "script").write_text('eval "$ME"; true')
    stand_in = "import subprocess, sys; subprocess.run(sys.argv[1:], check=True)"
    (tmp_path / runner).write_text(stand_in)
    run = f"{sys.executable} {tmp_path}/{runner}"
    words = f"bash {tmp_path}/script" if runner == "conda" else "sh -c 'eval \"$ME\"; true'"
    pid, found = asked(f"{run} {words}")
    assert found == pid


def test_ranks_of_a_step_have_one_owner(tmp_path: Path) -> None:
    """The daemon of the step, which every rank's shell has above it; a program of its name here."""
    step = tmp_path / "slurmstepd"
    shutil.copy("/bin/bash", step)
    (tmp_path / "rank").write_text('eval "$ME"; true')
    command = f"echo $$; bash {tmp_path}/rank; bash {tmp_path}/rank; true"
    _, pid, *found = asked(f"{step} -c '{command}'")
    assert found == [pid, pid]
