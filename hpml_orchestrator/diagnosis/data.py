"""Findings about data: waiting for it, the storage under it, staging, copies to the GPU."""

from __future__ import annotations

from statistics import fmean, median
from typing import TYPE_CHECKING

from hpml_orchestrator.diagnosis.model import Change
from hpml_orchestrator.diagnosis.shares import (
    BUSY,
    cpus_busy,
    cpus_per_rank,
    find,
    fits_in_ram,
    hours,
    more_cpus,
    part,
    shares,
    step_shares,
    train_share,
    training_seconds,
    worker_argument,
)
from hpml_orchestrator.diagnosis.slow_ranks import crowded
from hpml_orchestrator.diagnosis.thresholds import (
    BANDWIDTH_SHARE,
    LONG_PHASE_SECONDS,
    THRESHOLDS,
)
from hpml_orchestrator.records.texts import human_bytes, seconds_text

if TYPE_CHECKING:
    from hpml_orchestrator.diagnosis.model import Facts, Finding

_SMALL_FILE_BYTES = 128 << 10
_MANY_FILES = 10_000
_LITTLE_BYTES = 1 << 20  # per second; less is the program itself
_CACHED = 0.9  # share of what is read that comes from the page cache
_LOADING, _SLEEPING = 0.5, 0.3  # share of the waiting in which the loader needs a CPU: from, below
_PREPARE = Change(
    "decode, parse and list less while training: prepare the data once, before the job"
)


def waits_for_data(facts: Facts) -> Finding | str | None:
    """Return whether most ranks wait for their data; one that waits alone is a slow rank."""
    waits = shares(facts, "data_wait_seconds")
    if not waits:
        return None
    usual, longest = median(waits.values()), max(waits, key=lambda rank: waits[rank])
    if crowded(facts):
        return None  # loader and rank have one core: `wrong-binding`
    share = step_shares(facts.ranks)["waiting for data"]
    if not THRESHOLDS["waits-for-data"].level(usual):
        return f"waiting for data takes {share:.0%} of the steps"
    evidence = [f"{share:.0%} of the steps' time, most on rank {longest}: {waits[longest]:.0%}"]
    evidence += _storage(facts)
    busy = cpus_busy(facts)
    if busy is not None and busy >= BUSY:
        evidence.append(f"{busy:.0%} of the CPUs are busy: loaders have no more")
    if used := _loader_cpu(facts):
        bounds = " to ".join(dict.fromkeys(f"{share:.0%}" for share in used))
        evidence.append(f"the loader needs a CPU in {bounds} of the waiting")
    changes = _changes(facts)
    # staging saves all of the waiting or none of it, and no figure shows which
    is_unknown = _storage_is_slow(facts) is None and not _burns_cpu(facts)
    is_guess = is_unknown and changes[0] not in _workers(facts)
    if is_guess:
        evidence.append(_untold(facts))
    return find(
        facts,
        "waits-for-data",
        usual,
        f"waits for data: {share:.0%} of each step",
        evidence,
        changes,
        saves=None if is_guess else share,
        free_hours=hours(facts, share * (train_share(facts) or 1.0)),
        of_steps=True,
    )


def _reader(facts: Facts) -> tuple[float, float | None] | None:
    """Return what the node that reads most reads per second, from storage and in all."""
    known = [
        (
            node.read_bytes / node.seconds,
            None if node.syscall_read_bytes is None else node.syscall_read_bytes / node.seconds,
        )
        for node in facts.nodes
        if node.seconds and node.read_bytes is not None
    ]
    return max(known, key=lambda rates: rates[0], default=None)


def _possible(facts: Facts) -> float | None:
    if facts.peaks is None:
        return None
    # The local disk is the limit only if all data are staged there; otherwise some reads go to the
    # shared file system.
    targets = {stage.target for stage in facts.job.stage}
    return facts.peaks.local_disk_read if targets == {"local"} else facts.peaks.shared_read


def _storage_is_slow(facts: Facts) -> bool | None:
    """Return whether the rate of storage limits the reading; None if no figure shows it.

    A rate below the measured one does not prove that storage is fast: its latency may be long.
    """
    rates, possible, busy = _reader(facts), _possible(facts), cpus_busy(facts)
    if rates is None:
        return None
    from_storage, in_all = rates
    if from_storage < max(_LITTLE_BYTES, (1 - _CACHED) * (in_all or 0.0)):
        return False  # the page cache has the data
    if possible and from_storage >= BANDWIDTH_SHARE * possible:
        return True
    return False if busy is not None and busy >= BUSY else None


def reading(facts: Facts) -> tuple[bool | None, str]:
    """Return whether storage is known to be slow or not, and what is read, in words."""
    rates, possible = _reader(facts), _possible(facts)
    if rates is None:
        return None, ""
    rate, in_all = rates
    text = f"on a node the kernel counted {human_bytes(rate)}/s from storage"
    if possible:
        text += f" ({human_bytes(possible)}/s are possible)"
    if in_all and in_all >= max(_LITTLE_BYTES, rate):
        text += f", of {human_bytes(in_all)}/s that was read"
    return _storage_is_slow(facts), text


def _untold(facts: Facts) -> str:
    if _reader(facts) is None:
        return "unknown: whether storage is slow; `monitor: true` measures what is read from it"
    if not _possible(facts):
        return "unknown: whether storage is slow; `hpml bench` measures what it can do"
    return "unknown: whether storage is slow; its rate is not the limit, its latency may be"


def _storage(facts: Facts) -> list[str]:
    rates, possible = _reader(facts), _possible(facts)
    lines = []
    if rates and rates[0] >= _LITTLE_BYTES and possible and facts.peaks:
        limit = " (at its limit)" if rates[0] >= BANDWIDTH_SHARE * possible else ""
        lines.append(
            f"a node reads {human_bytes(rates[0])}/s{limit}; {human_bytes(possible)}/s are "
            f"possible ({facts.peaks.origin})"
        )
    elif rates and rates[0] >= _LITTLE_BYTES:
        lines.append(f"a node reads {human_bytes(rates[0])}/s from storage")
    elif rates:
        lines.append(
            f"a node reads {human_bytes(rates[0])}/s from storage: the data are in its memory"
        )
    if facts.data_files and facts.data_bytes:
        lines.append(f"{facts.data_files:.0f} files of {human_bytes(facts.data_bytes)} in all")
    return lines


def _loader_cpu(facts: Facts) -> tuple[float, float] | None:
    """Return the least and the largest share of the waiting in which the loader needed a CPU.

    Counters cover the whole training: the rest of it may have used all CPUs, or none. Workers load
    all the time if their rank waits for data.
    """
    found, bounds = worker_argument(facts), []
    workers = found[2] if found else facts.job.binding.loader_workers or None
    for rank in facts.ranks:
        waited, seconds = part(rank, "data_wait_seconds"), training_seconds(rank)
        if rank.cpu_seconds is None or rank.helper_cpu_seconds is None or not waited:
            continue
        ran = rank.cpu_seconds - rank.helper_cpu_seconds
        # if other processes take the CPUs, the loader's threads lack them as this thread does
        ready = ran + (rank.cpu_wait_seconds or 0.0)
        helpers = rank.helper_cpu_seconds * (ready / ran if ran > 0 else 1.0)
        cpus, rest = len(rank.cpus or ()) or cpus_per_rank(facts), seconds - waited
        spare, own = max(1, cpus - 1), 0.0 if workers else ready  # it may load by itself
        many, few = (min(workers, cpus),) * 2 if workers else (spare, 1)
        least = max(0.0, own - rest) / waited + max(0.0, helpers - rest * spare) / seconds / many
        bounds.append((min(1.0, least), min(1.0, own / waited + helpers / seconds / few)))
    return (fmean(one[0] for one in bounds), fmean(one[1] for one in bounds)) if bounds else None


def _burns_cpu(facts: Facts) -> bool | None:
    """Return whether ranks wait for a loader that needs a CPU; None if no figure shows it."""
    (least, most), is_slow = _loader_cpu(facts) or (0.0, 1.0), _storage_is_slow(facts)
    if is_slow or most < _SLEEPING:
        return False
    in_ram = {stage.target for stage in facts.job.stage} == {"shm"}
    return True if least >= _LOADING or is_slow is False or in_ram else None


def _changes(facts: Facts) -> list[Change]:
    """Return what helps ranks that wait for data, the most likely first."""
    stages, burns_cpu, more = facts.job.stage, _burns_cpu(facts), _workers(facts)
    if burns_cpu:
        idle = Change("or start more loader workers: there are idle cores")
        return [_PREPARE, idle] if _has_idle_cpu(facts) else [_PREPARE]
    if _storage_is_slow(facts) is False:
        return more
    changes = []
    on_disk = [
        (index, stage) for index, stage in enumerate(stages) if stage.target not in ("shm", "auto")
    ]
    for index, stage in on_disk[:1]:
        name = stage.name
        size = next((one.bytes for one in facts.stages if one.name == name), None)
        if size is not None and fits_in_ram(facts, size, facts.memory_bytes):
            text = f"stage `{name}` to /dev/shm"
            changes.append(Change(text, f"stage.{index}.target", "shm"))
    if not stages:
        changes.append(_stage(facts))
    small = facts.data_files and facts.data_bytes is not None and facts.data_files > _MANY_FILES
    if small and (facts.data_bytes or 0) / (facts.data_files or 1) < _SMALL_FILE_BYTES:
        changes.append(Change("pack the small files first: `hpml pack SOURCE DEST`, `kind: pack`"))
    last = [_PREPARE] if burns_cpu is None else []
    return [*more, *changes, *last] if stages and not on_disk else [*changes, *more, *last]


def _stage(facts: Facts) -> Change:
    """Return the entry of `stage` for the data that an argument names."""
    data = facts.data
    if data is None:
        return Change("stage the data on the nodes: add `stage` with the directory it reads")
    fits = data.size_bytes is not None and fits_in_ram(facts, data.size_bytes, facts.memory_bytes)
    target, where = "auto", "on the nodes"
    if fits:
        target, where = "shm", "to /dev/shm"
    elif fits is False and data.size_bytes is not None:
        target, where = "local", "to the nodes' disks"
    entry = {**data.entry, "target": target}
    shown = ", ".join(f"{name}: {value}" for name, value in entry.items())
    text = f"stage the data {where}: `stage: [{{{shown}}}]`"
    return Change(text, "stage", [entry], also={data.field: data.word})


def _has_idle_cpu(facts: Facts) -> bool:
    busy = cpus_busy(facts)
    if _burns_cpu(facts) is False:  # while a loader waits, its CPU is idle
        return busy is None or busy < BUSY
    return busy is not None and busy < BUSY and cpus_per_rank(facts) > 1


def _workers(facts: Facts) -> list[Change]:
    """Return more loader workers, with the cores that they need and a node has."""
    is_idle, found = _has_idle_cpu(facts), worker_argument(facts)
    more = None if is_idle else more_cpus(facts, cpus_per_rank(facts) + 2)
    text = "start more loader workers (`num_workers` of the DataLoader)"
    if not is_idle and more is None:
        return [Change(f"{text}: they help if reading is slow; for decoding each needs a free CPU")]
    if found is None:
        # CPUs alone, without more workers in the program, would be idle: this is advice
        cores = f", with `resources.cpus_per_rank: {more}`" if more else ": there are idle cores"
        return [Change(text + cores)]
    place, option, workers = found
    count = max(workers * 2, workers + 2)
    text = f"start {count} loader workers per rank" + (f" and {more} CPUs per rank" if more else "")
    also = {"resources.cpus_per_rank": more} if more else {}
    return [Change(text, f"args.{place}", f"{option}{count}", also=also)]


def slow_storage(facts: Facts) -> Finding | str | None:
    """Return whether storage is at its measured limit, if the waiting itself is not measured."""
    rates, possible = _reader(facts), _possible(facts)
    if not rates or not rates[0] or not possible or not facts.peaks:
        return None
    rate = rates[0]
    share = rate / possible
    if shares(facts, "data_wait_seconds") or not THRESHOLDS["slow-storage"].level(share):
        return f"storage is read at {share:.0%} of its rate"
    evidence = [
        f"a node reads {human_bytes(rate)}/s of {human_bytes(possible)}/s ({facts.peaks.origin})"
    ]
    verdict = f"storage at its limit: {share:.0%} of its read rate"
    return find(facts, "slow-storage", share, verdict, evidence, _changes(facts))


def host_to_device(facts: Facts) -> Finding | str | None:
    """Return whether copies from host to GPU delay the steps of most ranks."""
    copies = shares(facts, "transfer_seconds")
    if not copies:
        return None
    usual = median(copies.values())
    evidence = [f"{usual:.0%} of the steps' time"]
    changes = [
        Change("pin the loader's memory (`pin_memory=True`) and copy with `non_blocking=True`"),
        Change("send smaller values, such as uint8 images, and convert them on the GPU"),
    ]
    is_unknown = any(rank.bound_as_planned is None for rank in facts.ranks)
    if is_unknown and facts.job.binding.policy == "none":
        changes.append(Change("bind ranks next to their GPU", "binding.policy", "gpu-local"))
    verdict = f"copies to the GPU: {usual:.0%} of each step"
    found = find(
        facts,
        "host-to-device",
        usual,
        verdict,
        evidence,
        changes,
        saves=usual,
        of_steps=True,
    )
    return found or f"copies to the GPU take {usual:.0%} of the steps"


def slow_staging(facts: Facts) -> Finding | str | None:
    """Return whether staging takes a large part of the run."""
    seconds, whole = facts.phases.get("staging"), facts.elapsed_seconds
    if not seconds or not whole or not facts.stages:
        return None
    share = seconds / whole
    if seconds < LONG_PHASE_SECONDS or not THRESHOLDS["slow-staging"].level(share):
        return f"staging took {seconds_text(seconds)}"
    slowest = max(facts.stages, key=lambda stage: stage.seconds or 0.0)
    entries = {entry.name: (index, entry) for index, entry in enumerate(facts.job.stage)}
    index, entry = entries[slowest.name]
    evidence = [f"{seconds_text(seconds)}, {share:.0%} of the run"]
    if slowest.bytes and slowest.seconds:
        evidence.append(
            f"`{slowest.name}`: {slowest.files or 0:.0f} files, {human_bytes(slowest.bytes)} at "
            f"{human_bytes(slowest.bytes / slowest.seconds)}/s per node"
        )
    changes = []
    if entry.target == "shm":  # many sites empty /dev/shm between jobs
        changes.append(Change("keep it for later runs: `target: local` with `keep: true`"))
    elif not entry.keep:
        text = f"keep `{slowest.name}` on the nodes for later runs"
        changes.append(Change(text, f"stage.{index}.keep", True))
    files = slowest.files or 0
    if files > _MANY_FILES and (slowest.bytes or 0) / files < _SMALL_FILE_BYTES:
        changes.append(Change("pack the small files: `hpml pack SOURCE DEST`, then `kind: pack`"))
    if facts.node_count > 1 and entry.distribution == "shared":
        text = "read the source once and pass it on"
        changes.append(Change(text, f"stage.{index}.distribution", "chain"))
    verdict = f"staging takes long: {seconds_text(seconds)}, {share:.0%} of the run"
    return find(facts, "slow-staging", share, verdict, evidence, changes, saves=share)
