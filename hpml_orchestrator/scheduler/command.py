"""Run a scheduler's client commands: the only module of this package that starts processes.

Code takes a `Runner`; tests pass `hpml_orchestrator.testing.runner.FakeRunner`.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from hpml_orchestrator.errors import NotFoundError, SchedulerUnavailable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

_SLURM_COMMANDS = frozenset(
    "sacct sacctmgr sbatch scancel scontrol sdiag sinfo squeue srun sshare".split()
)
SLURM_PATH_HINT = "is Slurm on PATH? On a machine without Slurm use --local"


class CommandMissing(SchedulerUnavailable):
    """The client command is not installed here, or not on PATH."""


class ConfigurationMissing(CommandMissing):
    """Slurm's commands exist, but the configuration that the environment names does not."""


@dataclass(frozen=True)
class Completed:
    """How a command ended: exit status (negative: minus the signal) and its output."""

    returncode: int
    stdout: str = ""
    stderr: str = ""


class Clock(Protocol):
    """The time functions that loops need; implemented by the module `time` and by `FakeClock`."""

    def time(self) -> float:
        """Return seconds since the epoch."""
        ...

    def monotonic(self) -> float:
        """Return a monotonic time in seconds."""
        ...

    def sleep(self, seconds: float, /) -> None:
        """Sleep for some seconds."""
        ...


class Runner(Protocol):
    """Starts one command; never through a shell, always with standard input closed."""

    def run(self, argv: Sequence[str], *, env: Mapping[str, str], timeout: float) -> Completed:
        """Run a command and return its output.

        Args:
            argv: command and arguments.
            env: its complete environment.
            timeout: seconds after which it is killed.

        Raises:
            CommandMissing: the command does not exist.
            SchedulerUnavailable: it timed out.
        """
        ...

    def run_detached(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        timeout: float,
        cwd: Path,
        stdout: Path,
        stderr: Path,
    ) -> int:
        """Run a command that may outlive this process, and return its exit status.

        Its output goes to files. It has its own session, so that Ctrl-C or a hang-up of the
        terminal does not reach it, and is never killed: after `timeout` it continues alone.

        Raises:
            CommandMissing: the command does not exist.
            SchedulerUnavailable: it timed out; it is still running.
        """
        ...


class SubprocessRunner:
    """The real `Runner`."""

    def __init__(self) -> None:
        self._left: list[subprocess.Popen[bytes]] = []

    def run(self, argv: Sequence[str], *, env: Mapping[str, str], timeout: float) -> Completed:
        """Run a command and return its output; see `Runner.run`."""
        check_configuration(argv[0], env)
        began = time.monotonic()
        try:
            done = subprocess.run(
                list(argv),
                env=dict(env),
                timeout=timeout,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            _log(argv, began, "no answer")
            raise SchedulerUnavailable(f"{argv[0]} gave no answer in {timeout:g} s") from error
        except OSError as error:
            raise _cannot_start(argv[0], error) from error
        _log(argv, began, done.returncode)
        return Completed(
            done.returncode,
            # Job names and paths are bytes to Linux and need not be UTF-8. They must survive the
            # round trip, because a job is recognised by its directory.
            done.stdout.decode("utf-8", "surrogateescape"),
            done.stderr.decode("utf-8", "surrogateescape"),
        )

    def run_detached(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        timeout: float,
        cwd: Path,
        stdout: Path,
        stderr: Path,
    ) -> int:
        """Run a command that outlives us; see `Runner.run_detached`."""
        check_configuration(argv[0], env)
        began = time.monotonic()
        try:
            # Files rather than pipes: they outlive this process. If hpml is killed while sbatch
            # runs, its output still reaches the disk, where recovery reads it.
            with open(stdout, "wb") as out, open(stderr, "wb") as err:
                process = subprocess.Popen(
                    list(argv),
                    env=dict(env),
                    cwd=cwd,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    # Ctrl-C signals the terminal's whole process group. sbatch must not die between
                    # the request and the answer.
                    start_new_session=True,
                )
        except OSError as error:
            if not cwd.is_dir():
                raise NotFoundError(f"no such directory: {cwd}") from error
            raise _cannot_start(argv[0], error) from error
        try:
            status = process.wait(timeout)
        except BaseException as error:
            self._left.append(process)  # reap it later, but never kill it
            _log(argv, began, "not ended")
            if isinstance(error, subprocess.TimeoutExpired):
                raise SchedulerUnavailable(
                    f"{argv[0]} has not ended in {timeout:g} s and still works"
                ) from error
            raise
        _log(argv, began, status)
        return status


def check_configuration(command: str, env: Mapping[str, str]) -> None:
    """Refuse to start a Slurm command that would search for its configuration for a minute.

    Raises:
        ConfigurationMissing: SLURM_CONF names a missing file.
    """
    path = env.get("SLURM_CONF", "")
    # libslurm retries a missing configuration for 60 s before it gives up, so a typo would look
    # like a dead controller.
    if path and os.path.basename(command) in _SLURM_COMMANDS and not os.path.exists(path):
        raise ConfigurationMissing(
            f"SLURM_CONF names {path}, which does not exist",
            hint="unset SLURM_CONF, or set it to the slurm.conf of your cluster",
        )


def _log(argv: Sequence[str], began: float, outcome: int | str) -> None:
    """Log a command, its duration and any exit status but 0: `hpml --verbose` shows it."""
    logging = sys.modules.get("logging")  # importing takes 10 ms; --verbose has already imported it
    if logging is not None:
        status = f"exit status {outcome}" if isinstance(outcome, int) else outcome
        text = f"{shlex.join(argv)}: {time.monotonic() - began:.2f} s"
        logging.getLogger(__name__).debug("%s%s", text, f", {status}" if outcome else "")


def _cannot_start(command: str, error: OSError) -> SchedulerUnavailable:
    if isinstance(error, FileNotFoundError):
        return CommandMissing(f"there is no command {command}", hint=SLURM_PATH_HINT)
    return SchedulerUnavailable(
        f"cannot start {command}: {error.strerror or error}", hint=SLURM_PATH_HINT
    )


# The variables of the user's environment that a job inherits, for every backend.

# A submission from inside a job, such as `srun --pty bash`, carries the outer job's variables.
# Leaked SLURM_, SBATCH_ or SRUN_ values change the size and binding of nested steps.
_DROPPED_PREFIXES = tuple(
    "SLURM_ SLURMD_ SBATCH_ SRUN_ SALLOC_ SQUEUE_ SACCT_ SINFO_ SCANCEL_ PMI_ PMI2_ PMIX_ OMPI_ "
    "PRTE_ HPML_ PET_ TORCHELASTIC_ HOROVOD_ SSH_ XDG_SESSION_ TMUX".split()
)
_DROPPED = frozenset(
    # launchers set these; values of the submitting host mean nothing on the node
    "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK NODE_RANK MASTER_ADDR MASTER_PORT "
    "TMPDIR TMP TEMP HOSTNAME HOST PWD OLDPWD SHLVL _ BASH_ENV ENV CUDA_VISIBLE_DEVICES "
    "ROCR_VISIBLE_DEVICES DISPLAY XAUTHORITY XDG_RUNTIME_DIR DBUS_SESSION_BUS_ADDRESS "
    "WINDOWID TERM_SESSION_ID STY".split()
)
# Open MPI refuses to start as root, the usual user in a container, unless these are set.
_KEPT = frozenset({"SLURM_CONF", "OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"})
_MINIMAL = frozenset(
    "HOME USER LOGNAME SHELL PATH LANG LANGUAGE TZ TERM MAIL MODULEPATH MODULESHOME LMOD_CMD "
    "LMOD_DIR LMOD_PKG BASH_FUNC_module%% BASH_FUNC_ml%% SLURM_CONF".split()
)


def job_environment(environment: Mapping[str, str], inherit: str) -> dict[str, str]:
    """Return the variables that a job starts with.

    Args:
        environment: environment of the submitting process.
        inherit: `all` for everything except variables of the submitting session, of schedulers and
            of launchers; `minimal` for those of every login session.
    >>> job_environment({"PATH": "/bin", "SLURM_JOB_ID": "1", "TOKEN": "x"}, "minimal")
    {'PATH': '/bin'}
    """
    if inherit == "minimal":
        return {
            name: value
            for name, value in environment.items()
            if name in _MINIMAL or name.startswith("LC_")
        }
    return {
        name: value
        for name, value in environment.items()
        if name in _KEPT or not (name in _DROPPED or name.startswith(_DROPPED_PREFIXES))
    }
