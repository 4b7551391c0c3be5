"""Figures that several findings need, and whether the figures of two runs are comparable."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from statistics import fmean, median
from typing import TYPE_CHECKING

from hpml_orchestrator.diagnosis.model import Change, Finding, RankFacts
from hpml_orchestrator.diagnosis.thresholds import (
    FEW_STEPS,
    JUDGED_SECONDS,
    SHORT_SECONDS,
    THRESHOLDS,
    TOO_SHORT_SECONDS,
)
from hpml_orchestrator.records.texts import first_few

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from hpml_orchestrator.diagnosis.model import Facts, GpuFacts, Level
    from hpml_orchestrator.records.job import Job

# What the time of a run consists of: its phases, and the parts of its steps on each rank.

COMPUTE = "compute"
PARTS = {
    "data_wait_seconds": "waiting for data",
    "transfer_seconds": "host to device",
    "wait_seconds": "waiting for slower ranks",
    "comm_seconds": "communication",
    "save_seconds": "saving",
    "evaluation_seconds": "evaluation",
}
"""Names of the parts by field of `RankFacts`; `compute` is the remainder of the steps."""
BETWEEN_STEPS = ("saving", "evaluation")
SAMPLED = ("wait_seconds", "comm_seconds")  # measured in few steps


def rank_parts(rank: RankFacts) -> dict[str, float]:
    """Return a rank's seconds by part; unknown parts are left out. Empty without steps."""
    if not rank.step_seconds:
        return {}
    known = {
        name: value
        for field, name in PARTS.items()
        if (value := getattr(rank, field)) is not None and (field not in SAMPLED or fits(rank))
    }
    inside = sum(value for name, value in known.items() if name not in BETWEEN_STEPS)
    return {COMPUTE: max(0.0, rank.step_seconds - inside), **known}


def fits(rank: RankFacts) -> bool:
    """Whether a rank's waiting time fits into its steps.

    Only a few steps are measured, so one stall can be extrapolated to more than all steps.
    """
    return (rank.wait_seconds or 0.0) + (rank.data_wait_seconds or 0.0) <= (rank.step_seconds or 0)


def step_shares(ranks: Sequence[RankFacts]) -> dict[str, float]:
    """Return each part's share of the step time by name, averaged over the ranks.

    Every report of a step's parts takes its figures from here.
    """
    shares: dict[str, list[float]] = {}
    for rank in ranks:
        for name, seconds in rank_parts(rank).items():
            if name not in BETWEEN_STEPS:
                shares.setdefault(name, []).append(min(1.0, seconds / (rank.step_seconds or 1.0)))
    return {name: fmean(shares[name]) for name in (*PARTS.values(), COMPUTE) if name in shares}


def own_seconds(rank: RankFacts) -> float | None:
    """Return the seconds of a rank's steps without its waiting for others; None if unknown.

    In data-parallel training all ranks' steps take equally long: the slow rank works while the
    others wait.
    """
    if rank.step_seconds is None or rank.wait_seconds is None:
        return None
    return max(0.0, rank.step_seconds - rank.wait_seconds)


def mean_parts(ranks: Sequence[RankFacts]) -> dict[str, float]:
    """Return the mean seconds by part, over the ranks that report it."""
    parts: dict[str, list[float]] = {}
    for rank in ranks:
        for name, seconds in rank_parts(rank).items():
            parts.setdefault(name, []).append(seconds)
    ordered = [COMPUTE, *PARTS.values()]
    return {name: fmean(parts[name]) for name in ordered if name in parts}


def samples_per_second(ranks: Sequence[RankFacts]) -> float | None:
    """Return the samples/s of all ranks together, within their steps; None if one is unknown."""
    rates = [
        rank.samples / rank.step_seconds if rank.samples and rank.step_seconds else None
        for rank in ranks
    ]
    known = [rate for rate in rates if rate is not None]
    return sum(known) if known and len(known) == len(rates) else None


_SHOWN = 4
_MOST = 0.5  # of a training; while more is uncounted, shares of the steps accuse nobody
_EQUAL = 0.05  # the last batch of an epoch may be smaller
_IDLE = 0.02  # share of the time with a kernel


def steps_known(facts: Facts) -> bool:
    """Whether enough steps, and most of the training, were counted."""
    return steps_suffice(facts) and max(uncounted_shares(facts).values(), default=0.0) < _MOST


def steps_suffice(facts: Facts) -> bool:
    """Whether enough steps were counted to judge the training."""
    return (
        bool(facts.ranks)
        and max((rank.steps or 0 for rank in facts.ranks), default=0) >= FEW_STEPS
        and max(map(training_seconds, facts.ranks)) >= TOO_SHORT_SECONDS
    )


def step_seconds(facts: Facts) -> float:
    """Return the time of all steps of a rank, as the mean over the ranks that counted it."""
    known = [rank.step_seconds for rank in facts.ranks if rank.step_seconds]
    return sum(known) / len(known) if known else 0.0


def shares(facts: Facts, name: str) -> dict[int, float]:
    """Return a part of each rank's step time, by rank, such as `data_wait_seconds`."""
    if not steps_known(facts):
        return {}
    return {
        rank.rank: part(rank, name) / rank.step_seconds
        for rank in facts.ranks
        if rank.step_seconds
        and getattr(rank, name) is not None
        and (name not in SAMPLED or fits(rank))
    }


def training_seconds(rank: RankFacts) -> float:
    """Return the seconds of a rank's training, including the time between counted steps."""
    return max(rank.seconds or 0.0, _counted_seconds(rank))


def uncounted_seconds(rank: RankFacts) -> float:
    """Return the seconds of a rank's training outside of its steps and `timed` blocks."""
    return training_seconds(rank) - _counted_seconds(rank)


def uncounted_shares(facts: Facts) -> dict[int, float]:
    """Return each rank's `uncounted_seconds` as a share of its training."""
    return {
        rank.rank: uncounted_seconds(rank) / training_seconds(rank)
        for rank in facts.ranks
        if rank.step_seconds
    }


def _counted_seconds(rank: RankFacts) -> float:
    names = ("step_seconds", "save_seconds", "evaluation_seconds", "other_seconds")
    return sum(getattr(rank, name) or 0.0 for name in names)


def cpu_waits(facts: Facts) -> dict[int, float]:
    """Return for each rank the share of its training in which other processes used its CPUs."""
    # The kernel counts how long a rank was ready but had no CPU. The rank's own threads and loaders
    # cause some of that, since they use its C CPUs too. While the rank waits, all C are busy, so:
    # - other processes had at least the waiting time, minus what its helpers used per CPU;
    # - they had at most what the rank and its helpers left of the CPUs, and never more than the
    #   waiting time.
    # The truth is between both bounds; their mean is reported. Without the CPU times nothing is:
    # the rank's own loaders could cause all of its waiting.
    if not steps_suffice(facts):
        return {}
    found = {}
    for rank in facts.ranks:
        seconds = training_seconds(rank)
        if rank.cpu_wait_seconds is None or not rank.step_seconds or not rank.cpus:
            continue
        if rank.cpu_seconds is None or rank.helper_cpu_seconds is None:
            continue
        waited = min(rank.cpu_wait_seconds, seconds)
        least = max(0.0, waited - rank.helper_cpu_seconds / len(rank.cpus))
        most = max(0.0, seconds - rank.cpu_seconds / len(rank.cpus))
        found[rank.rank] = (least + max(least, min(waited, most))) / 2 / seconds
    return found


def thread_seconds(rank: RankFacts) -> float | None:
    """Return the CPU time of the thread that trains; None if it is not known."""
    if rank.cpu_seconds is None or rank.helper_cpu_seconds is None:
        return None
    return max(0.0, rank.cpu_seconds - rank.helper_cpu_seconds)


def part(rank: RankFacts, name: str) -> float:
    """Return one of a rank's counters, at most the time of its steps; 0 if unknown."""
    return min(getattr(rank, name) or 0.0, rank.step_seconds or 0.0)


def excesses(values: Mapping[int, float]) -> dict[int, float]:
    """Return how far each rank's figure exceeds the median of the others."""
    return {
        # The median of the others is robust against a second slow rank, and unlike the median of
        # all it does not move towards the rank itself when there are only two.
        rank: value - median(other for one, other in values.items() if one != rank)
        for rank, value in values.items()
        if len(values) > 1
    }


def train_share(facts: Facts) -> float | None:
    """Return the share of the run's time that steps take; None if it is not known."""
    return _of_run(facts, step_seconds(facts))


def training_share(facts: Facts, share: float) -> float | None:
    """Return a share of the training as one of the run's time; None if that is not known."""
    whole = _of_run(facts, max(map(training_seconds, facts.ranks), default=0.0))
    return None if whole is None else share * whole


def _of_run(facts: Facts, seconds: float) -> float | None:
    return min(1.0, seconds / facts.elapsed_seconds) if facts.elapsed_seconds else None


def hours(facts: Facts, share: float = 1.0) -> float | None:
    """Return a share of the run in GPU-hours, or core-hours if it has no GPU."""
    units = facts.gpu_count or facts.core_count
    if not facts.elapsed_seconds or not units:
        return None
    return share * units * facts.elapsed_seconds / 3600


def hours_unit(facts: Facts) -> str:
    """Return the unit of `hours`."""
    return "GPU-hours" if facts.gpu_count else "core-hours"


def busy_cpus(facts: Facts) -> tuple[float, float, int] | None:
    """Return the number of busy CPUs, of all CPUs and of nodes; None if unknown."""
    known = [node for node in facts.nodes if node.cpus and node.mean_cpus is not None]
    if not known:
        return None
    busy, cpus = (sum(getattr(node, name) for node in known) for name in ("mean_cpus", "cpus"))
    return busy, cpus, len(known)


def is_idle(gpu: GpuFacts) -> bool:
    """Whether the job left a GPU idle: no process opened it or ran a kernel on it."""
    return gpu.has_process is False or (
        gpu.utilization_ratio is not None and gpu.utilization_ratio <= _IDLE
    )


def is_judged(facts: Facts) -> bool:
    """Whether a run was long enough, and successful, so that its unused resources can be judged."""
    ended_well = facts.state == "COMPLETED" if facts.over else facts.state == "RUNNING"
    return (
        (facts.elapsed_seconds or 0.0) >= JUDGED_SECONDS
        and ended_well
        and not facts.job.resources.exclusive
    )


def find(
    facts: Facts,
    kind: str,
    value: float,
    verdict: str,
    evidence: Sequence[str] = (),
    changes: Sequence[Change] = (),
    *,
    saves: float | None = None,
    free_hours: float | None = None,
    of_steps: bool = False,
) -> Finding | None:
    """Return a finding if the value passes its threshold, else None.

    Args:
        facts: of the run.
        kind: in the table of thresholds.
        value: to compare with its limits.
        verdict: of the finding.
        evidence: of the finding; its first line gets the limits.
        changes: of the finding.
        saves: the largest share of the run's time that the first change can save; of the steps'
            time with `of_steps`.
        free_hours: hours that would have been free instead.
        of_steps: whether the value is one of the steps, of which there must be enough.
    """
    threshold = THRESHOLDS[kind]
    level = threshold.level(value)
    if not level:
        return None
    trained = max(step_seconds(facts), facts.phases.get("training", 0.0))
    few = max((rank.steps or 0 for rank in facts.ranks), default=FEW_STEPS) < FEW_STEPS
    short = (trained or facts.elapsed_seconds or 0.0) < SHORT_SECONDS
    known: Level = "warning" if level == "warning" or (short or few) else "critical"
    if saves is not None and of_steps:
        # A finding about steps can only save the share of the run that steps take.
        whole = train_share(facts)
        saves = None if whole is None else saves * whole
    lines = [f"{evidence[0]} ({threshold})", *evidence[1:]] if evidence else []
    if level != known:
        least = f"{SHORT_SECONDS:g} s" if short else f"{FEW_STEPS} steps"
        lines.append(
            f"only a warning, because so little was measured: less than {least} of training"
        )
    return Finding(
        kind,
        known,
        verdict,
        lines,
        tuple(changes),
        saves,
        free_hours if saves is None else hours(facts, saves),
        gain_if="" if saves is None else threshold.gain_if,
    )


def ranks_text(ranks: Sequence[int]) -> str:
    """Return `rank 3`, or `ranks 0, 1, 2 and 5 more`."""
    shown = ", ".join(str(rank) for rank in sorted(ranks)[:_SHOWN])
    more = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}{more}"


def nodes_text(nodes: Sequence[str]) -> str:
    """Return the names of some nodes."""
    names = list(dict.fromkeys(nodes))
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def exclude(job: Job, nodes: Sequence[str], *, faulty: bool = True) -> list[Change]:
    """Return the change that excludes nodes from a job; faulty ones should also be reported."""
    names = [name for name in dict.fromkeys(nodes) if re.fullmatch(r"[\w.-]+", name)]
    if not names:
        return []
    extra = job.resources.extra
    options = [option for option in extra if not option.startswith("--exclude=")]
    # sbatch takes only the last `--exclude`, so the nodes that the user excludes join the same
    # option.
    before = [option.partition("=")[2] for option in extra if option.startswith("--exclude=")]
    value = [*options, f"--exclude={','.join([*before, *names])}"]
    where = nodes_text(names)
    if not faulty:
        text = f"leave out {where}, to see whether the node is the cause"
        return [Change(text, "resources.extra", value)]
    return [
        Change(f"leave out {where} until it is repaired", "resources.extra", value),
        Change(f"report {where} to the administrators, with the lines above"),
    ]


# Two runs.


def doubts(first: Facts, second: Facts) -> Iterator[str]:
    """Yield the reasons why the figures of two runs do not show the effect of a change."""
    for facts in (first, second):
        if not facts.over:
            yield f"{facts.run} is not over ({facts.state})"
        elif facts.state != "COMPLETED":
            yield f"{facts.run} did not complete ({facts.state})"
    for what, before, after in zip(
        _CONDITIONS, _conditions(first), _conditions(second), strict=True
    ):
        if None not in (before, after) and not nearly_equal(before, after):
            texts = [
                f"{one:.4g}" if isinstance(one, float) else str(one) for one in (before, after)
            ]
            yield f"different {what}: {texts[0]} and {texts[1]}"
    # One run with counters and one without would make every share of a step look new.
    for facts, other in ((first, second), (second, first)):
        if mean_parts(facts.ranks) and not mean_parts(other.ranks):
            yield f"only {facts.run} reports its steps"


_CONDITIONS = "jobs, programs, ranks, GPUs, nodes, samples per step and rank, types of GPU".split(
    ", "
)


def _conditions(facts: Facts) -> tuple[object, ...]:
    gpus = sorted({gpu.name for node in facts.nodes for gpu in node.gpus if gpu.name})
    return (
        facts.job.name,
        _program(facts.job),
        facts.world_size or None,
        facts.gpu_count,
        facts.node_count or None,
        batch_per_rank(facts),
        first_few(gpus) if gpus else None,
    )


def batch_per_rank(facts: Facts) -> float | None:
    """Return the samples per step, as the mean over the ranks that count both."""
    batches = [rank.samples / rank.steps for rank in facts.ranks if rank.samples and rank.steps]
    return fmean(batches) if batches else None


def nearly_equal(first: object, second: object) -> bool:
    """Return whether two values are equal, of figures up to 5 %."""
    if isinstance(first, float) and isinstance(second, float):
        return abs(first - second) <= _EQUAL * max(first, second)
    return first == second


def _program(job: Job) -> str:
    if named := job.script or job.module:
        return named.rpartition("/")[2]
    words = job.command or ()
    return " ".join(words[: first_option(words)])


def first_option(words: Sequence[str]) -> int:
    """Return the place of the first word that begins with a dash, or the number of words."""
    return next((place for place, word in enumerate(words) if word.startswith("-")), len(words))


# What a job may request in addition, given the size of the nodes.

_WORKERS = re.compile(r"(--(?:num[-_]?)?(?:data[-_]?|loader[-_]?)?workers)(?:=(\d+))?")
BUSY = 0.9  # share of CPU time above which the CPUs count as fully used


def cpus_busy(facts: Facts) -> float | None:
    """Return the share of the CPUs that were busy; None if it is not known."""
    known = busy_cpus(facts)
    return known[0] / known[1] if known else None


def cpus_per_rank(facts: Facts) -> int:
    """Return the number of CPUs that the job requested per rank."""
    return facts.job.resources.cpus_per_rank


def worker_argument(facts: Facts) -> tuple[int, str, int] | None:
    """Return the argument that sets the loader workers: its index, `--workers=`, the number.

    The second is empty if the number is a separate argument.
    """
    args = facts.job.args
    for index, word in enumerate(args):
        if match := _WORKERS.fullmatch(word):
            value = match[2] or "".join(args[index + 1 : index + 2])
            if value.isdecimal():
                is_joined = match[2] is not None
                return index + (not is_joined), f"{match[1]}=" * is_joined, int(value)
    return None


def more_cpus(facts: Facts, wanted: int) -> int | None:
    """Return the CPUs per rank to request: `wanted`, or fewer if a node has fewer.

    None if the job already has all CPUs of a node, or the size of the nodes is unknown.
    """
    ranks = math.ceil(facts.world_size / max(1, facts.node_count)) or 1
    # Slurm refuses a request that no node can meet, so advice stays within the smallest node.
    most = min(wanted, (facts.node_cpus or 0) // ranks)
    return most if most > cpus_per_rank(facts) else None


def fits_in_ram(facts: Facts, size_bytes: float, own_bytes: float | None) -> bool | None:
    """Return whether data and the job fit into the memory of the nodes; None if unknown.

    Data in /dev/shm counts as memory of the job, so it is added to the requested memory. If the
    job requests no memory, only its monitor may know the limit.

    Args:
        facts: of the run.
        size_bytes: of the data, on each node.
        own_bytes: memory that the job requests; None if it requests none.
    """
    if own_bytes is not None:
        known = facts.node_memory_bytes
        return None if known is None else own_bytes + size_bytes <= known
    limits = [
        (node.memory_peak_bytes, node.memory_limit_bytes)
        for node in facts.nodes
        if node.memory_peak_bytes and node.memory_limit_bytes
    ]
    return all(peak + size_bytes <= limit for peak, limit in limits) if limits else None
