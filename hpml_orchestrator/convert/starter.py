"""Which launcher of a job file starts what a script's launcher started."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpml_orchestrator.convert.findings import Report
    from hpml_orchestrator.convert.launch import Launch

__all__ = ["starter"]

_OTHER_MPI = re.compile(r"(intel-?mpi|impi|mpich|mvapich|cray-mpich)", re.IGNORECASE)


def starter(launch: Launch, nodes: int, report: Report) -> tuple[str, str]:
    """Return `launcher` and `mpi` of the job file; reports where they are not the script's own.

    Args:
        launch: what the script starts.
        nodes: that the job file asks for.
        report: where what is carried otherwise is told.
    """
    chosen = launch.launcher
    if chosen == "horovodrun" and nodes > 1:
        report.changed(
            launch.line,
            launch.source,
            "carried as mpirun, since hpml starts horovodrun on one node only: needs Open MPI, "
            "and a Horovod that was built with MPI",
            "look for [X] MPI in `horovodrun --check-build`",
        )
        chosen = "mpirun"
    if chosen in ("mpirun", "horovodrun"):
        why = _only_srun(launch)
        if not why:
            return chosen, "none"
        report.changed(
            launch.line,
            launch.source,
            f"carried as srun with `mpi: pmix`, since {why}",
            "`srun --mpi=list` shows what there is; `mpi: pmi2` is another",
        )
        return "srun", "pmix"
    return chosen or "srun", "pmix" if launch.mpi else "none"


def _only_srun(launch: Launch) -> str:
    """Return why hpml's mpirun and horovodrun cannot start it; empty where they can."""
    if launch.container is not None and launch.container.get("engine") == "pyxis":
        return "pyxis is a part of srun"
    if launch.launcher == "mpirun":
        if launch.mpi:  # options of another MPI's mpirun
            return "its options are not those of Open MPI's mpirun, which hpml starts"
        other = next((name for name, _ in launch.modules if _OTHER_MPI.search(name)), "")
        if other:
            return f"the mpirun of module {other} is not Open MPI's, which hpml starts"
    return ""
