"""What each rank of a submitted function runs: `python -m hpml_orchestrator.sweeps.submitit_rank`.

It takes the pickle of its call, copies its output to submitit's log files, and has submitit run the
call. The first start of a job finds the pickle under the run's id, which is known before the job's:
so a job that starts at once finds it, and one whose submitter was killed does too.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from submitit.core.submission import process_job
from submitit.core.utils import JobPaths
from submitit.slurm.slurm import SlurmJobEnvironment

from hpml_orchestrator.records.files import append_line

__all__ = ["HpmlJobEnvironment", "call_pickle", "local_job_id", "main"]

_RESTART = 144  # exit status of a first rank whose call is to start again in the same job
_LOOK_SECONDS = 0.2
_TEE_SECONDS = 5.0
# submitit's TorchDistributedEnvironment sets these, and refuses to where they are set already.
_TORCH_VARIABLES = "MASTER_ADDR MASTER_PORT RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE".split()
# Signals of the job are for the function: tee copies what it prints until it ends.
_TEE = "trap '' HUP INT TERM USR1 USR2; exec tee -a -- \"$0\""


def local_job_id(sid: str) -> str:
    """Return submitit's id of a job of this machine: the end of the run's id, which is unique.

    The local backend's own numbers begin at 1 in each directory of records.

    >>> local_job_id("my_job-20261122-213015-k3x9qa")
    '20261122-213015-k3x9qa'
    """
    return "-".join(sid.rsplit("-", 3)[1:])


def call_pickle(folder: str | Path, rid: str) -> Path:
    """Return where the call of a run lies until its job has an id."""
    return JobPaths.get_first_id_independent_folder(folder) / f"{rid}.pkl"


class HpmlJobEnvironment(SlurmJobEnvironment):
    """The job that a function runs in; a job of this machine has Slurm's variables, too."""

    @property
    def raw_job_id(self) -> str:
        """The id of this very job, that of an array's task not being the array's."""
        return _local_id() or super().raw_job_id

    @property
    def array_job_id(self) -> str | None:
        """The id of the array that it is a task of, if it is one."""
        array = super().array_job_id
        return array and (_local_id() or array)

    def _requeue(self, countdown: int) -> None:
        """Have the job start again: by Slurm, or its ranks in the same job on this machine."""
        if not _on_this_machine():
            super()._requeue(countdown)
            return
        append_line(_restarts(), f"{countdown} remaining timeouts")
        sys.exit(_RESTART)


def main(argv: list[str] | None = None) -> int:
    """Run this rank's call; return 0, or 1 after an exception, whose traceback is printed."""
    parser = argparse.ArgumentParser(prog="submitit_rank", description=__doc__)
    parser.add_argument("folder", help="the executor's folder")
    parser.add_argument("--merge-output", action="store_true", help="one log for both streams")
    parser.add_argument("--signal-after", type=float, metavar="SECONDS", help="before the limit")
    options = parser.parse_args(argv)
    os.environ["SUBMITIT_FOLDER"] = options.folder
    for name in _TORCH_VARIABLES:
        os.environ.pop(name, None)
    environment = HpmlJobEnvironment()
    paths = environment.paths
    paths.folder.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):  # another rank, or the submitter, was faster
        call_pickle(options.folder, _run().name).rename(paths.submitted_pickle)
    output = contextlib.ExitStack()

    def restart() -> None:
        output.close()
        os.execv(sys.executable, sys.orig_argv)  # noqa: S606 - this very command

    try:
        with output:
            output.enter_context(_copied_output(paths, merged=options.merge_output))
            if options.signal_after is not None:
                arguments = (environment, options.signal_after, restart)
                threading.Thread(target=_watch, args=arguments, daemon=True).start()
            return _call(options.folder)
    except SystemExit as stop:
        if stop.code != _RESTART:
            raise
        restart()
    return 1


def _call(folder: str) -> int:
    try:
        process_job(folder)
    except Exception:  # noqa: BLE001 - the user's function; submitit has kept it as the result
        traceback.print_exc()
        return 1
    return 0


@contextlib.contextmanager
def _copied_output(paths: JobPaths, *, merged: bool) -> Iterator[None]:
    """Append what this process and its children print to submitit's logs, beside the job's."""
    originals = {1: os.dup(1), 2: os.dup(2)}
    copies: list[subprocess.Popen[bytes]] = []
    for number, path in ((1, paths.stdout), (2, paths.stderr)):
        if merged and copies:
            os.dup2(1, number)
            break
        tee = subprocess.Popen(
            ["sh", "-c", _TEE, path], stdin=subprocess.PIPE, stdout=originals[number]
        )
        assert tee.stdin is not None  # noqa: S101 - a pipe, for mypy
        os.dup2(tee.stdin.fileno(), number)
        tee.stdin.close()
        copies.append(tee)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for number, original in originals.items():
            os.dup2(original, number)
            os.close(original)
        for tee in copies:  # children that live on may keep it open
            with contextlib.suppress(subprocess.TimeoutExpired):
                tee.wait(_TEE_SECONDS)


def _watch(environment: HpmlJobEnvironment, seconds: float, restart: Callable[[], None]) -> None:
    """Send the signal of the time limit, and restart when the first rank does.

    Slurm does this for its jobs. It runs beside the function, which may wait for the first rank.
    """
    rank, seen = environment.global_rank, _size(_restarts())
    signal_at = time.monotonic() + seconds
    while True:
        time.sleep(_LOOK_SECONDS)
        if rank and _size(_restarts()) != seen:
            restart()
        if time.monotonic() >= signal_at:
            signal_at = float("inf")
            os.kill(os.getpid(), environment._usr_sig())  # noqa: SLF001 - submitit's for plugins


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _run() -> Path:
    return Path(os.environ["HPML_RUN_DIR"])


def _restarts() -> Path:
    return _run() / "restarts"


def _on_this_machine() -> bool:
    return "HPML_LOCAL_SUPERVISOR_PID" in os.environ


def _local_id() -> str:
    """Return the id of a job of this machine; empty in a job of Slurm."""
    if not _on_this_machine():
        return ""
    rid = _run().name
    return local_job_id(rid.rpartition(".")[0] if "SLURM_ARRAY_TASK_ID" in os.environ else rid)


if __name__ == "__main__":
    sys.exit(main())
