"""What each rank of a submitted function runs: `python -m hpml_orchestrator.sweeps.submitit_rank`.

It takes the pickle of its call, copies its output to submitit's log files, and has submitit run the
call. The first start of a job finds the pickle under the run's id, which is known before the job's:
so a job that starts at once finds it, and one whose submitter was killed does too.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from submitit.core.logger import get_logger
from submitit.core.submission import process_job
from submitit.core.utils import JobPaths
from submitit.slurm.slurm import SlurmJobEnvironment

from hpml_orchestrator.records.files import append_line

__all__ = ["HpmlJobEnvironment", "call_pickle", "local_job_id", "main"]

_RESTART = 144  # exit status of a first rank whose call is to start again in the same job
_LOOK_SECONDS = 0.2
_COPIED_BYTES = 1 << 16
# submitit's TorchDistributedEnvironment sets these, and refuses to where they are set already.
_TORCH_VARIABLES = "MASTER_ADDR MASTER_PORT RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE".split()
# A job's signals go to all of its processes; what copies the output is there until the end.
_FOR_THE_FUNCTION = [getattr(signal, f"SIG{name}") for name in "HUP INT TERM USR1 USR2".split()]


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
        if not _local_id():
            super()._requeue(countdown)
            return
        message = f"Requeued job {self.job_id} in place ({countdown} remaining timeouts)"
        get_logger().info(message)
        append_line(_restarts(), message)
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
    paths.result_pickle.unlink(missing_ok=True)  # of a start before this one
    output = contextlib.ExitStack()

    def restart() -> NoReturn:
        output.close()
        os.execv(sys.executable, sys.orig_argv)  # noqa: S606 - this very command

    try:
        with output:
            output.enter_context(_logged(paths, merged=options.merge_output))
            if options.signal_after is not None:
                arguments = (environment, options.signal_after, _size(_restarts()), restart)
                threading.Thread(target=_watch, args=arguments, daemon=True).start()
            code = _call(options.folder, environment)
    except SystemExit as stop:
        if stop.code != _RESTART:
            raise
        restart()
    return code


def _call(folder: str, environment: HpmlJobEnvironment) -> int:
    """Make the call, and wait for those of the other ranks.

    The script's srun ends a step a minute after its first rank, and ranks here need not end
    together. A rank that is waiting also starts again when the first one does.
    """
    try:
        process_job(folder)
    except Exception:  # noqa: BLE001 - the user's function; submitit has kept it as the result
        traceback.print_exc()
        return 1
    signal.signal(environment._usr_sig(), signal.SIG_IGN)  # noqa: SLF001 - submitit's for plugins
    for rank in range(environment.num_tasks):
        while not JobPaths(folder, environment.job_id, rank).result_pickle.exists():
            time.sleep(_LOOK_SECONDS)
    return 0


@contextlib.contextmanager
def _logged(paths: JobPaths, *, merged: bool) -> Iterator[None]:
    """Append what this process and its children print to submitit's logs.

    A child copies the logs to the job's own output, which `hpml logs` shows. It sees the end of
    this process even if that is killed.
    """
    files = [paths.stdout] if merged else [paths.stdout, paths.stderr]
    logs = [os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666) for path in files]
    outputs = [os.dup(1), os.dup(2)]
    ended, end = os.pipe()
    sizes = [os.fstat(log).st_size for log in logs]
    copies = list(zip(logs, outputs, sizes, strict=False))
    with warnings.catch_warnings():  # Python 3.12 warns where NumPy has threads; this copies only
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            os.close(end)
            _copy(copies, ended)
        finally:
            os._exit(0)
    for number, log in ((1, logs[0]), (2, logs[-1])):
        os.dup2(log, number)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for number, output in zip((1, 2), outputs, strict=True):
            os.dup2(output, number)
        os.write(end, b".")  # closing it would not do: children may have it, too
        os.waitpid(child, 0)
        for number in (*logs, *outputs, ended, end):
            os.close(number)


def _copy(copies: Sequence[tuple[int, int, int]], ended: int) -> None:
    """Copy logs to outputs, from given places on, until something or nobody is at `ended`."""
    for number in _FOR_THE_FUNCTION:
        signal.signal(number, signal.SIG_IGN)
    places = {log: place for log, _, place in copies}
    over = False
    while not over:
        over = bool(select.select([ended], [], [], _LOOK_SECONDS)[0])
        for log, output, _ in copies:
            while data := os.pread(log, _COPIED_BYTES, places[log]):
                places[log] += os.write(output, data)


def _watch(
    environment: HpmlJobEnvironment, seconds: float, restarts: int, restart: Callable[[], None]
) -> None:
    """Send the signal of the time limit, and restart when the first rank does.

    Slurm does this for its jobs. It runs beside the function, which may wait for the first rank.
    The signal comes `seconds` after the call began; `restarts` is the size that the file of
    restarts had when this rank started.
    """
    number = environment._usr_sig()  # noqa: SLF001 - submitit's for plugins
    # The call begins when submitit handles the signal, which would end the process before.
    while signal.getsignal(number) is signal.SIG_DFL:
        time.sleep(_LOOK_SECONDS)
    signal_at = time.monotonic() + seconds
    while True:
        time.sleep(_LOOK_SECONDS)
        if environment.global_rank and _size(_restarts()) != restarts:
            restart()
        if time.monotonic() >= signal_at:
            signal_at = float("inf")
            os.kill(os.getpid(), number)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _run() -> Path:
    return Path(os.environ["HPML_RUN_DIR"])


def _restarts() -> Path:
    return _run() / "restarts"


def _local_id() -> str:
    """Return the id of a job of this machine; empty in a job of Slurm."""
    if "HPML_LOCAL_SUPERVISOR_PID" not in os.environ:
        return ""
    rid = _run().name
    return local_job_id(rid.rpartition(".")[0] if "SLURM_ARRAY_TASK_ID" in os.environ else rid)


if __name__ == "__main__":
    sys.exit(main())
