"""Compare a job with a cluster before it is submitted: pure rules, nothing is asked or run.

What Slurm 22.05 does was found by experiment; `tests/cluster/test_check_against_slurm.py` repeats
it. Two things count as an error: that Slurm refuses the job, and that it takes it and never starts
it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpml_orchestrator.check.ask import Ask, ask_of, memory_needed, tres_of
from hpml_orchestrator.check.finding import Finding, listed
from hpml_orchestrator.check.fit import Fit, fit, unknown_things
from hpml_orchestrator.check.partition import access, closed, limits, state
from hpml_orchestrator.check.policy import Standing, limits_of_policy, standing_of
from hpml_orchestrator.errors import did_you_mean
from hpml_orchestrator.spec.values import size_text

if TYPE_CHECKING:
    from hpml_orchestrator.scheduler.cluster import Cluster, Partition
    from hpml_orchestrator.spec import Job

__all__ = ["check", "check_array", "check_script_size"]

_STAGED_TO = "/tmp"  # noqa: S108 - where `target: local` lies on a node, unless the job says else


@dataclass(frozen=True)
class _Verdict:
    """What one partition says to a job."""

    partition: Partition
    closed: list[Finding]
    state: list[Finding]
    limits: list[Finding]
    policy: list[Finding]
    fit: Fit

    @property
    def findings(self) -> list[Finding]:
        return [*self.closed, *self.state, *self.limits, *self.policy, *self.fit.findings]


def check(
    job: Job,
    cluster: Cluster,
    *,
    script_bytes: int = 0,
    now: float | None = None,
    required: frozenset[str] = frozenset(),
    excluded: frozenset[str] = frozenset(),
    disk_mib: int = 0,
    shm_mib: int = 0,
) -> list[Finding]:
    """Return all that keeps a job from running on a cluster, or may.

    Args:
        job: a complete job.
        cluster: as the user sees it.
        script_bytes: length of its script.
        now: seconds since the epoch, for reservations.
        required: nodes of `--nodelist`.
        excluded: nodes of `--exclude`.
        disk_mib: what will be staged to each node's local disk, where Slurm knows that disk.
        shm_mib: what will be staged to each node's RAM, as far as known.
    """
    if cluster.limits.tmp_fs != _STAGED_TO:
        disk_mib = 0  # TmpDisk is the size of another directory than the one that is staged to
    ask = ask_of(job, required=required, excluded=excluded, disk_mib=disk_mib, shm_mib=shm_mib)
    if "clusters" in ask.options:
        return []  # another cluster's controller would have to be asked
    found = check_script_size(script_bytes, cluster)
    if job.tasks is not None:
        found += check_array(job.tasks.max_index, len(job.tasks.indices), cluster)
    standing = standing_of(ask, cluster, now)
    found += standing.findings
    found += unknown_things(ask, cluster)
    chosen, wrong = _partitions(ask, cluster)
    found += wrong
    if chosen:
        found += _placed(ask, chosen, cluster, standing, known=not found)
    return _unique(_told_once(found))


def check_array(max_index: int, count: int, cluster: Cluster) -> list[Finding]:
    """Return whether a job array is within the cluster's MaxArraySize."""
    size = cluster.limits.max_array_size
    if size == 0:
        return [
            Finding("error", "array.off", "array", count, "this cluster takes no job arrays", 0)
        ]
    found = []
    if max_index >= size:
        found.append(
            Finding(
                "error",
                "array.index",
                "array",
                max_index,
                f"the largest index that this cluster takes is {size - 1} (MaxArraySize {size})",
                size - 1,
                f"number the tasks from 0 to {size - 1}"
                if count <= size
                else f"submit several arrays of at most {size} tasks",
            )
        )
    return found


def check_script_size(script_bytes: int, cluster: Cluster) -> list[Finding]:
    """Return whether the script is longer than this cluster takes."""
    most = cluster.limits.max_script_bytes
    if script_bytes <= most:
        return []
    return [
        Finding(
            "error",
            "script.size",
            "args",
            None,
            f"the script has {script_bytes} bytes; this cluster takes at most {most}",
            most,
            "put long values into a file and pass the file's path",
        )
    ]


def _partitions(ask: Ask, cluster: Cluster) -> tuple[list[Partition], list[Finding]]:
    """Return the partitions that a job would be considered in."""
    if not cluster.partitions:
        return [], []
    names = [one.name for one in cluster.partitions]
    if ask.partitions:
        chosen = [one for one in map(cluster.partition, ask.partitions) if one is not None]
        wrong = [
            Finding(
                "error",
                "partition.unknown",
                "resources.partition",
                ask.job.resources.partition,
                f"there is no partition {name}; there are {listed(names)}",
                names,
                did_you_mean(name, names) or "name one of these",
            )
            for name in ask.partitions
            if name not in names
        ]
        return chosen, wrong
    plugins = set(cluster.limits.submit_plugins)
    if "all_partitions" in plugins:
        return list(cluster.partitions), []
    if plugins & {"lua"}:
        return [], []  # it may choose one, and nobody can know which
    if cluster.default_partition is not None:
        return [cluster.default_partition], []
    if ask.options.get("reservation"):
        return [], []
    return [], [
        Finding(
            "error",
            "partition.none",
            "resources.partition",
            None,
            f"must be given: this cluster has no default partition; there are {listed(names)}",
            names,
            f"`partition: {names[0]}`",
        )
    ]


def _verdict(ask: Ask, partition: Partition, cluster: Cluster, standing: Standing) -> _Verdict:
    found = fit(ask, partition, cluster) if cluster.nodes else Fit([], True, [])
    over = limits(ask, partition, cluster, standing.qos.flags if standing.qos else ())
    if any(one.field == "resources.nodes" and one.code == "nodes.most" for one in over):
        found = dataclasses.replace(found, findings=[])  # said once
    tres = tres_of(ask, partition, cluster, found.nodes)
    return _Verdict(
        partition,
        closed(ask, partition, cluster),
        state(ask, partition, cluster),
        [*access(ask, partition, standing), *over],
        limits_of_policy(ask, partition, cluster, standing, tres),
        found,
    )


def _placed(
    ask: Ask, chosen: list[Partition], cluster: Cluster, standing: Standing, *, known: bool
) -> list[Finding]:
    """Return what the partitions together say."""
    verdicts = [_verdict(ask, partition, cluster, standing) for partition in chosen]
    usable = [verdict for verdict in verdicts if not verdict.findings]
    enforced = cluster.limits.enforce_partition_limits
    found: list[Finding] = []
    for index, verdict in enumerate(verdicts):
        if enforced == "NO" and index and usable:
            # Seen: Slurm leaves such a partition out, but not where it stands first.
            found += [dataclasses.replace(one, level="warning") for one in verdict.closed]
        else:
            found += verdict.closed
    if enforced == "ALL":
        found += [one for verdict in verdicts for one in verdict.limits]
    if _denies_at_once(standing, verdicts[0].partition, cluster):
        found += verdicts[0].policy
    if usable:
        found += _waits(ask, usable, cluster)
        found += _default_memory(ask, usable, cluster)
        return _with_alternatives(found, ask, chosen, cluster, standing) if known else found
    found += [one for verdict in verdicts for one in verdict.findings]
    return _with_alternatives(found, ask, chosen, cluster, standing) if known else found


def _denies_at_once(standing: Standing, partition: Partition, cluster: Cluster) -> bool:
    """Whether Slurm compares a job with limits when it is submitted: with the first partition's."""
    own = [one for one in cluster.qos or () if one.name == partition.qos]
    return any("DenyOnLimit" in one.flags for one in (standing.qos, *own) if one is not None)


def _waits(ask: Ask, usable: list[_Verdict], cluster: Cluster) -> list[Finding]:
    """Return a warning where nodes are out of service, so that the job cannot start now."""
    if not cluster.nodes:
        return []
    best = usable[0]
    for verdict in usable:
        up = [node for node in verdict.fit.nodes if node.up]
        if len(up) >= ask.nodes and ask.required <= {node.name for node in up}:
            return []
    out = [node for node in best.fit.nodes if not node.up]
    reasons = [
        f"{node.name} is {'+'.join(sorted(node.states))}"
        + (f" ({node.reason})" if node.reason else "")
        for node in out
    ]
    fitting = len(best.fit.nodes)
    return [
        Finding(
            "warning",
            "nodes.down",
            "resources.nodes",
            ask.nodes,
            f"the job will wait: of the {fitting} node{'s' * (fitting != 1)} of partition "
            f"{best.partition.name} that it fits, {fitting - len(out)} can be had now; "
            f"{listed(reasons)}",
            fitting - len(out),
        )
    ]


def _default_memory(ask: Ask, usable: list[_Verdict], cluster: Cluster) -> list[Finding]:
    """Return a warning where what goes to RAM is more than the job gets by default."""
    default = max(memory_needed(ask, one.partition, cluster.limits) for one in usable)
    if ask.memory_mib is not None or not default or ask.shm_mib < default:
        return []
    return [
        Finding(
            "warning",
            "memory.staged",
            "resources.memory",
            None,
            f"{size_text(ask.shm_mib)} go to shm, which counts as the job's memory, and a job "
            f"that asks for none gets {size_text(default)} here",
            size_text(default),
            "give `memory` as what the ranks need: what is staged to shm is added to it",
        )
    ]


def _with_alternatives(
    found: list[Finding],
    ask: Ask,
    chosen: list[Partition],
    cluster: Cluster,
    standing: Standing,
) -> list[Finding]:
    """Add to the hints which other partitions would take the job as it is."""
    if not any(one.level == "error" for one in found):
        return found
    names = {one.name for one in chosen}
    others = [
        one.name
        for one in cluster.partitions
        if one.name not in names and not _verdict(ask, one, cluster, standing).findings
    ]
    remaining = [one.name for one in chosen if not _verdict(ask, one, cluster, standing).findings]
    if remaining:
        words = f"`partition: {','.join(remaining)}` would take this job"
    elif others:
        noun = "partition" if len(others) == 1 else "partitions"
        words = f"{noun} {listed(others, last='or')} would take this job as it is"
    else:
        return found
    return [
        dataclasses.replace(one, hint=_joined(words, one.hint)) if one.level == "error" else one
        for one in found
    ]


def _joined(alternatives: str, hint: str) -> str:
    """Return both hints, without what the first one says better."""
    if hint.startswith(("name another partition", "partitions that are up")):
        return alternatives
    own = hint.partition("; partitions that allow")[0].removesuffix(", or name another partition")
    return f"{alternatives}; or {own}" if own else alternatives


_INCLUDED = {
    "gpus.type": "gpus.most",
    "gpus.none": "gpus.most",
    "features.unknown": "features.nodes",
    "features.form": "features.nodes",
}
"""What is said of a whole cluster, and what would be said of each partition again."""


def _told_once(found: list[Finding]) -> list[Finding]:
    told = {_INCLUDED[one.code] for one in found if one.code in _INCLUDED}
    return [one for one in found if one.code not in told]


def _unique(found: list[Finding]) -> list[Finding]:
    """Drop what is said twice, errors first."""
    seen = set()
    kept = []
    for one in sorted(found, key=lambda finding: finding.level != "error"):
        key = (one.code, one.field, one.message)
        if key not in seen:
            seen.add(key)
            kept.append(one)
    return kept
