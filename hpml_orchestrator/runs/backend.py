"""Choose the scheduler: the cluster's where there is one, else this machine."""

from __future__ import annotations

import shutil
import socket
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import InputError, did_you_mean

if TYPE_CHECKING:
    from hpml_orchestrator.records.store import Store
    from hpml_orchestrator.scheduler.model import Scheduler
    from hpml_orchestrator.spec import Job

__all__ = ["BACKENDS", "check_backend", "choose", "open_backend"]

BACKENDS = ("slurm", "local")


def choose(wanted: str) -> str:
    """Return `slurm` or `local` for `auto`, `slurm` or `local`.

    Raises:
        InputError: it is none of them.
    """
    if wanted == "auto":
        return "slurm" if shutil.which("sbatch") else "local"
    if wanted not in BACKENDS:
        raise InputError(
            "must be auto, slurm or local",
            field="--backend",
            value=wanted,
            hint=did_you_mean(wanted, ("auto", *BACKENDS))
            or "auto is Slurm where sbatch is found, else this machine",
        )
    return wanted


def check_backend(job: Job, name: str) -> None:
    """Refuse a job that the scheduler of that name cannot run, before anything is written.

    Raises:
        InputError: names the field and what would be right.
    """
    if name == "local" and job.mpi != "none":
        raise InputError(
            f"this machine's own srun offers no {job.mpi} to MPI programs",
            field="mpi",
            value=job.mpi,
            hint="--set mpi=none starts the ranks without it; or submit it to a Slurm cluster",
        )


def open_backend(name: str, store: Store, *, host: str = "") -> Scheduler:
    """Return the scheduler of that name.

    Args:
        name: `slurm` or `local`.
        store: where records live; the local backend keeps its own below it.
        host: whose local backend; this machine's when left out.
    """
    if name == "slurm":
        from hpml_orchestrator.scheduler.slurm.client import SlurmScheduler  # noqa: PLC0415

        return SlurmScheduler()
    from hpml_orchestrator.scheduler.local.backend import LocalScheduler  # noqa: PLC0415

    return LocalScheduler(store.local_home(host or socket.gethostname()))
