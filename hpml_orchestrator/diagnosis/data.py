"""Findings about data: waiting for it, the storage under it, staging, copies to the GPU."""

from __future__ import annotations

import re
from statistics import median
from typing import TYPE_CHECKING, Any

from hpml_orchestrator.diagnosis.balance import crowded
from hpml_orchestrator.diagnosis.model import Change
from hpml_orchestrator.diagnosis.shares import (
    busy_cpus,
    find,
    shares,
)
from hpml_orchestrator.diagnosis.thresholds import (
    BANDWIDTH_SHARE,
    LONG_PHASE_SECONDS,
    THRESHOLDS,
)
from hpml_orchestrator.records.texts import human_bytes, seconds_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hpml_orchestrator.diagnosis.model import Facts, Finding

__all__ = ["data_changes", "host_to_device", "slow_staging", "slow_storage", "waits_for_data"]

_WORKERS = re.compile(r"(--(?:num[-_]?)?(?:data[-_]?|loader[-_]?)?workers)(?:=(\d+))?")
_DATA = re.compile(r"--?(?:data|dataset|train|root|imagenet)[\w-]*(?:=(.*))?", re.IGNORECASE)
_SMALL_FILE_BYTES = 128 << 10
_MANY_FILES = 10_000
_SLOW_BYTES = 1 << 20  # per second; less is the program itself
_BUSY = 0.9


def waits_for_data(facts: Facts) -> Finding | str | None:
    """Return whether most ranks wait for their data; one that waits alone is a slow rank."""
    waits = shares(facts, "data_wait_seconds")
    if not waits:
        return None
    usual, longest = median(waits.values()), max(waits, key=lambda rank: waits[rank])
    if crowded(facts):
        return None  # loader and rank have one core: `wrong-binding`
    if not THRESHOLDS["waits-for-data"].level(usual):
        return f"waiting for data takes {usual:.0%} of the steps"
    share = sum(waits.values()) / len(waits)
    evidence = [f"{share:.0%} of the steps' time, most on rank {longest}: {waits[longest]:.0%}"]
    evidence += _storage(facts)
    busy = _cpus_busy(facts)
    if busy is not None and busy >= _BUSY:
        evidence.append(f"{busy:.0%} of the CPUs are busy: loaders have no more")
    # what is left after the change is not known before it was made: a third at most
    return find(
        facts,
        "waits-for-data",
        usual,
        f"waits for data: {share:.0%} of each step",
        evidence,
        data_changes(facts),
        saves=(share * 2 / 3, share * 0.95),
        of_steps=True,
    )


def _cpus_busy(facts: Facts) -> float | None:
    known = busy_cpus(facts)
    return known[0] / known[1] if known else None


def _rate(facts: Facts) -> float | None:
    """Return the read rate of the node that reads most, in bytes per second."""
    rates = [
        node.read_bytes / node.seconds for node in facts.nodes if node.seconds and node.read_bytes
    ]
    return max(rates, default=None)


def _storage(facts: Facts) -> list[str]:
    """Return what is known of the storage that the data comes from."""
    rate = _rate(facts)
    peak = facts.peaks.shared_read if facts.peaks else None
    lines = []
    if rate and peak and facts.peaks:
        limit = " (at its limit)" if rate >= BANDWIDTH_SHARE * peak else ""
        lines.append(
            f"a node reads {human_bytes(rate)}/s{limit}; {human_bytes(peak)}/s are possible "
            f"({facts.peaks.origin})"
        )
    elif rate and rate >= _SLOW_BYTES:
        lines.append(f"a node reads {human_bytes(rate)}/s from storage")
    if facts.data_files and facts.data_bytes:
        lines.append(f"{facts.data_files:.0f} files of {human_bytes(facts.data_bytes)} in all")
    return lines


def data_changes(facts: Facts) -> list[Change]:
    """Return what helps ranks that wait for data, the most likely first."""
    job = facts.job
    stages: Sequence[Mapping[str, Any]] = job.get("stage") or ()
    changes = []
    used = [
        (index, stage)
        for index, stage in enumerate(stages)
        if stage.get("target") not in ("shm", "auto")
    ]
    for index, stage in used[:1]:
        text = f"stage `{stage.get('name')}` to /dev/shm"
        changes.append(Change(text, f"stage.{index}.target", "shm"))
    if not stages:
        changes += _stage(job)
    small = facts.data_files and facts.data_bytes is not None and facts.data_files > _MANY_FILES
    if small and (facts.data_bytes or 0) / (facts.data_files or 1) < _SMALL_FILE_BYTES:
        changes.append(Change("pack the small files first: `hpml pack SOURCE DEST`, `kind: pack`"))
    more = _workers(facts)
    # idle cores show that more workers can run; data in memory, that storage is not the reason
    return [*more, *changes] if stages and not used else [*changes, *more]


def _stage(job: Mapping[str, Any]) -> list[Change]:
    """Return the entry of `stage` for the data that an argument names."""
    args = [str(word) for word in job.get("args") or ()]
    for index, word in enumerate(args):
        match = _DATA.fullmatch(word)
        if not match:
            continue
        inline = match[1] is not None
        place = index if inline else index + 1
        path = match[1] if inline else "".join(args[place : place + 1])
        if not re.fullmatch(r"[~/][^{}\s]+", path):
            continue
        entry = {"name": "data", "source": path, "target": "shm"}
        new = f"{word.partition('=')[0]}={{stage.data}}" if inline else "{stage.data}"
        text = f"stage the data to /dev/shm: `stage: [{{name: data, source: {path}, target: shm}}]`"
        return [Change(text, "stage", [entry], also={f"args.{place}": new})]
    return [Change("stage the data to /dev/shm: add `stage` with the directory that it reads")]


def _workers(facts: Facts) -> list[Change]:
    """Return more loader workers, with the cores that they need."""
    job = facts.job
    asked = job.get("resources") or {}
    cpus = int(asked.get("cpus_per_rank") or 1)
    args = [str(word) for word in job.get("args") or ()]
    busy = _cpus_busy(facts)
    free = busy is not None and busy < _BUSY and cpus > 1
    wanted = {} if free else {"resources.cpus_per_rank": cpus + 2}
    cores = "" if free else f" and {cpus + 2} CPUs per rank"
    for index, word in enumerate(args):
        match = _WORKERS.fullmatch(word)
        if not match:
            continue
        value = match[2] or "".join(args[index + 1 : index + 2])
        if value.isdecimal():
            count = max(int(value) * 2, int(value) + 2)
            place, new = (index, f"{match[1]}={count}") if match[2] else (index + 1, str(count))
            text = f"start {count} loader workers per rank{cores}"
            return [Change(text, f"args.{place}", new, also=wanted)]
    text = "start more loader workers (`num_workers` of the DataLoader)"
    if free:
        return [Change(f"{text}: there are idle cores")]
    # CPUs alone, without more workers in the program, would be idle: this is advice
    return [Change(f"{text}, with `resources.cpus_per_rank: {cpus + 2}`")]


def slow_storage(facts: Facts) -> Finding | str | None:
    """Return whether storage is at its measured limit, if the waiting itself is not measured."""
    rate, peak = _rate(facts), facts.peaks.shared_read if facts.peaks else None
    if not rate or not peak or not facts.peaks:
        return None
    share = rate / peak
    if shares(facts, "data_wait_seconds") or not THRESHOLDS["slow-storage"].level(share):
        return f"storage is read at {share:.0%} of its rate"
    evidence = [
        f"a node reads {human_bytes(rate)}/s of {human_bytes(peak)}/s ({facts.peaks.origin})"
    ]
    verdict = f"storage at its limit: {share:.0%} of its read rate"
    return find(facts, "slow-storage", share, verdict, evidence, data_changes(facts))


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
    if any(rank.bound_as_planned is None for rank in facts.ranks):
        policy = (facts.job.get("binding") or {}).get("policy")
        if policy == "none":
            changes.append(Change("bind ranks next to their GPU", "binding.policy", "gpu-local"))
    verdict = f"copies to the GPU: {usual:.0%} of each step"
    found = find(
        facts,
        "host-to-device",
        usual,
        verdict,
        evidence,
        changes,
        saves=(usual / 2, usual * 0.9),
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
    index = [stage.name for stage in facts.stages].index(slowest.name)
    given: Sequence[Mapping[str, Any]] = facts.job.get("stage") or ()
    entry = given[index] if index < len(given) else {}
    evidence = [f"{seconds_text(seconds)}, {share:.0%} of the run"]
    if slowest.bytes and slowest.seconds:
        evidence.append(
            f"`{slowest.name}`: {slowest.files or 0:.0f} files, {human_bytes(slowest.bytes)} at "
            f"{human_bytes(slowest.bytes / slowest.seconds)}/s per node"
        )
    changes = []
    if entry and not entry.get("keep"):
        text = f"keep `{slowest.name}` on the nodes for later runs"
        changes.append(Change(text, f"stage.{index}.keep", True))
    files = slowest.files or 0
    if files > _MANY_FILES and (slowest.bytes or 0) / files < _SMALL_FILE_BYTES:
        changes.append(Change("pack the small files: `hpml pack SOURCE DEST`, then `kind: pack`"))
    if facts.node_count > 1 and entry.get("distribution") == "shared":
        text = "read the source once and pass it on"
        changes.append(Change(text, f"stage.{index}.distribution", "chain"))
    verdict = f"staging takes long: {seconds_text(seconds)}, {share:.0%} of the run"
    return find(
        facts, "slow-staging", share, verdict, evidence, changes, saves=(share / 2, share * 0.95)
    )
