"""Findings about time that no counter explains: between the steps, and within them."""

from __future__ import annotations

from statistics import fmean, median
from typing import TYPE_CHECKING

from hpml_orchestrator.diagnosis.contention import also_contended
from hpml_orchestrator.diagnosis.gpu import used_gpus
from hpml_orchestrator.diagnosis.model import Change, Finding
from hpml_orchestrator.diagnosis.shares import (
    COMPUTE,
    cpu_waits,
    find,
    fits,
    rank_parts,
    ranks_text,
    steps_known,
    thread_seconds,
    training_seconds,
    training_share,
    uncounted_seconds,
    uncounted_shares,
)
from hpml_orchestrator.diagnosis.slow_ranks import find_slow
from hpml_orchestrator.diagnosis.thresholds import TOO_SHORT_SECONDS
from hpml_orchestrator.records.texts import seconds_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpml_orchestrator.diagnosis.model import Facts, RankFacts

_LARGE = 0.5  # the rest of the steps, as a share of them
_STILL = 0.4  # share of that rest in which the training's thread does not run
_PROFILE = "torch.profiler for a few steps (`--profile` of the examples)"


def uncounted_time(facts: Facts) -> Finding | str | None:
    """Return whether much of the training lies outside of what the script counts."""
    shares = uncounted_shares(facts)
    if not shares:
        return None
    rank = _worst(facts, shares)
    if training_seconds(rank) < TOO_SHORT_SECONDS:
        return None  # however few its steps are
    share, seconds = shares[rank.rank], uncounted_seconds(rank)
    verdict = f"{share:.0%} of the training lies outside of what the script counts"
    if (slow := find_slow(facts)).cause == "uncounted":
        verdict += f": {ranks_text(slow.ranks)} works alone there while the others wait"
    evidence = [f"{seconds_text(seconds)} on rank {rank.rank}"]
    if len(shares) > 1:
        evidence[0] += f"; {median(shares.values()):.0%} of the training on the median rank"
    evidence += [*_cpu_there(facts, rank), *also_contended(facts, slow)]
    evidence.append("it holds what is not in `timed`, be it evaluation, saving, logging or gc")
    text = "wrap what runs between the steps in `channel.timed(...)`, evaluation with"
    text += (
        " `evaluation_seconds` and saving with `save_seconds`: the next report shows which it is"
    )
    changes = [Change(text), Change(f"see what runs there: {_PROFILE}")]
    saves = min(1.0, seconds / (facts.elapsed_seconds or training_seconds(rank)))
    return find(facts, "uncounted-time", share, verdict, evidence, changes, saves=saves) or verdict


def _cpu_there(facts: Facts, rank: RankFacts) -> list[str]:
    used, outside = thread_seconds(rank), uncounted_seconds(rank)
    if used is None:
        return []
    # The thread may have used a CPU in all of what is counted, or in nothing of it.
    least, most = max(0.0, used - (training_seconds(rank) - outside)), min(used, outside)
    text = f"its thread used {least:.0f} to {most:.0f} s of CPU there"
    others = map(thread_seconds, (one for one in facts.ranks if one is not rank))
    known = [seconds for seconds in others if seconds is not None]
    if known and (more := used - median(known)) >= 1:
        text += f", and {more:.0f} s more than the others' in the whole training"
    return [text]


def own_threads(facts: Facts) -> Finding | str | None:
    """Return whether other Python threads of a rank keep its training from running."""
    taken, waits = {}, cpu_waits(facts)
    for rank in facts.ranks if steps_known(facts) else ():
        still, whole = _still_seconds(facts, rank), training_seconds(rank)
        if still is None or rank.python_cpu_seconds is None:
            continue
        # It waits for Python's lock, or for a CPU that no other process has. Whoever is not known
        # to wait for other ranks or data may do that instead.
        lost = still / (rank.step_seconds or 1.0) if _is_measured(facts, rank) else 0.0
        if rank.rank in waits:
            lost += max(0.0, (rank.cpu_wait_seconds or 0.0) / whole - waits[rank.rank])
        taken[rank.rank] = min(lost, rank.python_cpu_seconds / whole)
    if not taken:
        return None
    rank = _worst(facts, taken)
    share, whole = taken[rank.rank], training_seconds(rank)
    beside, used = (rank.python_cpu_seconds or 0.0) / whole, thread_seconds(rank) or 0.0
    verdict = f"the script's own threads take {share:.0%} of each step"
    evidence = [
        f"{share:.0%} of the steps on rank {rank.rank}",
        f"they ran {beside:.0%} of the time, the thread that trains {used / whole:.0%}",
        "Python runs one thread at a time: while another computes, the training waits",
    ]
    changes = [
        Change("let another process do what these threads compute, such as a loader worker"),
        Change("let threads that poll wait instead: `queue.get()`, `Event.wait()`"),
    ]
    saves = training_share(facts, max(share, min(1.0, beside)))
    found = find(facts, "own-threads", share, verdict, evidence, changes, saves=saves)
    return found or verdict


def unexplained_rest(facts: Facts) -> Finding | None:
    """Return the question what the steps are spent on, if no figure explains most of them."""
    still = {rank.rank: _still_seconds(facts, rank) for rank in facts.ranks}
    known = {rank: seconds for rank, seconds in still.items() if seconds is not None}
    if not known or not steps_known(facts) or isinstance(own_threads(facts), Finding):
        return None
    rank = _worst(facts, known)
    rest, steps = rank_parts(rank)[COMPUTE], rank.step_seconds or 1.0
    if rest < _LARGE * steps or known[rank.rank] < _STILL * rest:
        return None
    core = min(1.0, (thread_seconds(rank) or 0.0) / rest)
    needs = "a look at the traces in `profile`" if facts.profile else _PROFILE
    if not _is_measured(facts, rank):
        needs = f"its waits measured (`hpml_waits.py`), or {needs}"
    if rank.python_cpu_seconds is None:
        needs = f"the newest `hpml_channel.py`, or {needs}"
    text = f"what {rest / steps:.0%} of the steps are spent on: the thread of rank {rank.rank} used"
    verdict = f"{text} at most {core:.0%} of a core there"
    return Finding("unexplained-rest", "unknown", verdict, needs=needs)


def _still_seconds(facts: Facts, rank: RankFacts) -> float | None:
    """Return the seconds of a rank's steps that no figure explains; None if one is missing.

    They are in no part of the steps; its thread neither ran nor waited for a CPU; and neither
    threads of the framework nor a GPU computed.
    """
    used, rest = thread_seconds(rank), rank_parts(rank).get(COMPUTE)
    busy = [(one.utilization_ratio or 0.0) * (one.seconds or rest or 0) for one in used_gpus(facts)]
    if used is None or rest is None or rank.cpu_wait_seconds is None:
        return None
    if facts.gpu_count and not busy:
        return None
    computed = fmean(busy) if busy else 0.0
    if rank.python_cpu_seconds is not None:
        others = (rank.loader_cpu_seconds or 0.0) + rank.python_cpu_seconds
        computed += max(0.0, (rank.helper_cpu_seconds or 0.0) - others)
    return max(0.0, rest - used - rank.cpu_wait_seconds - computed)


def _is_measured(facts: Facts, rank: RankFacts) -> bool:
    """Whether it is known how long a rank waited for its data and the other ranks."""
    waits = [rank.data_wait_seconds]
    if facts.world_size > 1:
        waits += [rank.wait_seconds, rank.comm_seconds]
    return fits(rank) and None not in waits


def _worst(facts: Facts, values: Mapping[int, float]) -> RankFacts:
    return max(facts.ranks, key=lambda rank: values.get(rank.rank, -1.0))
