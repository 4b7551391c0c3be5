"""Findings about ranks that hold others back, their binding and GPUs, and communication."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, comb, log
from statistics import fmean, median
from typing import TYPE_CHECKING

from hpml_orchestrator.diagnosis.capacity import BUSY, cpus_busy, cpus_per_rank, more_cpus
from hpml_orchestrator.diagnosis.model import Change
from hpml_orchestrator.diagnosis.parts import fits, step_shares
from hpml_orchestrator.diagnosis.shares import (
    cpu_waits,
    excesses,
    exclude,
    find,
    nodes_text,
    part,
    ranks_text,
    shares,
    steps_known,
    train_share,
)
from hpml_orchestrator.diagnosis.thresholds import CAUSE_SHARE, SURE, THRESHOLDS
from hpml_orchestrator.records.texts import seconds_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hpml_orchestrator.diagnosis.model import Facts, Finding, GpuFacts, RankFacts

_HOT = ("hw_", "sw_thermal", "power_brake")  # the power cap holds every busy GPU down


@dataclass(frozen=True)
class Slow:
    """Ranks that the others wait for."""

    ranks: tuple[int, ...] = ()  # their numbers
    share: float = 0.0  # how much longer the slowest works than the others, as a share of a step
    how: str = ""  # what shows it, in words
    cause: str = ""  # kind of finding that explains it, or `more-samples`; empty if nothing does
    why: str = ""  # the figures of the cause
    doubt: str = ""  # what is missing if the measured waits are not enough to compare the ranks


def find_slow(facts: Facts) -> Slow:
    """Return the ranks that others wait for, and the cause if a second figure shows it.

    In a synchronous training all ranks need the same time for a step. The slow one is the one
    that waits least before the collectives: without that waiting its steps are the longest.
    Without measured waiting only data, and steps that are not synchronous, can show it.
    """
    if not steps_known(facts):
        return Slow()
    ranks = {rank.rank: rank for rank in facts.ranks if rank.step_seconds and (rank.steps or 0) > 0}
    whole = {number: (rank.step_seconds or 0) / (rank.steps or 1) for number, rank in ranks.items()}
    longest = max(whole.values(), default=0.0)
    if len(ranks) <= 1 or not longest:
        return Slow()
    waits = {
        number: part(rank, "wait_seconds") / (rank.steps or 1)
        for number, rank in ranks.items()
        if rank.wait_seconds is not None
    }
    # Waits that only some ranks report cannot be compared: a rank without any would always look
    # slowest.
    measured = len(waits) == len(ranks)
    if measured and (doubt := _doubt([*ranks.values()])):
        return Slow(doubt=doubt)
    own = {number: whole[number] - waits.get(number, 0.0) * measured for number in ranks}
    if measured and all(rank.comm_seconds is not None for rank in ranks.values()):
        # a rank that still sends while another waits is not slow: the link is
        own = {
            n: own[n] - part(rank, "comm_seconds") / (rank.steps or 1) for n, rank in ranks.items()
        }
    more = {number: value / longest for number, value in excesses(own).items()}
    loading = _excess_of(ranks, "data_wait_seconds", longest)
    if not measured and not _slowest(more):
        more = loading
    slow = _slowest(more)
    if not slow:
        return Slow()
    if measured and (doubt := _doubt([*ranks.values()], slow)):
        return Slow(doubt=doubt)
    share = max(more[number] for number in slow)
    first = max(slow, key=lambda number: more[number])
    if measured:
        others = [waits[number] / longest for number in ranks if number not in slow]
        how = f"it waits {waits[first] / longest:.0%} of a step for others, these wait "
        how += f"{median(others):.0%} for it"
        if (steps := ranks[first].measured_steps) is not None:
            times = f"{ranks[first].slowest_steps or 0:g} of {steps:g} measured steps"
            how += f"; it waited least in {times}"
    else:
        how = f"its steps take {share:.0%} longer than those of the others"
    cause, why = _cause(facts, slow, first, share, loading, ranks, longest)
    return Slow(tuple(slow), share, how, cause, why)


def _doubt(ranks: Sequence[RankFacts], slow: Sequence[int] = ()) -> str:
    """Return what is missing to compare the ranks by their waiting; empty if nothing is.

    Waits are measured in few steps. Whatever makes ranks late by chance makes each of them the
    slowest equally often. So ranks are slow only if they were the slowest more often than that
    allows, by Chernoff's bound for all choices of as many ranks.
    """
    if not all(map(fits, ranks)):
        return "a longer run: the few measured steps contradict the rest"
    if all(rank.measured_steps is None for rank in ranks):
        return ""  # each step was measured
    if not any(rank.measured_steps for rank in ranks):
        return "a longer run, or the newest `hpml_waits.py`: no step was measured"
    steps = min(rank.measured_steps or 0.0 for rank in ranks)
    # Even a rank that was slowest in every one of k measured steps is so by chance with a
    # probability of P^(1-k), for any of P ranks. With fewer steps than this no result could be
    # below SURE.
    least = ceil(1 - log(SURE) / log(len(ranks)))
    if steps < least:
        return f"a longer run: {steps:g} measured steps, at least {least} are needed"
    if not slow:
        return ""
    chance = len(slow) / len(ranks)
    seen = sum(
        (rank.slowest_steps or 0.0) / rank.measured_steps
        for rank in ranks
        if rank.rank in slow and rank.measured_steps
    )
    seen = min(1.0, seen)
    # Chernoff: the probability of a share `seen` in n steps is at most exp(-n KL(seen || chance)).
    # The binomial coefficient counts the groups of ranks that might have been found instead.
    surprise = seen * log(seen / chance) if seen > chance else 0.0
    if chance < seen < 1:
        surprise += (1 - seen) * log((1 - seen) / (1 - chance))
    if log(comb(len(ranks), len(slow))) - steps * surprise <= log(SURE):
        return ""
    times = f"{seen * steps:.0f} of {steps:g} measured steps"
    return f"a longer run: {ranks_text(slow)} waited least in {times}, which can be chance"


def _excess_of(ranks: Mapping[int, RankFacts], name: str, longest: float) -> dict[int, float]:
    known = {
        number: part(rank, name) / (rank.steps or 1) / longest
        for number, rank in ranks.items()
        if getattr(rank, name) is not None
    }
    return excesses(known) if len(known) == len(ranks) else {}


def _slowest(more: Mapping[int, float]) -> list[int]:
    limit = THRESHOLDS["slow-rank"].warn
    slow = [number for number, share in more.items() if share >= limit]
    # If more than half of the ranks stand out, the others are the exception and the median says
    # nothing about who is late.
    return slow if 2 * len(slow) <= len(more) else []


def _cause(
    facts: Facts,
    slow: Sequence[int],
    first: int,
    share: float,
    loading: Mapping[int, float],
    ranks: Mapping[int, RankFacts],
    longest: float,
) -> tuple[str, str]:
    # The order matters: wrong binding and a throttled GPU delay everything that a rank does, so
    # they also explain why its data or its copies are late.
    if all(ranks[number].bound_as_planned is False for number in slow) or (
        set(slow) <= set(crowded(facts))
    ):
        return "wrong-binding", ""
    hot = {gpu.uuid for gpu, _ in _hot_gpus(facts)}
    if all(ranks[number].gpu in hot for number in slow):
        return "throttled", ""
    lacking = _excess_of(ranks, "cpu_wait_seconds", longest)
    if lacking.get(first, 0.0) >= CAUSE_SHARE * share:
        return "cpu-contention", f"without a CPU for {lacking[first]:.0%} of a step longer"
    if loading.get(first, 0.0) >= CAUSE_SHARE * share:
        return "waits-for-data", f"it waits {loading[first]:.0%} of a step longer for its data"
    copies = _excess_of(ranks, "transfer_seconds", longest)
    if copies.get(first, 0.0) >= CAUSE_SHARE * share:
        return "host-to-device", f"its copies to the GPU take {copies[first]:.0%} of a step longer"
    counts = {
        number: rank.samples / rank.steps
        for number, rank in ranks.items()
        if rank.samples and rank.steps
    }
    if len(counts) == len(ranks):
        usual = median(value for number, value in counts.items() if number not in slow)
        if counts[first] / usual - 1 >= CAUSE_SHARE * share:
            return "more-samples", f"it has {counts[first] / usual - 1:.0%} more samples per step"
    return "", ""


def slow_rank(facts: Facts) -> Finding | str | None:
    """Return the ranks that the others wait for, unless binding or a hot GPU is the finding."""
    if facts.world_size <= 1 or not steps_known(facts):
        return None
    slow = find_slow(facts)
    if contended(facts) and slow.cause != "cpu-contention":
        return None  # which rank is late changes with the other processes
    if not slow.ranks:
        known = shares(facts, "wait_seconds") or shares(facts, "data_wait_seconds")
        if len(known) < len(facts.ranks):
            return None
        over = max(known.values()) - min(known.values())
        return f"ranks differ by {over:.0%} of a step" if waits_are_known(facts) else None
    if slow.cause in ("wrong-binding", "throttled"):
        return None
    usual = shares(facts, "data_wait_seconds")
    if slow.cause == "waits-for-data" and THRESHOLDS["waits-for-data"].level(
        median(usual.values())
    ):
        return None  # most ranks wait for data, and some of them longest
    nodes = [rank.node for rank in facts.ranks if rank.rank in slow.ranks]
    names = ranks_text(slow.ranks)
    reason = {
        "": "the cause is not known",
        "cpu-contention": "other processes have its CPUs",
        "waits-for-data": "it waits for data",
        "host-to-device": "its copies to the GPU are slow",
        "more-samples": "it has more samples",
    }[slow.cause]
    evidence = [f"{slow.share:.0%} of a step longer than the others", slow.how, slow.why]
    return find(
        facts,
        "slow-rank",
        slow.share,
        f"{names} on {nodes_text(nodes)} slows the others down by {slow.share:.0%}: {reason}",
        list(filter(None, evidence)),
        _changes(facts, slow, names, nodes),
        saves=slow.share,
        of_steps=True,
    )


def _changes(facts: Facts, slow: Slow, names: str, nodes: Sequence[str]) -> list[Change]:
    changes: list[Change] = []
    if slow.cause == "cpu-contention":
        return _free_cpus(facts, nodes)
    if slow.cause == "more-samples":
        text = "give every rank the same number of samples, as DistributedSampler does"
        changes.append(Change(text))
    elif slow.cause == "waits-for-data":
        changes.append(Change(f"compare the storage and the loader of {names} with the others'"))
    elif slow.cause == "host-to-device":
        changes.append(Change(f"check link and binding of {names}: `hpml topo`"))
    if set(nodes) < {rank.node for rank in facts.ranks}:
        changes += exclude(facts.job, nodes, faulty=False)
    elif not slow.cause:
        changes.append(Change(f"profile a step of {names} and of another rank, and compare them"))
    return changes


def contended(facts: Facts) -> bool:
    """Whether ranks lacked CPU time: then others wait for them, and collectives take longer."""
    lacked = cpu_waits(facts)
    return bool(lacked and THRESHOLDS["cpu-contention"].level(max(lacked.values())))


def cpu_contention(facts: Facts) -> Finding | str | None:
    """Return whether ranks could run but other processes had their CPUs."""
    lacked = cpu_waits(facts)
    if not lacked or crowded(facts) or find_slow(facts).cause == "cpu-contention":
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
        _free_cpus(facts, nodes),
        saves=share,
        of_steps=True,
    )
    return found or f"ranks lacked a CPU for {share:.0%} of the training"


def _free_cpus(facts: Facts, nodes: Sequence[str]) -> list[Change]:
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


def waits_are_known(facts: Facts) -> bool:
    """Whether every rank's waiting for others was measured, in enough steps to compare them."""
    waits = shares(facts, "wait_seconds")
    return len(waits) == len(facts.ranks) and not find_slow(facts).doubt


def crowded(facts: Facts) -> dict[int, float]:
    """Return ranks that outnumber the CPUs they share, with the CPUs per rank."""
    found: dict[int, float] = {}
    by_node: dict[str, list[RankFacts]] = {}
    for rank in facts.ranks:
        if rank.cpus:
            by_node.setdefault(rank.node, []).append(rank)
    for ranks in by_node.values():
        # More ranks than CPUs within one mask is a shortage, whatever the other masks are.
        # Overlapping masks alone are not: ranks bound to the same domain may still have a core
        # each.
        for cpus in {frozenset(rank.cpus or ()) for rank in ranks}:
            inside = [rank.rank for rank in ranks if set(rank.cpus or ()) <= cpus]
            if len(inside) > len(cpus):
                for number in inside:
                    found[number] = min(found.get(number, 1.0), len(cpus) / len(inside))
    return found


def wrong_binding(facts: Facts) -> Finding | str | None:
    """Return ranks that do not run as planned, or share a core with others."""
    wrong = [rank for rank in facts.ranks if rank.bound_as_planned is False]
    shared = crowded(facts)
    numbers = sorted({rank.rank for rank in wrong} | set(shared))
    if not numbers:
        right = sum(rank.bound_as_planned is True for rank in facts.ranks)
        return f"{right} of {len(facts.ranks)} ranks bound as planned" if right else None
    evidence = [f"{len(numbers)} of {max(facts.world_size, len(facts.ranks))} ranks"]
    evidence += dict.fromkeys(text for rank in wrong for text in rank.binding_faults[:1])
    if shared:
        least = min(shared.values())
        evidence.append(f"{ranks_text([*shared])}: {least:.2g} CPUs for each")
    slow = find_slow(facts)
    saves = None
    if set(slow.ranks) & set(numbers):
        saves = slow.share
        evidence.append(slow.how)
    elif shared and (whole := train_share(facts)):
        saves = (1 - min(shared.values())) * whole
    policy = facts.job["binding"]["policy"]
    changes = []
    if policy == "none":
        changes.append(Change("have hpml bind the ranks", "binding.policy", "gpu-local"))
    on_one_gpu = any(
        text.startswith("shares GPU") for rank in wrong for text in rank.binding_faults
    )
    if on_one_gpu:
        text = "one rank per GPU: fewer `ranks_per_node` or more `gpus`; NCCL ends with "
        changes.append(Change(f"{text}`Duplicate GPU detected` where two ranks share one"))
    else:
        text = "remove what binds again after hpml: `taskset`, `numactl`, KMP_AFFINITY, GOMP_…"
        changes.append(Change(text))
    what = "share cores" if shared else "share a GPU" if on_one_gpu else "do not run as planned"
    return find(
        facts,
        "wrong-binding",
        len(numbers),
        f"{ranks_text(numbers)} {what if len(numbers) > 1 else what.replace('do ', 'does ')}",
        evidence[:4],
        changes,
        saves=saves,
        of_steps=bool(slow.ranks),
    )


def _hot_gpus(facts: Facts) -> list[tuple[GpuFacts, float]]:
    found = []
    for node in facts.nodes:
        for gpu in node.gpus:
            seconds = sum(
                value for reason, value in gpu.throttled_seconds.items() if reason.startswith(_HOT)
            )
            if gpu.seconds and THRESHOLDS["throttled"].level(seconds / gpu.seconds):
                found.append((gpu, min(1.0, seconds / gpu.seconds)))
    return found


def throttled(facts: Facts) -> Finding | str | None:
    """Return GPUs that heat or a power brake slows down; the power cap does not count."""
    hot = _hot_gpus(facts)
    if not hot:
        gpus = [gpu for node in facts.nodes for gpu in node.gpus if gpu.seconds]
        return "no GPU is throttled" if gpus else None
    gpu, share = max(hot, key=lambda item: item[1])
    names = {one.uuid for one, _ in hot}
    nodes = [node.node for node in facts.nodes for one in node.gpus if one.uuid in names]
    reason = max(gpu.throttled_seconds.items(), key=lambda item: item[1])
    evidence = [
        f"{share:.0%} of the time, {seconds_text(reason[1])} by {reason[0]}",
        f"{gpu.uuid} {gpu.name} on {nodes_text(nodes)}".replace("  ", " "),
    ]
    slow = find_slow(facts)
    explains = slow.cause == "throttled"
    if explains:
        evidence.append(f"{ranks_text(slow.ranks)}: {slow.how}")
    # clocks that are held down seldom fall by more than half
    saves = slow.share if explains else share / 2
    count = f"{len(hot)} GPUs are" if len(hot) > 1 else "a GPU is"
    return find(
        facts,
        "throttled",
        share,
        f"{count} throttled on {nodes_text(nodes)}: {share:.0%} of the time",
        evidence,
        exclude(facts.job, nodes),
        saves=saves,
        of_steps=explains,
    )


def communication(facts: Facts) -> Finding | str | None:
    """Return whether collectives take a large part of the steps, without waiting for a rank."""
    share_of = shares(facts, "comm_seconds")
    if facts.world_size <= 1 or not share_of:
        return None
    slow = find_slow(facts)
    if contended(facts) or slow.cause == "cpu-contention":
        return None  # waiting for a rank without a CPU is not communication
    share = step_shares(facts.ranks)["communication"]
    waits = shares(facts, "wait_seconds")
    if not waits and slow.ranks:
        return None  # those seconds hold the waiting for that rank
    if not THRESHOLDS["communication"].level(share):
        return f"communication takes {share:.0%} of the steps"
    evidence = [f"{share:.0%} of the steps' time in collectives"]
    if not waits:
        evidence.append("part of it may be waiting for slower ranks, which is not measured")
    if not cpu_waits(facts):
        evidence.append(
            "whether other processes used the CPUs is unknown: needs the newest `hpml_channel.py`"
        )
    peak = facts.peaks.link_bandwidth if facts.peaks else None
    if peak and facts.peaks:
        evidence.append(f"the link carries {peak / 1e9:.3g} GB/s ({facts.peaks.origin})")
    return find(
        facts,
        "communication",
        share,
        f"communication: {share:.0%} of each step",
        evidence,
        _less_communication(facts),
        saves=share,
        of_steps=True,
    )


def _less_communication(facts: Facts) -> list[Change]:
    changes: list[Change] = []
    nodes = facts.node_count
    if nodes > 1:
        text = "accumulate gradients over several steps (`no_sync`), or enlarge DDP's buckets"
        changes.append(Change(text))
    changes.append(
        Change("send gradients as bf16: DDP's `bf16_compress_hook`", touches_accuracy=True)
    )
    if nodes > 1 and facts.gpu_count:
        changes.append(Change("check the network card of each rank: `hpml show RUN --ranks`"))
    if nodes > 1:
        text = f"use fewer nodes: {nodes // 2} instead of {nodes}"
        changes.append(Change(text, "resources.nodes", nodes // 2, touches_accuracy=True))
    return changes
