"""Choose the scheduler: Slurm if available, else the local backend."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, TypeAlias

from hpml_orchestrator.errors import InputError, SchedulerUnavailable, did_you_mean
from hpml_orchestrator.scheduler.model import Scheduler

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from hpml_orchestrator.records.job import Job
    from hpml_orchestrator.records.store import Store
    from hpml_orchestrator.runs.state import State

Backends: TypeAlias = Callable[[str, str], Scheduler]
"""`(name, host) -> Scheduler`: every machine has its own local backend."""

GO_THERE = "run hpml on a login node of that cluster"


def choose(wanted: str, job_file: str | Path | None = None, site: str = "") -> str:
    """Return `slurm` or `local` for `auto`, `slurm` or `local`.

    `auto` is what HPML_BACKEND or a site profile says; else Slurm where there is sbatch.

    Args:
        wanted: the word.
        job_file: the job file, whose project may have a profile.
        site: the value of `--site` or `HPML_SITE`.

    Raises:
        InputError: it is another word.
    """
    field = "--backend"
    if wanted == "auto":
        field, wanted = "HPML_BACKEND", os.environ.get("HPML_BACKEND") or "auto"
    # A cluster that is down must not turn a job for its nodes into a local one on the login node:
    # whether it answers does not matter.
    if wanted == "auto":
        from hpml_orchestrator.site.profile import backend_of_site  # noqa: PLC0415 - only for auto

        found = backend_of_site(job_file, os.environ, chosen=site)
        return found or ("slurm" if shutil.which("sbatch") else "local")
    if wanted not in ("slurm", "local"):
        raise InputError(
            "must be auto, slurm or local",
            field=field,
            value=wanted,
            hint=did_you_mean(wanted, ("auto", "slurm", "local"))
            or "auto is Slurm if sbatch is found, else this machine",
        )
    return wanted


def check_backend(job: Job, name: str) -> None:
    """Refuse a job that the scheduler of that name cannot run.

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


def refuse_other_clusters(cluster: str, environment: Mapping[str, str]) -> None:
    """Refuse variables with which sbatch would submit to another cluster than this, if known.

    Raises:
        InputError: names the variable, and what to do.
    """
    for name in ("SBATCH_CLUSTERS", "SLURM_CLUSTERS"):
        wanted = environment.get(name, "")
        if cluster and wanted.lower() not in ("", cluster.lower()):
            raise InputError(
                f"jobs go to the cluster of this login node, {cluster}",
                field=name,
                value=wanted,
                hint=f"run hpml on a login node of {wanted}; or `unset {name}`",
            )


def cluster_name(scheduler: Scheduler) -> str:
    """Return the scheduler's cluster, for the record of a submission; empty if it does not answer.

    A job of a submission without one is recognised by its working directory alone.
    """
    with contextlib.suppress(SchedulerUnavailable):
        return scheduler.cluster()
    return ""


def cluster_here() -> str:
    """Return the cluster of this login node; empty without Slurm, or if it does not answer."""
    if choose("auto") != "slurm":
        return ""
    from hpml_orchestrator.scheduler.slurm.client import SlurmScheduler  # noqa: PLC0415 - few ask

    return cluster_name(SlurmScheduler())


def elsewhere(cluster: str, scheduler: Scheduler) -> str:
    """Return where a submission is, if that is not the scheduler's cluster; empty if it is.

    There the same job id is another job's, or nobody's.

    Args:
        cluster: that the submission was made to; empty if that is not known.
        scheduler: the one that would be asked about it.

    Raises:
        SchedulerUnavailable: the scheduler does not say which cluster it is.
    """
    if not cluster or cluster == (here := scheduler.cluster()):
        return ""
    return f"on cluster {cluster}; this is {here}"


def not_here(where: str, *, field: str, value: str) -> InputError:
    """Return the error for what an argument names and what is `elsewhere`."""
    return InputError(f"is {where}", field=field, value=value, hint=GO_THERE)


def refuse_elsewhere(state: State) -> None:
    """Refuse a run of another cluster.

    Raises:
        InputError: names both clusters.
    """
    if state.elsewhere:
        raise not_here(state.reason, field="RUN", value=state.submission.label)


def open_backend(name: str, store: Store, *, host: str = "") -> Scheduler:
    """Return the scheduler `slurm`, or `local` of a host; of this machine without one."""
    if name == "slurm":
        from hpml_orchestrator.scheduler.slurm.client import SlurmScheduler  # noqa: PLC0415 - one of the two is used

        return SlurmScheduler()
    from hpml_orchestrator.scheduler.local.backend import LocalScheduler  # noqa: PLC0415 - one of the two is used

    return LocalScheduler(store.local_home(host or socket.gethostname()))


def backends_of(store: Store) -> Backends:
    """Return `open_backend` for a store's records; each scheduler is opened once."""
    return cache(lambda name, host: open_backend(name, store, host=host))
