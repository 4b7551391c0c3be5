"""Compare `checkpoint` with the time limit, the directory that it names, and the cluster."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from hpml_orchestrator.check.finding import CheckFinding, error, warning
from hpml_orchestrator.check.paths import unwritable
from hpml_orchestrator.records.job import Checkpoint
from hpml_orchestrator.records.mounts import private_directory
from hpml_orchestrator.records.run import lead_seconds
from hpml_orchestrator.records.texts import first_few
from hpml_orchestrator.records.units import MIB, format_time, size_text
from hpml_orchestrator.script.directives import can_requeue, without_time

if TYPE_CHECKING:
    from hpml_orchestrator.records.job import Job
    from hpml_orchestrator.scheduler.cluster import Cluster, Partition
    from hpml_orchestrator.site.model import Site

_SHORT = 30  # seconds in which few trainings have saved
_LITTLE_MIB = 1024
_LISTED = 1000
_DEFAULTS = Checkpoint()


def check_lifecycle(job: Job, site: Site | None) -> Iterator[CheckFinding]:
    """Yield findings about `checkpoint` that conflict with the rest of the job.

    Args:
        job: the job as Slurm will see it.
        site: the site profile, if there is one.
    """
    own = job.checkpoint
    if not own.enabled:
        return
    if not (site and without_time(site.directives)):
        yield from _times(own, job.resources.time)
    if own.requeue and own.attempts == 1:
        message = "a run of one attempt never continues after the ends that `requeue` names"
        hint = "give more attempts, or `requeue: []`"
        yield warning("checkpoint.attempts", "checkpoint.attempts", 1, message, None, hint)
    # Only Slurm can act once the first node, with the batch script, is gone.
    if "node_failure" in own.requeue and not can_requeue(site):
        message = "this site requeues no jobs, and a job whose first node fails cannot submit its "
        message += "continuation"
        hint = "if that happens, `hpml requeue RUN` continues the run"
        place = "checkpoint.requeue"
        yield warning("checkpoint.node_failure", place, "node_failure", message, None, hint)
    for option in job.resources.extra:
        if own.avoid_failed_nodes and option.startswith("--nodelist="):
            message = f"if a node of {option} fails, the next attempt must not use it and never "
            message += "starts"
            hint = "leave --nodelist out, or set `avoid_failed_nodes: false`"
            place = "checkpoint.avoid_failed_nodes"
            yield warning("checkpoint.nodelist", place, True, message, None, hint)


def _times(own: Checkpoint, limit: int) -> Iterator[CheckFinding]:
    """Yield which times do not fit the time limit, in seconds."""
    shown, lead, given = format_time(limit), own.lead, own.written("lead")
    if lead is not None and lead >= limit:
        message = f"must be below the time limit of {shown}: ranks would be asked to stop when "
        message += "they start"
        hint = "a bare number is minutes; write `90s` for seconds"
        yield error("checkpoint.lead", "checkpoint.lead", given, message, shown, hint)
    seconds = int(lead_seconds(lead, limit))
    if seconds < _SHORT:
        message = f"ranks have {seconds} s to save before the time limit of {shown}"
        hint = "give a longer `resources.time`" if lead is None else "give a longer `lead`"
        yield warning("checkpoint.short", "checkpoint.lead", given, message, _SHORT, hint)
    if own.hang >= limit and own.hang != _DEFAULTS.hang:
        message = f"an attempt ends after {shown}, before it can count as hung"
        hint = "give a shorter time, or `off`"
        given = own.written("hang")
        yield warning("checkpoint.hang", "checkpoint.hang", given, message, shown, hint)


def check_directory(
    job: Job, records: Path, site: Site | None, *, on_nodes: bool
) -> Iterator[CheckFinding]:
    """Yield why checkpoints cannot be saved in their directory, as seen from this machine.

    With `on_nodes` the job runs on other machines than this one.
    """
    own, place = job.checkpoint, "checkpoint.directory"
    if not own.enabled:
        return
    if not own.is_shared:  # `check_records` looks at the rest
        yield from _space(records, own.directory)
        return
    fixed = own.directory.partition("{")[0]
    path = Path(fixed if fixed == own.directory else os.path.dirname(fixed))
    reason = _node_local(path, job, site)
    if on_nodes and reason:
        message = f"is local to each node ({reason}): the next attempt may run on another node"
        hint = "give a directory on the shared file system, or a relative path"
        yield error("checkpoint.local", place, own.directory, message, None, hint)
        return
    if path.is_relative_to("/dev/shm"):  # noqa: S108
        message = "is in memory: checkpoints are lost when this machine restarts"
        yield warning("checkpoint.memory", place, own.directory, message)
    closed = unwritable(path)
    if closed:
        what = "is not writable by you" if os.path.isdir(closed) else "is not a directory"
        yield error("checkpoint.unwritable", place, own.directory, f"{closed} {what}")
        return
    yield from _space(path, own.directory)
    # `hpml resubmit` names the directory of the run that it continues
    if fixed != own.directory or path.is_relative_to(records / "runs"):
        return
    if names := _newest(path):
        message = f"holds {first_few(names)} already: the run may continue from what another saved"
        hint = "give an empty directory, or a relative path, if that is not intended"
        yield warning("checkpoint.used", place, own.directory, message, None, hint)


def _node_local(path: Path, job: Job, site: Site | None) -> str:
    partition = job.resources.partition
    staged = [site.path("scratch", partition), site.path("ram", partition)] if site else []
    for top in staged:
        if top and top.startswith("/") and path.is_relative_to(top):
            return top
    return private_directory(str(path))


def _space(path: Path, shown: str) -> Iterator[CheckFinding]:
    while not path.exists() and path != path.parent:
        path = path.parent
    try:
        state = os.statvfs(path)
    except OSError:
        return
    if not state.f_blocks:  # some network file systems do not say
        return
    free_mib = state.f_bavail * state.f_frsize // MIB
    no_inodes = bool(state.f_files) and not state.f_favail
    if free_mib == 0 or no_inodes:
        what = "inodes" if no_inodes else "space"
        message = f"the file system of {path} has no {what} left"
        yield error("checkpoint.full", "checkpoint.directory", shown, message, 0)
    elif free_mib < _LITTLE_MIB:
        left = size_text(free_mib)
        message = f"the file system of {path} has {left} left"
        hint = "remove what is not needed, or give another directory"
        yield warning("checkpoint.space", "checkpoint.directory", shown, message, left, hint)


def _newest(path: Path) -> list[str]:
    try:
        with os.scandir(path) as entries:
            found = [
                (entry.stat(follow_symlinks=False).st_mtime, entry.name)
                for entry in itertools.islice(entries, _LISTED)
            ]
    except OSError:
        return []
    return [name for _, name in sorted(found, reverse=True)]


def cluster_notes(job: Job, cluster: Cluster, site: Site | None) -> list[str]:
    """Return what a run with `checkpoint` can expect of a cluster, a line each."""
    own = job.checkpoint
    if not own.enabled:
        return []
    notes = []
    if own.requeue and not can_requeue(site):
        notes.append(
            "checkpoint.requeue: the site profile excludes requeueing: the run continues as a new "
            "job, which the old one submits from its node"
        )
    names = (job.resources.partition or "").split(",")
    default = cluster.default_partition
    chosen = [found for name in names if name and (found := cluster.partition(name))]
    chosen = chosen or ([default] if default else [])
    if cluster.limits.preemption and "preemption" in own.requeue:
        notes += [note for partition in chosen if (note := _preemption(partition, cluster))]
    return notes


def _preemption(partition: Partition, cluster: Cluster) -> str:
    """Return what happens to preempted jobs of a partition; empty if none are preempted."""
    modes = set(re.split(r"\W+", partition.preemption or cluster.limits.preemption))
    tiers = {other.priority_tier for other in cluster.partitions}
    if len(tiers) > 1 and partition.priority_tier == max(tiers):
        return ""  # its jobs preempt those of other partitions
    start = f"checkpoint.requeue: a preempted job of partition {partition.name}"
    if not modes & {"REQUEUE", "CANCEL"}:
        return f"{start} is suspended and continues by itself" if "SUSPEND" in modes else ""
    if not partition.grace_seconds:
        return f"{start} has only Slurm's KillWait to save (30 s by default; GraceTime is 0)"
    return f"{start} has {format_time(partition.grace_seconds)} to save (GraceTime)"
