"""From facts to findings: the one worth most first, then those without enough data."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING

from hpml_orchestrator.diagnosis import (
    balance,
    contention,
    data,
    gpu,
    phases,
    resources,
    uncounted,
)
from hpml_orchestrator.diagnosis.data import reading
from hpml_orchestrator.diagnosis.gpu import cpu_bound, used_gpus
from hpml_orchestrator.diagnosis.model import Change, Diagnosis, Finding
from hpml_orchestrator.diagnosis.shares import (
    BUSY,
    busy_cpus,
    hours,
    is_judged,
    shares,
    steps_known,
    steps_suffice,
    training_seconds,
)
from hpml_orchestrator.diagnosis.slow_ranks import find_slow
from hpml_orchestrator.diagnosis.thresholds import (
    FEW_STEPS,
    JUDGED_SECONDS,
    OVER_ASKED,
    SHORT_SECONDS,
    THRESHOLDS,
    TOO_SHORT_SECONDS,
)
from hpml_orchestrator.records.texts import seconds_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hpml_orchestrator.diagnosis.model import Facts

# What the monitor's figures say about a training that reports nothing: a note, no accusation.

_HALF = 0.5
_STORAGE = {
    True: "for storage",
    False: "hardly for storage, unless it is a network file system that the kernel does not count",
    None: "perhaps for storage",
}


def seen_by_monitor(facts: Facts) -> Finding | None:
    """Return a note on whether the program computes or waits, judged by the monitor's figures."""
    known, gpus = busy_cpus(facts), _busy_gpus(facts)
    seconds = max((node.seconds or 0.0 for node in facts.nodes), default=0.0)
    staged = THRESHOLDS["slow-staging"].level(facts.phases.get("staging", 0.0) / (seconds or 1.0))
    # The figures are means over staging, too, which also reads and waits.
    if facts.channel or known is None or seconds < SHORT_SECONDS or staged:
        return None
    if facts.gpu_count and (gpus is None or cpu_bound(facts)):
        return None  # the use of the GPUs is unknown, or a finding describes it
    busy, cpus, nodes = known
    # A rank may need only one of its CPUs: it computes although most CPUs are idle.
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


FINDINGS: tuple[Callable[[Facts], Finding | str | None], ...] = (
    uncounted.uncounted_time,
    uncounted.own_threads,
    contention.cpu_contention,
    contention.own_contention,
    data.waits_for_data,
    balance.slow_rank,
    balance.wrong_binding,
    balance.communication,
    data.host_to_device,
    gpu.tensor_cores_idle,
    gpu.launch_bound,
    gpu.cpu_bound,
    balance.throttled,
    gpu.faulty_gpu,
    gpu.memory_headroom,
    resources.memory_pressure,
    resources.gpu_unused,
    resources.cpus_unused,
    resources.memory_over_asked,
    resources.time_over_asked,
    data.slow_storage,
    data.slow_staging,
    phases.slow_start,
    phases.slow_saving,
    phases.slow_evaluation,
)
"""Each returns a finding, a sentence with figures if nothing is wrong, or None without data."""

_GUESS = 0.5  # what a cost counts of which no figure shows that the change saves it
_ONCE = 0.25  # what is paid once loses its share in a longer training
_SURE = {
    "slow-start": _ONCE,
    "slow-staging": _ONCE,
    "memory-pressure": 1.0,  # what these two cost is counted: the run was lost
    "faulty-gpu": 1.0,
    **dict.fromkeys(OVER_ASKED, 0.0),  # slows nobody down
}
_RANKS_RUN = ("running", "rendezvous", "preparation", "warm-up", "training")


def diagnose(facts: Facts) -> Diagnosis:
    """Return the findings about a run, the healthy figures, and what could not be judged."""
    results = [finding(facts) for finding in FINDINGS]
    found = [result for result in results if isinstance(result, Finding)]
    # Free GPU memory slows nothing down, so it must not become the headline of a healthy run.
    notes = [one for one in found if one.kind == "memory-headroom"]
    found = [one for one in found if one.kind != "memory-headroom"]
    notes += filter(None, [seen_by_monitor(facts)])
    # the sort is stable: of equal worth, the critical ones come first, in the order above
    found.sort(key=lambda one: (-_worth(facts, one), one.level != "critical"))
    return Diagnosis(
        facts,
        tuple(found),
        tuple(_unknown(facts)),
        tuple(result for result in results if isinstance(result, str)),
        tuple(replace(one, level="note") for one in notes),
        phases.time_text(facts),
        tuple(
            finding.__name__.replace("_", "-")
            for finding, result in zip(FINDINGS, results, strict=True)
            if result is not None
        ),
    )


def share_of_run(facts: Facts, one: Finding) -> float:
    """Return the largest share of the run's time that a finding costs; 0 if it is not known."""
    cost, whole = one.gain_hours or 0.0, hours(facts)
    return one.gain if one.gain is not None else cost / whole if whole else 0.0


def _worth(facts: Facts, one: Finding) -> float:
    """Return the share of the run that a finding's change saves, times how sure that is."""
    return share_of_run(facts, one) * _SURE.get(one.kind, _GUESS if one.gain is None else 1.0)


def _unknown(facts: Facts) -> Iterator[Finding]:
    """Yield a finding of level `unknown` for each missing source of data."""
    if rest := uncounted.unexplained_rest(facts):
        yield rest
    yield from _unknown_steps(facts)
    yield from _unknown_use(facts)
    if facts.ranks and all(rank.bound_as_planned is None for rank in facts.ranks):
        needs = "`binding.verify: warn`, and ranks that run for over 10 s"
        if ran := sum(facts.phases.get(name, 0.0) for name in _RANKS_RUN):
            needs += f": these ran {seconds_text(ran)}"
        if facts.job.binding.policy == "none":
            needs = "`binding.policy: gpu-local`"
        yield _needs("wrong-binding", "where the ranks ran", needs)


def _unknown_steps(facts: Facts) -> Iterator[Finding]:
    what = "what the time of a step is spent on"
    took = facts.elapsed_seconds or 0.0
    if not facts.channel:
        needs = "the channel in the training (`hpml_channel.py`)"
        needs += "; the note says what the monitor saw" * bool(seen_by_monitor(facts))
        has_time = SHORT_SECONDS if facts.failed or not facts.over else TOO_SHORT_SECONDS
        if took < has_time:
            longer = "a run that gets to its steps" if facts.failed else "a longer run"
            lasted = "ended after" if facts.over else "has run for"
            needs = f"{longer}: this one {lasted} {seconds_text(took)} and reported no step"
        yield _needs("waits-for-data", what, needs)
    elif not steps_suffice(facts):
        steps = max((rank.steps or 0.0 for rank in facts.ranks), default=0.0)
        trained = max(map(training_seconds, facts.ranks), default=0.0)
        had = f"{steps:g} in {math.floor(trained * 10) / 10:g} s"
        needs = (
            f"at least {FEW_STEPS} steps and {TOO_SHORT_SECONDS:g} s of training after the warm-up"
        )
        yield _needs("waits-for-data", what, f"{needs}: there were {had if steps else 'none'}")
    elif not steps_known(facts):
        needs = "`channel.timed(...)` between the steps: most of the training is not counted"
        yield _needs("waits-for-data", what, needs)
    else:
        yield from _unknown_parts(facts)


def _unknown_parts(facts: Facts) -> Iterator[Finding]:
    several, gpus = facts.world_size > 1, facts.gpu_count > 0
    if several and contention.contended(facts):
        told = "communication"
        told += "" if find_slow(facts).cause else ", and which rank the others wait for"
        again = "on a node of its own, or when the machine is idle"
        if facts.on_slurm and not facts.job.resources.exclusive:
            again = "with `resources.exclusive: true`"
        needs = f"a run whose ranks have their CPUs for themselves: run it again {again}"
        yield _needs("communication", told, needs)
    for kind, name, told, wanted in (
        ("waits-for-data", "data_wait_seconds", "waiting for data", True),
        ("slow-rank", "wait_seconds", "which rank the others wait for", several),
        ("communication", "comm_seconds", "communication", several),
        ("host-to-device", "transfer_seconds", "copies to the GPU", gpus),
    ):
        if kind in ("slow-rank", "communication") and contention.contended(facts):
            continue
        if wanted and not shares(facts, name):
            yield _needs(kind, told, f"`{name}` from the channel")
        elif wanted and kind == "slow-rank" and (doubt := find_slow(facts).doubt):
            yield _needs(kind, told, doubt)


def _unknown_use(facts: Facts) -> Iterator[Finding]:
    kind = "gpu-unused" if facts.gpu_count else "cpus-unused"
    what = "use of GPUs, CPUs and memory" if facts.gpu_count else "use of CPUs and memory"
    gpus = [one for node in facts.nodes for one in node.gpus]
    if not facts.nodes and facts.monitored:
        yield _needs(kind, what, "a monitor that ran for some seconds")
    elif not facts.nodes:
        changes = [Change("monitor the job", "monitor", True)]
        yield Finding(kind, "unknown", what, changes=changes, needs="`monitor: true`")
    elif facts.gpu_count and not gpus:
        yield _needs(kind, "use of the GPUs", "nodes whose NVML answers")
    elif gpus and all(one.sm_active_ratio is None for one in gpus):
        needs = "Hopper or newer GPUs"
        yield _needs("tensor-cores-idle", "use of SMs and tensor cores", needs)

    took = facts.elapsed_seconds or JUDGED_SECONDS
    if took < JUDGED_SECONDS and is_judged(replace(facts, elapsed_seconds=JUDGED_SECONDS)):
        needs = f"a run of {JUDGED_SECONDS / 60:g} minutes: this one took {seconds_text(took)}"
        yield _needs("time-over-asked", "whether it asks for more than it uses", needs)


def _needs(kind: str, what: str, needs: str) -> Finding:
    return Finding(kind, "unknown", what, needs=needs)
