"""Findings about ranks that lack CPU time."""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING

from hpml_orchestrator.diagnosis.capacity import BUSY, cpus_busy, cpus_per_rank, more_cpus
from hpml_orchestrator.diagnosis.model import Change
from hpml_orchestrator.diagnosis.shares import cpu_waits, find, nodes_text
from hpml_orchestrator.diagnosis.slow_ranks import OWN_WORK, crowded, find_slow
from hpml_orchestrator.diagnosis.thresholds import THRESHOLDS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpml_orchestrator.diagnosis.model import Facts, Finding


def contended(facts: Facts) -> bool:
    """Whether ranks lacked CPU time: then others wait for them, and collectives take longer."""
    lacked = cpu_waits(facts)
    return bool(lacked and THRESHOLDS["cpu-contention"].level(max(lacked.values())))


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
        saves=share,
        of_steps=True,
    )
    return found or f"ranks lacked a CPU for {share:.0%} of the training"


def free_cpus(facts: Facts, nodes: Sequence[str]) -> list[Change]:
    """Return what gives ranks on these nodes CPUs that other processes have now."""
    changes: list[Change] = []
    if (cpus_busy(facts) or 0.0) >= BUSY:
        changes.append(Change("start fewer threads and loader workers (`OMP_NUM_THREADS`)"))
    if more := more_cpus(facts, cpus_per_rank(facts) + 1):
        text = f"ask for {more} CPUs per rank, for its threads and loader workers"
        changes.append(Change(text, "resources.cpus_per_rank", more))
    if facts.on_slurm and not facts.job["resources"]["exclusive"]:
        changes.append(Change("take nodes without other jobs", "resources.exclusive", True))
    where = nodes_text(list(filter(None, nodes))) or "the nodes"
    see = "" if facts.over else f" (`hpml attach {facts.run} -- top` shows them)"
    changes.append(Change(f"end the other processes on {where}{see}, or run when they have ended"))
    return changes
