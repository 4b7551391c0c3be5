"""Findings about ranks that lack CPU time."""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING

from hpml_orchestrator.diagnosis.model import Change
from hpml_orchestrator.diagnosis.shares import (
    cpu_waits,
    cpus_busy,
    cpus_per_rank,
    find,
    more_cpus,
    nodes_text,
    training_share,
    worker_argument,
)
from hpml_orchestrator.diagnosis.slow_ranks import OWN_WORK, crowded, find_slow, own_waits
from hpml_orchestrator.diagnosis.thresholds import THRESHOLDS
from hpml_orchestrator.errors import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpml_orchestrator.diagnosis.model import Facts, Finding
    from hpml_orchestrator.diagnosis.slow_ranks import Slow


def contended(facts: Facts) -> bool:
    """Whether ranks lacked CPU time: then others wait for them, and collectives take longer."""
    lacked = cpu_waits(facts)
    return bool(lacked and THRESHOLDS["cpu-contention"].level(max(lacked.values())))


def most_contended(facts: Facts) -> float | None:
    """Return how much of its training others had the CPUs of the rank that lacked them most.

    None if that was not measured, or if the ranks themselves outnumber their CPUs.
    """
    return None if crowded(facts) else max(cpu_waits(facts).values(), default=None)


def cpu_contention(facts: Facts) -> Finding | str | None:
    """Return whether ranks could run but other processes had their CPUs."""
    slow, lacked = find_slow(facts), cpu_waits(facts)
    if slow.cause in OWN_WORK:  # what explains a rank's delay comes first, and this beside it
        lacked = {rank: share for rank, share in lacked.items() if rank not in slow.ranks}
    if not lacked or crowded(facts) or slow.cause == "cpu-contention":
        return None
    most = max(lacked, key=lambda rank: lacked[rank])
    share = lacked[most]
    evidence = [
        f"{share:.0%} of the training on rank {most}, {fmean(lacked.values()):.0%} on average"
    ]
    evidence.append("it was ready to run, but other processes had its CPUs")
    if (busy := cpus_busy(facts)) is not None:
        evidence.append(f"the job itself kept {busy:.0%} of its CPUs busy")
    nodes = [rank.node for rank in facts.ranks if rank.rank in lacked]
    found = find(
        facts,
        "cpu-contention",
        share,
        f"ranks lack CPU time: {share:.0%} of the training",
        evidence,
        free_cpus(facts, nodes),
        saves=training_share(facts, share),
    )
    return found or (
        None if slow.cause in OWN_WORK else f"ranks lacked a CPU for {share:.0%} of the training"
    )


def also_contended(facts: Facts, slow: Slow) -> list[str]:
    """Return as evidence that ranks that are late by their own work lacked a CPU, too."""
    lacked = max((cpu_waits(facts).get(number, 0.0) for number in slow.ranks), default=0.0)
    is_shown = slow.cause in OWN_WORK and THRESHOLDS["cpu-contention"].level(lacked)
    text = f"other processes also had its CPUs for {lacked:.0%} of the training"
    return [text] if is_shown else []


def own_contention(facts: Facts) -> Finding | None:
    """Return whether ranks could run but their own threads and loader workers had their CPUs."""
    waits = own_waits(facts)
    if not waits or crowded(facts) or find_slow(facts).cause == "own-contention":
        return None
    most = max(facts.ranks, key=lambda rank: waits.get(rank.rank, -1.0))
    share = waits[most.rank]
    had = f"its own threads and loader workers had its {counted(len(most.cpus or ()), 'CPU')}"
    return find(
        facts,
        "own-contention",
        share,
        f"this job's own threads take the CPUs of its ranks: {share:.0%} of the training",
        [f"{share:.0%} of the training on rank {most.rank}: it was ready to run, but {had}"],
        fewer_threads(facts),
        saves=training_share(facts, share),
    )


def fewer_threads(facts: Facts) -> list[Change]:
    """Return what gives each rank as many CPUs as its threads and loader workers need."""
    cpus, changes = cpus_per_rank(facts), []
    given = worker_argument(facts)
    loads = any(rank.loader_cpu_seconds for rank in facts.ranks)
    workers = given[2] if given else facts.job.binding.loader_workers or int(loads)
    set_threads = facts.job.environment.variables.get("OMP_NUM_THREADS", "")
    if set_threads.isdecimal() and int(set_threads) > cpus:
        text = f"compute with as many threads as the rank has CPUs, not {set_threads}"
        changes.append(Change(text, "environment.variables.OMP_NUM_THREADS", str(cpus)))
    if workers and workers + 1 > cpus and more_cpus(facts, cpus + workers) == cpus + workers:
        text = f"ask for {cpus + workers} CPUs per rank: for it and its loaders"
        changes.append(Change(text, "resources.cpus_per_rank", cpus + workers))
    if not changes:
        text = f"start no more threads and loader workers than the rank has CPUs: {cpus}"
        changes.append(Change(f"{text} (`torch.set_num_threads`, `num_workers`)"))
    return changes


def free_cpus(facts: Facts, nodes: Sequence[str]) -> list[Change]:
    """Return what gives ranks on these nodes CPUs that other processes have now."""
    changes: list[Change] = []
    if more := more_cpus(facts, cpus_per_rank(facts) + 1):
        text = f"ask for {more} CPUs per rank, for its threads and loader workers"
        changes.append(Change(text, "resources.cpus_per_rank", more))
    if facts.on_slurm and not facts.job.resources.exclusive:
        changes.append(Change("take nodes without other jobs", "resources.exclusive", True))
    where = nodes_text(list(filter(None, nodes))) or "the nodes"
    see = "" if facts.over else f" (`hpml attach {facts.run} -- top` shows them)"
    changes.append(Change(f"end the other processes on {where}{see}, or run when they have ended"))
    return changes
