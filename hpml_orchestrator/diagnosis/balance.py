"""Findings about ranks that hold others back, their binding and GPUs, and communication."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from hpml_orchestrator.diagnosis.averaging import averaging, larger_buckets
from hpml_orchestrator.diagnosis.contention import (
    also_contended,
    contended,
    fewer_threads,
    free_cpus,
)
from hpml_orchestrator.diagnosis.model import Change, Finding
from hpml_orchestrator.diagnosis.phases import slow_evaluation, slow_saving
from hpml_orchestrator.diagnosis.shares import (
    cpu_waits,
    exclude,
    find,
    nodes_text,
    ranks_text,
    shares,
    step_seconds,
    step_shares,
    steps_known,
    train_share,
)
from hpml_orchestrator.diagnosis.slow_ranks import (
    OWN_WORK,
    crowded,
    find_slow,
    hot_gpus,
    waits_are_known,
)
from hpml_orchestrator.diagnosis.thresholds import THRESHOLDS
from hpml_orchestrator.diagnosis.uncounted import uncounted_time
from hpml_orchestrator.records.texts import seconds_text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hpml_orchestrator.diagnosis.model import Facts
    from hpml_orchestrator.diagnosis.slow_ranks import Slow


_LESS_ALONE = {
    "more-samples": "give every rank the same number of samples, as DistributedSampler does",
    "more-work": "do less often, or on all ranks, what only this rank does: printing, plots, files",
    "slow-evaluation": "share the evaluation among all ranks, or evaluate less often",
    "slow-saving": "save less often, or in the background (`async_save`)",
    "uncounted": "do it less often, or share it among all ranks; count it with `channel.timed`",
}


def slow_rank(facts: Facts) -> Finding | str | None:
    """Return the ranks that the others wait for, unless binding or a hot GPU is the finding."""
    if facts.world_size <= 1 or not steps_known(facts):
        return None
    slow = find_slow(facts)
    if contended(facts) and slow.cause not in ("cpu-contention", *OWN_WORK):
        return None  # which rank is late changes with the other processes
    if not slow.ranks:
        known = shares(facts, "wait_seconds") or shares(facts, "data_wait_seconds")
        if len(known) < len(facts.ranks):
            return None
        over = max(known.values()) - min(known.values())
        return f"ranks differ by {over:.0%} of a step" if waits_are_known(facts) else None
    own: dict[str, Callable[[Facts], Finding | str | None]] = {
        "slow-saving": slow_saving,
        "slow-evaluation": slow_evaluation,
        "uncounted": uncounted_time,
    }
    beside = own.get(slow.cause)
    if slow.cause in ("wrong-binding", "throttled") or (
        beside and isinstance(beside(facts), Finding)
    ):
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
        "own-contention": "its own threads and loader workers have its CPUs",
        "waits-for-data": "it waits for data",
        "host-to-device": "its copies to the GPU are slow",
        "more-samples": "it has more samples",
        "more-work": "it computes more",
        "slow-evaluation": "it evaluates alone",
        "slow-saving": "it saves alone",
        "uncounted": "it works alone between the steps, in what the script does not count",
    }[slow.cause]
    evidence = [f"{slow.share:.0%} of a step longer than the others", slow.how, slow.why]
    evidence += also_contended(facts, slow)
    longest = max(rank.step_seconds or 0.0 for rank in facts.ranks)  # which the share is of
    return find(
        facts,
        "slow-rank",
        slow.share,
        f"{names} on {nodes_text(nodes)} slows the others down by {slow.share:.0%}: {reason}",
        list(filter(None, evidence)),
        _changes(facts, slow, names, nodes),
        saves=slow.share * longest / step_seconds(facts),
        of_steps=True,
    )


def _changes(facts: Facts, slow: Slow, names: str, nodes: Sequence[str]) -> list[Change]:
    changes: list[Change] = []
    if slow.cause == "cpu-contention":
        return free_cpus(facts, nodes)
    if slow.cause == "own-contention":
        return fewer_threads(facts)
    if slow.cause in OWN_WORK:
        return [Change(_LESS_ALONE[slow.cause])]
    if slow.cause == "waits-for-data":
        changes.append(Change(f"compare the storage and the loader of {names} with the others'"))
    elif slow.cause == "host-to-device":
        changes.append(Change(f"check link and binding of {names}: `hpml topo`"))
    if set(nodes) < {rank.node for rank in facts.ranks}:
        changes += exclude(facts.job, nodes, faulty=False)
    elif not slow.cause:
        changes.append(Change(f"profile a step of {names} and of another rank, and compare them"))
    return changes


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
    policy = facts.job.binding.policy
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


def throttled(facts: Facts) -> Finding | str | None:
    """Return GPUs that heat or a power brake slows down; the power cap does not count."""
    hot = hot_gpus(facts)
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
    nodes = facts.node_count
    fewer = "exchange gradients less often: a larger batch per rank, or several steps per exchange "
    changes = [
        *larger_buckets(facts),
        Change(f"{fewer}(`no_sync`)", touches_accuracy=True),
        Change("send gradients as bf16: DDP's `bf16_compress_hook`", touches_accuracy=True),
    ]
    known = averaging(facts)
    if nodes > 1 and (known is None or known.link is None):
        measure = "" if known is None else "; `hpml bench` measures how large"
        changes.append(Change(f"enlarge DDP's buckets (`bucket_cap_mb`){measure}"))
    if nodes > 1 and facts.gpu_count:
        changes.append(Change("check the network card of each rank: `hpml show RUN --ranks`"))
    if nodes > 1:
        text = f"use fewer nodes: {nodes // 2} instead of {nodes}"
        changes.append(Change(text, "resources.nodes", nodes // 2, touches_accuracy=True))
    return changes
