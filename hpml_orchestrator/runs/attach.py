"""A shell, or a program, on a node of a running job."""

from __future__ import annotations

import contextlib
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import HpmlError, InputError, RecordError
from hpml_orchestrator.records.files import read_json
from hpml_orchestrator.records.process import environment_of
from hpml_orchestrator.records.texts import first_few
from hpml_orchestrator.runs.backend import refuse_elsewhere
from hpml_orchestrator.scheduler.command import job_environment
from hpml_orchestrator.scheduler.local.processes import marked
from hpml_orchestrator.scheduler.model import JobState, expand
from hpml_orchestrator.script.render import CODE_DIRECTORY

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hpml_orchestrator.records.run import Attempt
    from hpml_orchestrator.records.schema import SubmitRecord
    from hpml_orchestrator.runs.state import State

_SHELL = ("bash",)
_NAMED_NODES = 8


@dataclass(frozen=True)
class Attachment:
    """What to exec.

    Attributes:
        argv: program and arguments.
        environment: all of its variables.
        directory: where to start it; None if an option in `argv` names it.
        cpus: that it may use; empty for all.
    """

    argv: list[str]
    environment: dict[str, str]
    directory: Path | None = None
    cpus: frozenset[int] = frozenset()


def attachment(
    state: State,
    command: Sequence[str] = (),
    *,
    node: str = "",
    terminal: bool = False,
    environment: Mapping[str, str],
) -> Attachment:
    """Return the command line that joins a running job.

    With Slurm it is a step that overlaps all others of the job and is not bound: it can use the
    job's CPUs, memory and GPUs on that node. With the local backend it is the command itself, with
    the job's variables and CPUs.

    Args:
        state: of the run, or of one task.
        command: program and arguments; a shell when left out.
        node: one of the job's; its first node when left out.
        terminal: whether to connect the command to this terminal.
        environment: of this process.

    Raises:
        InputError: the run does not run, or not on that node; it belongs to another cluster.
        RecordError: its records cannot be read.
    """
    label = state.submission.label
    refuse_elsewhere(state)
    if state.state != JobState.RUNNING:
        hint = f"hpml status {label}"
        raise InputError(f"is {state.text}, not RUNNING", field="RUN", value=label, hint=hint)
    attempt = state.run.newest()
    if attempt is None or not attempt.job_id or attempt.ended is not None:
        raise InputError(
            "has not started its script yet", field="RUN", value=label, hint="try again"
        )
    nodes = expand(state.nodes or attempt.nodes)
    node = node or nodes[0]
    if node not in nodes:
        raise InputError(
            "is not a node of this job",
            field="--node",
            value=node,
            hint=f"its nodes: {first_few(nodes, _NAMED_NODES)}",
        )
    record = state.submission.record()
    directory = _directory(state, record)
    words = [*(command or _SHELL)]
    if state.backend == "local":
        if record["host"] != (here := socket.gethostname()):
            raise InputError(
                f"runs on {record['host']}; this is {here}",
                field="RUN",
                value=label,
                hint=f"run hpml on {record['host']}",
            )
        variables, cpus = _of_job(attempt)
        return Attachment(words, {**environment, **variables}, directory, cpus)
    # --overlap, or the step would wait for CPUs that the job's own step holds. --cpu-bind=none and
    # --mpi=none, since it must neither take a rank's cores nor join its MPI world.
    srun = [
        "srun",
        f"--jobid={attempt.job_id}",
        "--overlap",
        "--nodes=1",
        "--ntasks=1",
        f"--nodelist={node}",
        f"--chdir={directory}",
        "--cpu-bind=none",
        "--mpi=none",
        "--export=ALL",
        *(["--pty"] if terminal else []),
    ]
    known = {
        "HPML_ATTEMPT_DIR": str(attempt.directory),
        "HPML_RUN_DIR": str(state.run.directory),
    }
    with contextlib.suppress(HpmlError):
        cluster = read_json(attempt.directory / "head.json").get("cluster") or "slurm"
        known["HPML_JOB_KEY"] = f"{cluster}-{attempt.job_id}"
    return Attachment([*srun, *words], {**job_environment(environment, "all"), **known})


def _directory(state: State, record: SubmitRecord) -> Path:
    workdir = Path(state.submission.requested_job().workdir)
    snapshot = record["provenance"].get("snapshot")
    if not snapshot:
        return workdir
    place = os.path.relpath(os.path.realpath(workdir), snapshot["top"])
    return state.submission.directory / CODE_DIRECTORY / place


def _of_job(attempt: Attempt) -> tuple[dict[str, str], frozenset[int]]:
    processes = marked([f"HPML_ATTEMPT_DIR={attempt.directory}"])
    # The oldest process is the script itself: its children may have bound themselves to some CPUs
    # and changed their environment.
    for process in sorted(processes, key=lambda one: (one.start, one.pid)):
        with contextlib.suppress(OSError):
            entries = [os.fsdecode(entry) for entry in environment_of(process.pid) if entry]
            cpus = frozenset(os.sched_getaffinity(process.pid))
            return dict(entry.split("=", 1) for entry in entries if "=" in entry), cpus
    raise RecordError(
        f"no process of the job is found on this machine ({attempt.directory})",
        hint="has it ended? `hpml status` shows its state",
    )
