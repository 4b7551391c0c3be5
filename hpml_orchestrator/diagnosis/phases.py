"""Findings about time outside of the steps: start-up, checkpoints, evaluation."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from hpml_orchestrator.diagnosis.contention import also_contended, contended
from hpml_orchestrator.diagnosis.model import Change
from hpml_orchestrator.diagnosis.shares import (
    COMPUTE,
    find,
    ranks_text,
    step_shares,
    steps_suffice,
    uncounted_shares,
)
from hpml_orchestrator.diagnosis.slow_ranks import find_slow
from hpml_orchestrator.diagnosis.thresholds import LONG_PHASE_SECONDS
from hpml_orchestrator.records.texts import seconds_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpml_orchestrator.diagnosis.model import Facts, Finding

_LEAST = 0.005
_SAVING = 0.05  # share of the training that checkpoints may take
_STARTING = ("start-up", "launch", "rendezvous", "preparation", "warm-up")
_ADVICE = {
    "start-up": "do less in `environment.setup`, and load fewer modules",
    "launch": "load the software from the node's disk: a container image, or a packed environment",
    "rendezvous": "let ranks reach `init_process_group` together: the first waits for the last",
    "preparation": "load or build data, model and checkpoint faster: do once, before the job, what "
    "is the same in each run",
    "warm-up": "cache what the first steps compile (`TORCHINDUCTOR_CACHE_DIR` on shared storage)",
}
_NETWORK = "check the network between the nodes: `NCCL_DEBUG=INFO`, NCCL_SOCKET_IFNAME"
_APART = 'tell both apart: `channel.event("preparation")` after `init_process_group`'

_OF_TRAINING = {
    "evaluation_seconds": "evaluation",
    "save_seconds": "checkpoints",
    "other_seconds": "other timed blocks",
}


def time_text(facts: Facts) -> str:
    """Return where the run's time went, however short it was; empty without phases."""
    whole, training = sum(facts.phases.values()), facts.phases.get("training")
    if not whole:
        return ""
    texts = [_percent({name: seconds / whole for name, seconds in facts.phases.items()})]
    if training:
        beside = {
            text: max((getattr(rank, name) or 0.0 for rank in facts.ranks), default=0.0) / training
            for name, text in _OF_TRAINING.items()
        }
        outside = max(uncounted_shares(facts).values(), default=0.0)
        beside["outside of what the script counts"] = outside
        texts.append(_percent(beside, "of the training: "))
    parts = step_shares(facts.ranks)
    if len(parts) > 1:
        # What remains of a step is called compute only if every other part was measured; here some
        # may be unknown.
        parts["the rest"] = parts.pop(COMPUTE)
        others = ", while other processes had the CPUs" if contended(facts) else ""
        texts.append(_percent(parts, f"of the steps{others}: "))
    return "; ".join(filter(None, texts))


def _percent(shares: Mapping[str, float], title: str = "") -> str:
    texts = [f"{name} {min(1.0, share):.0%}" for name, share in shares.items() if share >= _LEAST]
    return title + ", ".join(texts) if texts else ""


def slow_start(facts: Facts) -> Finding | str | None:
    """Return whether the run takes long until its first step; staging does not count."""
    took = {name: facts.phases[name] for name in _STARTING if name in facts.phases}
    if not took or not facts.elapsed_seconds or "training" not in facts.phases:
        return None
    seconds = sum(took.values())
    share, longest = seconds / facts.elapsed_seconds, max(took, key=lambda name: took[name])
    text = f"the start took {seconds_text(seconds)}"
    if seconds < LONG_PHASE_SECONDS:
        return text
    is_apart = "rendezvous" in took or facts.world_size == 1  # one rank meets nobody
    own = f"the script's own preparation{'' if is_apart else ', with the rendezvous'}"
    named = {own if name == "preparation" else name: value for name, value in took.items()}
    parts = ", ".join(f"{name} {seconds_text(value)}" for name, value in named.items())
    evidence, is_explained = [f"{share:.0%} of the run", parts], contended(facts)
    if is_explained:
        evidence.append("other processes had the CPUs: all that the start does took longer")
    found = find(
        facts,
        "slow-start",
        share,
        f"slow start: {seconds_text(seconds)} before the first step, most of it "
        f"{max(named, key=lambda name: named[name])}",
        evidence,
        [] if is_explained else _faster_start(facts, longest, is_apart=is_apart),
        saves=None if is_explained else share,
    )
    return found or text


def _faster_start(facts: Facts, longest: str, *, is_apart: bool) -> list[Change]:
    changes = [Change(_ADVICE[longest])]
    if longest == "rendezvous" and facts.node_count > 1:
        changes.insert(0, Change(_NETWORK))
    if longest == "preparation" and not is_apart:
        changes.append(Change(_APART))
    return changes


def slow_saving(facts: Facts) -> Finding | str | None:
    """Return whether checkpoints take a large part of the training."""
    # Not to the node's disk: the next attempt begins with an empty one.
    changes = [
        Change(f"save less often{_rarer(facts)}"),
        Change("save in the background (`torch.distributed.checkpoint.async_save`)"),
    ]
    if sum(bool(rank.saves) for rank in facts.ranks) > 1:
        changes.append(Change("let fewer ranks save: one for each copy of the weights"))
    return _beside(facts, "slow-saving", "save_seconds", "checkpoints", changes)


def _rarer(facts: Facts) -> str:
    """Return how often to save instead, in words; empty if nobody reported the checkpoints."""
    seconds, saves, steps = (
        max((getattr(rank, name) or 0.0 for rank in facts.ranks), default=0.0)
        for name in ("save_seconds", "saves", "steps")
    )
    between = facts.phases.get("training", 0.0) - seconds
    if not saves or not steps or between <= 0:
        return ""
    each = seconds / saves
    every = math.ceil(each * (1 / _SAVING - 1) * steps / between)
    return f": every {every} steps ({seconds_text(each / _SAVING)}) takes {_SAVING:.0%}"


def slow_evaluation(facts: Facts) -> Finding | str | None:
    """Return whether evaluation takes a large part of the training."""
    changes = [
        Change("share the evaluation among all ranks, without gradients (`torch.inference_mode`)"),
        Change("evaluate less often"),
    ]
    return _beside(facts, "slow-evaluation", "evaluation_seconds", "evaluation", changes)


def _beside(
    facts: Facts, kind: str, name: str, what: str, changes: list[Change]
) -> Finding | str | None:
    """Return a finding about seconds that are not part of the steps."""
    values = [getattr(rank, name) for rank in facts.ranks if getattr(rank, name) is not None]
    training = facts.phases.get("training")
    if not values or not training or not steps_suffice(facts):
        return None
    seconds = max(values)  # one rank saves, the others wait for it
    share = min(1.0, seconds / training)
    whole = min(1.0, seconds / facts.elapsed_seconds) if facts.elapsed_seconds else share
    slow = find_slow(facts)
    alone, also = "", []
    if slow.cause == kind:
        alone = f" by {ranks_text(slow.ranks)} alone while the others wait"
        also = also_contended(facts, slow)
    found = find(
        facts,
        kind,
        share,
        f"{what}: {share:.0%} of the training{alone}",
        [f"{share:.0%} of the training, {seconds_text(seconds)}", *also],
        changes,
        saves=whole,
    )
    return found or f"{what} {share:.0%} of the training"
