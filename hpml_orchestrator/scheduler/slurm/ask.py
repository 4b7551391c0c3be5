"""Run Slurm's commands: their environment, their timeouts, what a failure means."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import SchedulerUnavailable
from hpml_orchestrator.records.texts import first_few
from hpml_orchestrator.scheduler.command import CommandMissing
from hpml_orchestrator.scheduler.slurm.messages import (
    NODES_DOWN,
    NOT_CONFIGURED,
    NOT_CONFIGURED_HINT,
    clean,
    hint_for,
    not_configured,
    transport_fault,
)
from hpml_orchestrator.scheduler.slurm.parse import parse_version

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hpml_orchestrator.scheduler.command import Completed, Runner
    from hpml_orchestrator.scheduler.model import JobStatus

_SLURM_CONF = "/etc/slurm/slurm.conf"
_LOOPBACK = re.compile(
    r"^\s*(?:SlurmctldHost\s*=\s*[^\s(]+\(127\.|SlurmctldHost\s*=\s*localhost\b)",
    re.IGNORECASE | re.MULTILINE,
)
_VERSION_TIMEOUT_SECONDS = 15.0
READ_TIMEOUT_SECONDS = 60.0  # Slurm's own is 10 s (MessageTimeout), twice over in some commands
SILENT_HINT = "the controller does not answer; try again in a moment (`scontrol ping`)"

_ACCOUNTING_HINT = "accounting (slurmdbd) does not answer; try again in a moment"
_SILENT_HINTS = {"sacct": _ACCOUNTING_HINT, "sacctmgr": _ACCOUNTING_HINT}
_READ_HINT = "the controller may be busy or restarting: try again in a minute"
# These variables change what a command shows: a site's SQUEUE_PARTITION must not hide a job.
_FOREIGN_PREFIXES = ("SQUEUE_", "SACCT_", "SCANCEL_", "SCONTROL_", "SINFO_", "SDIAG_")
# SLURM_CLUSTERS would send queries to a cluster other than the one that sbatch submits to.
_FOREIGN = frozenset({"SLURM_CLUSTERS", "SLURM_JSON", "SLURM_YAML", "SLURM_DEBUG_FLAGS"})


def reading_environment(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment for a command that reads: times as seconds, lists uncut, in English.

    Args:
        env: what to start from; the process's own when none is given.
    """
    base = os.environ if env is None else env
    kept = {
        name: value
        for name, value in base.items()
        if not name.startswith(_FOREIGN_PREFIXES) and name not in _FOREIGN
    }
    # SLURM_TIME_FORMAT gives epoch seconds, which no time zone or daylight saving makes ambiguous.
    # SLURM_BITSTR_LEN=0 keeps squeue from cutting an array's task list at 64 characters.
    return kept | {"LC_ALL": "C", "SLURM_TIME_FORMAT": "%s", "SLURM_BITSTR_LEN": "0"}


def is_one_machine(environment: Mapping[str, str]) -> bool:
    """Return whether the cluster is this machine alone: its controller listens on loopback."""
    try:
        path = Path(environment.get("SLURM_CONF", _SLURM_CONF))
        return _LOOPBACK.search(path.read_text("utf-8", errors="replace")) is not None
    except OSError:
        return False


def ask(
    run: Runner,
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    timeout: float = READ_TIMEOUT_SECONDS,
) -> Completed:
    """Run a command of Slurm's once; see `reading_environment` for `env`.

    Raises:
        CommandMissing: the command does not exist.
        SchedulerUnavailable: it did not answer in time; names the silent service.
    """
    try:
        return run.run(argv, env=reading_environment(env), timeout=timeout)
    except CommandMissing:
        raise
    except SchedulerUnavailable as error:
        hint = error.hint or _SILENT_HINTS.get(argv[0], SILENT_HINT)
        raise SchedulerUnavailable(error.message, hint=hint) from error


def name_nodes(statuses: dict[str, JobStatus], run: Runner) -> None:
    """Add the cluster's nodes that are down or drained, and why, to the jobs that wait for them."""
    waiting = [key for key, one in statuses.items() if one.reason.startswith(NODES_DOWN)]
    if not waiting:
        return
    argv = ["sinfo", "--all", "--noheader", "--list-reasons", "--format=%N (%E)"]
    with contextlib.suppress(SchedulerUnavailable):
        if nodes := first_few(ask(run, argv).stdout.splitlines(), none=""):
            for key in waiting:
                reason = f"{statuses[key].reason}; out of service: {nodes}"
                statuses[key] = replace(statuses[key], reason=reason)


def slurm_error(command: str, done: Completed) -> SchedulerUnavailable:
    """Return the error for a command that ended without a usable answer."""
    if not_configured(done.stderr):
        return SchedulerUnavailable(NOT_CONFIGURED, hint=NOT_CONFIGURED_HINT)
    message = clean(done.stderr) or f"ended with status {done.returncode}"
    if transport_fault(done.stderr):
        hint = _SILENT_HINTS.get(command, SILENT_HINT)
    else:
        hint = hint_for(done.stderr) or _READ_HINT
    return SchedulerUnavailable(f"{command}: {message}", hint=hint)


def slurm_version(run: Runner) -> tuple[int, ...]:
    """Return the version that sbatch prints, such as `(22, 5, 8)`.

    Raises:
        CommandMissing: sbatch does not exist.
        SchedulerUnavailable: it prints no version.
    """
    done = ask(run, ["sbatch", "--version"], timeout=_VERSION_TIMEOUT_SECONDS)
    if done.returncode != 0:
        raise slurm_error("sbatch", done)
    version = parse_version(done.stdout)
    if not version:
        raise SchedulerUnavailable(f"sbatch printed no version: {done.stdout.strip()[:60] or '?'}")
    return version
