"""What each rank of a submitted function runs: `python -m hpml_orchestrator.sweeps.submitit_rank`.

It takes the pickle of its call, has submitit run the call in a separate process, and copies
submitit's logs to the job's output. The first start of a job finds the pickle under the run's id,
which is known before the job's: so a job that starts at once finds it, and one whose submitter was
killed does too.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from submitit.core.logger import get_logger
from submitit.core.utils import DelayedSubmission, JobPaths
from submitit.slurm.slurm import SlurmJobEnvironment

from hpml_orchestrator.records.files import append_line

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import IO

SIGNAL_AFTER = "HPML_SUBMITIT_SIGNAL_AFTER"
"""Variable: seconds from the start of a call to the signal of its time limit, on this machine."""

_RESTART = 144  # exit status of a call that must start again in the same job
_LOOK_SECONDS = 0.2
# submitit's TorchDistributedEnvironment sets these, and fails if they are already set.
_TORCH_VARIABLES = "MASTER_ADDR MASTER_PORT RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE".split()
# A job's signals go to all of its processes; only the call acts on them.
_SIGNALS = {getattr(signal, f"SIG{name}") for name in "HUP INT TERM USR1 USR2".split()}


def local_job_id(rid: str) -> str:
    """Return submitit's id of a job of this machine: the end of the run's id, which is unique.

    The local backend's own numbers begin at 1 in each directory of records.

    >>> local_job_id("my_job-20261122-213015-k3x9qa"), local_job_id("a-20261122-213015-k3x9qa.7")
    ('20261122-213015-k3x9qa', '20261122-213015-k3x9qa')
    """
    return "-".join(rid.rsplit("-", 3)[1:]).partition(".")[0]


def call_pickle(folder: str | Path, rid: str) -> Path:
    """Return the path of a run's call until its job has an id."""
    return JobPaths.get_first_id_independent_folder(folder) / f"{rid}.pkl"


class HpmlJobEnvironment(SlurmJobEnvironment):
    """The job that a function runs in; a job of this machine has Slurm's variables, too."""

    @property
    def raw_job_id(self) -> str:
        """The job's own id; for a task of an array, not that of the array."""
        return _local_id() or super().raw_job_id

    @property
    def array_job_id(self) -> str | None:
        """The id of the array that it is a task of, if it is one."""
        array = super().array_job_id
        return array and (_local_id() or array)

    def _handle_signals(self, paths: JobPaths, submission: DelayedSubmission) -> None:
        super()._handle_signals(paths, submission)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        # At exit Python removes its handlers; a signal would then turn success into failure.
        atexit.register(signal.signal, self._usr_sig(), signal.SIG_IGN)
        if SIGNAL_AFTER in os.environ:  # Slurm does this for its jobs
            warning = (os.getpid(), self._usr_sig())
            timer = threading.Timer(float(os.environ[SIGNAL_AFTER]), os.kill, warning)
            timer.daemon = True
            timer.start()

    def _requeue(self, countdown: int) -> None:
        """Have the job start again: by Slurm, or its ranks in the same job on this machine."""
        if not _local_id():
            super()._requeue(countdown)
            return
        get_logger().info(f"Requeued job {self.job_id} in place ({countdown} remaining timeouts)")
        sys.exit(_RESTART)


def main(argv: list[str] | None = None) -> int:
    """Run this rank's call, again after each restart in place; return its exit status."""
    parser = argparse.ArgumentParser(prog="submitit_rank", description=__doc__)
    parser.add_argument("folder", help="the executor's folder")
    parser.add_argument("--merge-output", action="store_true", help="one log for both streams")
    options = parser.parse_args(argv)
    os.environ["SUBMITIT_FOLDER"] = options.folder
    for name in _TORCH_VARIABLES:
        os.environ.pop(name, None)
    # The call inherits the mask. A signal that arrives before submitit has set its handlers waits
    # until `_handle_signals` unblocks it; without the mask it would kill the call.
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    environment = HpmlJobEnvironment()
    paths = environment.paths
    paths.folder.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):  # another rank, or the submitter, was faster
        call_pickle(options.folder, _run().name).rename(paths.submitted_pickle)
    with contextlib.ExitStack() as stack:
        files = [paths.stdout] if options.merge_output else [paths.stdout, paths.stderr]
        logs = [stack.enter_context(path.open("ab")) for path in files]
        readers = [stack.enter_context(path.open("rb")) for path in files]
        for reader in readers:
            reader.seek(0, os.SEEK_END)
        status = _RESTART
        while status == _RESTART:
            status = _start(environment, logs, readers)
    return status


def _start(
    environment: HpmlJobEnvironment, logs: Sequence[IO[bytes]], readers: Sequence[IO[bytes]]
) -> int:
    """Run the call once and return its exit status.

    A rank whose call has succeeded waits for those of the other ranks: the script's srun ends a
    step a minute after its first rank, and ranks here need not end together. All ranks start again
    when the first one does.
    """
    folder, number = os.environ["SUBMITIT_FOLDER"], environment.global_rank
    results = [
        JobPaths(folder, environment.job_id, rank).result_pickle
        for rank in range(environment.num_tasks)
    ]
    results[number].unlink(missing_ok=True)  # from an earlier start
    restarts = _run() / "restarts"  # a line for each
    before = _size(restarts)
    # This is what submitit's own executors run.
    command = [sys.executable, "-u", "-m", "submitit.core._submit", folder]
    with subprocess.Popen(command, stdout=logs[0], stderr=logs[-1]) as call:
        while True:
            time.sleep(_LOOK_SECONDS)
            status = call.poll()
            for reader, output in zip(readers, (sys.stdout, sys.stderr), strict=False):
                shutil.copyfileobj(reader, output.buffer)
                output.flush()
            if number and _size(restarts) != before:
                call.kill()
                return _RESTART
            if status == _RESTART:
                for result in results:
                    result.unlink(missing_ok=True)
                append_line(restarts, "again")
            if status or (status == 0 and all(result.exists() for result in results)):
                return 128 - status if status < 0 else status  # as a shell reports it


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _run() -> Path:
    return Path(os.environ["HPML_RUN_DIR"])


def _local_id() -> str:
    return local_job_id(_run().name) if "HPML_LOCAL_SUPERVISOR_PID" in os.environ else ""


if __name__ == "__main__":
    sys.exit(main())
