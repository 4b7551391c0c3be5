"""What the monitor's figures say about a training that reports nothing: a note, no accusation."""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING

from hpml_orchestrator.diagnosis.data import reading
from hpml_orchestrator.diagnosis.gpu import cpu_bound, used_gpus
from hpml_orchestrator.diagnosis.model import Finding
from hpml_orchestrator.diagnosis.shares import BUSY, busy_cpus
from hpml_orchestrator.diagnosis.thresholds import SHORT_SECONDS, THRESHOLDS

if TYPE_CHECKING:
    from hpml_orchestrator.diagnosis.model import Facts

_HALF = 0.5
_STORAGE = {
    True: "for storage",
    False: "hardly for storage, unless it is a network file system that the kernel does not count",
    None: "perhaps for storage",
}


def seen_by_monitor(facts: Facts) -> Finding | None:
    """Return the note that says whether the program computes or waits, as far as figures tell."""
    known, gpus = busy_cpus(facts), _busy_gpus(facts)
    seconds = max((node.seconds or 0.0 for node in facts.nodes), default=0.0)
    staged = THRESHOLDS["slow-staging"].level(facts.phases.get("staging", 0.0) / (seconds or 1.0))
    # staging reads and waits, too, and the figures are means of both
    if facts.channel or known is None or seconds < SHORT_SECONDS or staged:
        return None
    if facts.gpu_count and (gpus is None or cpu_bound(facts)):
        return None  # what the GPUs do is not known, or there is a finding about it
    busy, cpus, nodes = known
    # A rank may need one of its CPUs only: then it computes, though most CPUs are idle.
    ranks = max(1.0, facts.world_size * nodes / max(nodes, facts.node_count))
    used, is_full = min(1.0, busy / min(cpus, ranks)), busy >= BUSY * cpus
    figures = f"{busy / cpus:.0%} of {cpus:g} CPU{'s' * (cpus != 1)} busy"
    figures += "" if gpus is None else f", the GPUs {gpus:.0%} of the time"
    if gpus is not None and gpus >= _HALF:
        verdict = "it computes" + (", or communicates," * (facts.world_size > 1)) + " on the GPUs"
    elif used >= BUSY:
        where = "" if is_full else ", in few threads or not all the time"
        verdict = "it computes, or decodes data" + where
        if gpus is not None:
            verdict = f"the GPUs may wait for {'the CPUs' if is_full else 'one thread of a rank'}"
    else:
        # outside of Slurm, other programs may have the same CPUs
        waits = "it waits" if facts.on_slurm else "it waits, or others have its CPUs,"
        verdict = f"{waits} for {'most' if used < _HALF else 'a part'} of the time"
        is_slow, what = reading(facts)
        figures += f"; {_STORAGE[is_slow]}: {what}" if what else ""
    return Finding("seen-by-monitor", "note", f"{verdict}: {figures}")


def _busy_gpus(facts: Facts) -> float | None:
    """Return the share of the time in which the used GPUs ran kernels; None if unknown."""
    used = used_gpus(facts)
    if not used:
        return 0.0 if any(node.gpus for node in facts.nodes) else None
    known = [gpu.utilization_ratio for gpu in used if gpu.utilization_ratio is not None]
    return fmean(known) if known else None
