"""Which ranks the others wait for, and what makes them slow."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, comb, log
from statistics import median
from typing import TYPE_CHECKING

from hpml_orchestrator.diagnosis.shares import (
    cpu_waits,
    cpus_per_rank,
    excesses,
    fits,
    more_cpus,
    part,
    ranks_text,
    shares,
    steps_known,
    thread_seconds,
    training_seconds,
    uncounted_seconds,
)
from hpml_orchestrator.diagnosis.thresholds import CAUSE_SHARE, SURE, THRESHOLDS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hpml_orchestrator.diagnosis.model import Facts, GpuFacts, RankFacts

_HOT = ("hw_", "sw_thermal", "power_brake")  # the power cap holds every busy GPU down

OWN_WORK = ("slow-saving", "slow-evaluation", "uncounted", "more-samples", "more-work")
"""Causes that are the rank's own: it is late by them, whatever other processes do."""

_ALONE: tuple[tuple[str, str, Callable[[RankFacts], float]], ...] = (
    ("slow-evaluation", "evaluates", lambda rank: rank.evaluation_seconds or 0.0),
    ("slow-saving", "saves", lambda rank: rank.save_seconds or 0.0),
    ("uncounted", "does what no counter has", uncounted_seconds),
)


@dataclass(frozen=True)
class Slow:
    """Ranks that the others wait for."""

    ranks: tuple[int, ...] = ()  # their numbers
    share: float = 0.0  # how much longer the slowest works than the others, as a share of a step
    how: str = ""  # what shows it, in words
    cause: str = ""  # kind of finding that explains it, or of OWN_WORK; empty if nothing does
    why: str = ""  # the figures of the cause
    doubt: str = ""  # what is missing if the measured waits are not enough to compare the ranks


def find_slow(facts: Facts) -> Slow:
    """Return the ranks that others wait for, and the cause if a second figure shows it.

    In a synchronous training all ranks need the same time for a step. The slow one is the one
    that waits least before the collectives: without that waiting its steps are the longest.
    Without measured waiting only data, and steps that are not synchronous, can show it.

    What a rank does between its own steps lengthens the next step of those that wait for it.
    """
    if not steps_known(facts):
        return Slow()
    ranks = {rank.rank: rank for rank in facts.ranks if rank.step_seconds and (rank.steps or 0) > 0}
    whole = {number: (rank.step_seconds or 0) / (rank.steps or 1) for number, rank in ranks.items()}
    longest = max(whole.values(), default=0.0)
    if len(ranks) <= 1 or not longest:
        return Slow()
    delay, seen = _delays(ranks, whole)
    slow = _slow_in_steps(facts, ranks, {n: whole[n] + delay[n] for n in ranks}, longest)
    late = {number: seconds / longest for number, seconds in seen.items()}
    numbers = _slowest(late)
    first = max(late, key=lambda number: late[number])
    if not numbers or CAUSE_SHARE * slow.share > late[first]:
        return slow
    how = f"the others' steps take {late[first]:.0%} longer, in which they wait for it"
    cause = _cause(facts, numbers, first, late[first], {}, ranks, longest)
    return Slow(tuple(numbers), late[first], how, *cause)


def _delays(
    ranks: Mapping[int, RankFacts], whole: Mapping[int, float]
) -> tuple[dict[int, float], dict[int, float]]:
    """Return the seconds per step by which each rank's work between steps may delay the others.

    The second are those that a figure shows. What nothing counts may be waiting for the others,
    unless these waited for the rank.
    """

    def more(seconds_of: Callable[[RankFacts], float]) -> dict[int, float]:
        return excesses({n: seconds_of(rank) / (rank.steps or 1) for n, rank in ranks.items()})

    between = more(lambda rank: training_seconds(rank) - (rank.step_seconds or 0.0))
    counted = more(lambda rank: (rank.save_seconds or 0.0) + (rank.evaluation_seconds or 0.0))
    waits = more(lambda rank: part(rank, "wait_seconds"))
    measured = all(rank.wait_seconds is not None for rank in ranks.values())
    longer = excesses(whole)
    delay = {n: max(0.0, min(between[n], -longer[n])) for n in ranks}
    return delay, {n: min(delay[n], max(counted[n], -waits[n] * measured, 0.0)) for n in ranks}


def _slow_in_steps(
    facts: Facts, ranks: Mapping[int, RankFacts], whole: Mapping[int, float], longest: float
) -> Slow:
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
    known = {n: part(rank, name) for n, rank in ranks.items() if getattr(rank, name) is not None}
    return _excess(ranks, known, longest)


def _excess(
    ranks: Mapping[int, RankFacts], seconds: Mapping[int, float], longest: float
) -> dict[int, float]:
    """Return what each rank has more than the others, in longest steps; empty if one is unknown."""
    if not ranks.keys() <= seconds.keys():
        return {}
    return excesses({n: seconds[n] / (one.steps or 1) / longest for n, one in ranks.items()})


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
    hot = {gpu.uuid for gpu, _ in hot_gpus(facts)}
    if all(ranks[number].gpu in hot for number in slow):
        return "throttled", ""
    return _own_work(slow, first, share, ranks, longest) or _late_by(
        facts, first, share, loading, ranks, longest
    )


def _late_by(
    facts: Facts,
    first: int,
    share: float,
    loading: Mapping[int, float],
    ranks: Mapping[int, RankFacts],
    longest: float,
) -> tuple[str, str]:
    """Return what all ranks do and takes the slow one longer."""

    def lacked(waits: Mapping[int, float]) -> float:
        seconds = {n: waits[n] * training_seconds(one) for n, one in ranks.items() if n in waits}
        return _excess(ranks, seconds, longest).get(first, 0.0)

    lacking, own_lacking = lacked(cpu_waits(facts)), lacked(own_waits(facts))
    copies = _excess_of(ranks, "transfer_seconds", longest).get(first, 0.0)
    used = {n: cpu for n, one in ranks.items() if (cpu := thread_seconds(one)) is not None}
    working, least = _excess(ranks, used, longest).get(first, 0.0), CAUSE_SHARE * share
    # Loading that takes longer because other processes have the CPU is not the cause.
    waited, late = loading.get(first, 0.0) * (lacking < least), copies * (lacking < least)
    for cause, excess, why in (
        ("waits-for-data", waited, "it waits {:.0%} of a step longer for its data"),
        ("host-to-device", late, "its copies to the GPU take {:.0%} of a step longer"),
        ("more-work", working, "its main thread uses {:.0%} of a step more CPU time"),
        ("cpu-contention", lacking, "without a CPU for {:.0%} of a step longer"),
        ("own-contention", own_lacking, "without a CPU for {:.0%} of a step longer"),
    ):
        if excess >= least:
            return cause, why.format(excess)
    return "", ""


def _own_work(
    slow: Sequence[int], first: int, share: float, ranks: Mapping[int, RankFacts], longest: float
) -> tuple[str, str] | None:
    """Return what only the slow rank does, or does more of, if that explains the delay."""
    for cause, does, seconds_of in _ALONE:
        seconds = {number: seconds_of(rank) for number, rank in ranks.items()}
        more = _excess(ranks, seconds, longest)[first]
        # what all ranks do may take one of them longer for another reason
        is_alone = more * longest * (ranks[first].steps or 1) >= CAUSE_SHARE * seconds[first]
        if is_alone and more >= CAUSE_SHARE * share:
            of_training = seconds[first] / training_seconds(ranks[first])
            return cause, f"it {does} for {of_training:.0%} of its training, the others do not"
    counts = {
        number: rank.samples / rank.steps
        for number, rank in ranks.items()
        if rank.samples and rank.steps
    }
    if len(counts) == len(ranks):
        usual = median(value for number, value in counts.items() if number not in slow)
        if counts[first] / usual - 1 >= CAUSE_SHARE * share:
            return "more-samples", f"it has {counts[first] / usual - 1:.0%} more samples per step"
    return None


def own_waits(facts: Facts) -> dict[int, float]:
    """Return for each rank the least share of its training in which its helpers had its CPUs.

    Where a node has no more CPUs, loader workers do not count: the rank would have to do their work
    itself, in the same time.
    """
    found, is_full = {}, more_cpus(facts, cpus_per_rank(facts) + 1) is None
    known = cpu_waits(facts)
    for rank in facts.ranks:
        if rank.rank in known and rank.cpus:
            seconds, helpers = training_seconds(rank), (rank.helper_cpu_seconds or 0.0)
            if is_full:
                helpers = max(0.0, helpers - (rank.loader_cpu_seconds or 0.0))
            # at least: the CPUs that the rank and its helpers left may all be other processes'
            others = max(0.0, seconds - (rank.cpu_seconds or 0.0) / len(rank.cpus))
            waited = min(rank.cpu_wait_seconds or 0.0, seconds) - others
            found[rank.rank] = max(0.0, min(waited, helpers / len(rank.cpus))) / seconds
    return found


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


def hot_gpus(facts: Facts) -> list[tuple[GpuFacts, float]]:
    """Return the GPUs that heat or a power brake holds down, with the share of their time."""
    found = []
    for node in facts.nodes:
        for gpu in node.gpus:
            seconds = sum(
                value for reason, value in gpu.throttled_seconds.items() if reason.startswith(_HOT)
            )
            if gpu.seconds and THRESHOLDS["throttled"].level(seconds / gpu.seconds):
                found.append((gpu, min(1.0, seconds / gpu.seconds)))
    return found
