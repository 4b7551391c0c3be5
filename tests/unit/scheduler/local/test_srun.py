"""The local srun starts, labels, signals and ends tasks as the real one does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpml_orchestrator.records.process import read_stat
from hpml_orchestrator.scheduler.local import srun as local_srun
from hpml_orchestrator.scheduler.local.srun import OptionError, parse
from tests.patience import PATIENCE_SECONDS, eventually

SRUN = str(Path(local_srun.__file__))


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-I", "-S", SRUN, *arguments]


def environment(**more: str) -> dict[str, str]:
    kept = {n: v for n, v in os.environ.items() if not n.startswith(("SLURM_", "HPML_"))}
    return {**kept, "HPML_LOCAL_KILL_WAIT": "0.3", **more}


def srun(
    *arguments: str, given: str = "", where: Path = Path(), **more: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments),
        cwd=where,
        input=given,
        env=environment(**more),
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )


def test_sets_the_variables_of_each_task(tmp_path: Path) -> None:
    """Every task knows its place; the count comes from the job when no option gives it."""
    show = "echo $SLURM_PROCID $SLURM_LOCALID $SLURM_NODEID $SLURM_NTASKS $SLURM_STEP_NUM_TASKS"
    done = srun("sh", "-c", show, SLURM_NTASKS="3")
    assert sorted(done.stdout.splitlines()) == ["0 0 0 3 3", "1 1 0 3 3", "2 2 0 3 3"]
    assert srun("--ntasks=1", "sh", "-c", show, SLURM_NTASKS="3").stdout == "0 0 0 1 1\n"
    assert srun("true").returncode == 0


def test_step_ids_increase(tmp_path: Path) -> None:
    """Each srun of a job gets the next id."""
    words = ("sh", "-c", "echo $SLURM_STEP_ID $SLURM_STEPID")
    found = [srun(*words, HPML_LOCAL_STEPS=str(tmp_path)).stdout for _ in "123"]
    assert found == ["0 0\n", "1 1\n", "2 2\n"]


def test_returns_the_highest_exit_code() -> None:
    """As the real one; a signalled task counts 128 and its signal."""
    done = srun("--ntasks=4", "sh", "-c", "exit $SLURM_PROCID")
    assert done.returncode == 3
    assert "task 2: Exited with exit code 2" in done.stderr
    assert srun("sh", "-c", "kill -9 $$").returncode == 128 + 9


def test_says_what_cannot_be_executed(tmp_path: Path) -> None:
    """The status is the errno, as the real one's."""
    done = srun("no-such-command")
    assert (done.returncode, "no-such-command" in done.stderr) == (2, True)
    assert srun(str(tmp_path)).returncode == 13


def test_standard_input_goes_to_task_0() -> None:
    """The others read nothing."""
    done = srun("--ntasks=2", "sh", "-c", "echo $SLURM_PROCID:$(cat)", given="hello")
    assert sorted(done.stdout.splitlines()) == ["0:hello", "1:"]


@pytest.mark.parametrize(
    ("trap", "kill_wait", "status"),
    [("touch told; exit 0", "600", 3), ("", "0.3", 128 + 9)],
    ids=["listens", "ignores"],
)
def test_kill_on_bad_exit_ends_the_others(
    tmp_path: Path, trap: str, kill_wait: str, status: int
) -> None:
    """One failure brings SIGTERM to the others and then SIGKILL to who ignores it."""
    script = (
        "if [ $SLURM_PROCID = 1 ]; then\n"
        "while ! [ -e begun ]; do sleep .01; done; exit 3; fi\n"
        f"trap '{trap}' TERM; sleep 600 & echo $! > child; touch begun\n"
        "while :; do sleep .05; done"
    )
    words = ("--kill-on-bad-exit=1", "--ntasks=2", "bash", "-c", script)
    done = srun(*words, where=tmp_path, HPML_LOCAL_KILL_WAIT=kill_wait)
    assert done.returncode == status
    assert (tmp_path / "told").exists() == (trap != "")
    child = int((tmp_path / "child").read_text())
    eventually(lambda: (stat := read_stat(child)) is None or stat.ended)


def test_without_kill_on_bad_exit_the_others_go_on() -> None:
    """A failed task alone ends nothing."""
    done = srun("--ntasks=2", "sh", "-c", "[ $SLURM_PROCID = 0 ] && exit 1; sleep .3; echo done")
    assert (done.returncode, done.stdout) == (1, "done\n")


def test_wait_limits_the_stragglers() -> None:
    """So many seconds after the first end the rest is killed."""
    begin = time.monotonic()
    done = srun("--wait=1", "--ntasks=2", "sh", "-c", "[ $SLURM_PROCID = 0 ] || sleep 600")
    assert done.returncode == 128 + 9
    assert time.monotonic() - begin >= 1


def test_what_a_task_leaves_behind_ends_with_the_step(tmp_path: Path) -> None:
    """Grandchildren in the task's group die with it."""
    srun("bash", "-c", f"sleep 600 & echo $! > {tmp_path}/pid")
    child = int((tmp_path / "pid").read_text())
    eventually(lambda: (stat := read_stat(child)) is None or stat.ended)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP"])
def test_forwards_signals(tmp_path: Path, name: str) -> None:
    """Every task gets the signal; their answer is srun's."""
    script = (
        f"trap 'exit 7' {name[3:]}; touch {tmp_path}/$SLURM_PROCID; while :; do sleep .05; done"
    )
    with subprocess.Popen(
        command("--ntasks=2", "bash", "-c", script), env=environment()
    ) as process:
        eventually((tmp_path / "0").exists)
        eventually((tmp_path / "1").exists)
        process.send_signal(getattr(signal, name))
        assert process.wait(PATIENCE_SECONDS) == 7


def test_knows_the_options_of_hpmls_scripts() -> None:
    """Those without a meaning here, and -- before the command."""
    text = (
        "--overlap --nodes=1 --ntasks=2 --ntasks-per-node=2 --cpu-bind=none --mpi=none "
        "--kill-on-bad-exit=1 --wait=60 --export=ALL -- python -n 9"
    )
    numbers, command = parse(text.split())
    asked = {"nodes": 1, "ntasks": 2, "ntasks-per-node": 2, "kill-on-bad-exit": 1, "wait": 60}
    assert (numbers, command) == (asked, ["python", "-n", "9"])


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--multi-prog", "x"], "--multi-prog"),
        (["-n2", "x"], "-n2: the local backend does not know"),
        (["--nodes=2", "x"], "one node"),
        (["--export=NONE", "x"], "NONE"),
        (["--ntasks", "2", "x"], "--ntasks"),
        (["--ntasks=two", "x"], "--ntasks=two"),
        (["--ntasks=2"], "no command"),
        (["--cpu-bind=none,help", "x"], "none,help"),
    ],
)
def test_refuses_what_it_cannot_honour(arguments: list[str], part: str) -> None:
    """The message names the option."""
    with pytest.raises(OptionError, match=part):
        parse(arguments)


def test_a_wrong_option_is_exit_status_2() -> None:
    """Nothing is started then."""
    done = srun("--multi-prog", "echo", "x")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--multi-prog" in done.stderr
