"""Whose GPUs: names of allocated GPUs to UUIDs, and each job's allocated against its used GPUs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from prometheus_client.core import Metric

from hpml_exporters.core.metric import Row
from hpml_exporters.gpu.devices import Place, pci_address
from hpml_exporters.gpu.metrics import (
    JOB_GPU_INFO,
    JOB_GPU_MEMORY_USED,
    JOB_GPU_PROCESSES,
    JOB_GPUS_ALLOCATED,
    JOB_GPUS_FOREIGN,
    JOB_GPUS_USED,
    PROCESSES,
)
from hpml_exporters.jobs.board import JobFacts, Jobs

__all__ = ["Processes", "job_families", "process_families", "resolve"]

Processes = Mapping[str, Mapping[int, int | None]]
"""Bytes of GPU memory by process id, by UUID of the GPU or instance."""


def resolve(names: Iterable[str], places: Sequence[Place]) -> tuple[list[str], list[str]]:
    """Return the UUIDs of the GPUs that an allocation names, and the names that mean none.

    A number is the minor number of the device file, never an index. A GPU that is split stands
    for all of its instances, since nothing else of it can be used.

    Args:
        names: minor numbers, device files, UUIDs or PCI addresses.
        places: GPUs and instances of this node, lost ones too.
    """
    found: dict[str, None] = {}
    unknown: list[str] = []
    for name in names:
        matches = [one for one in places if _means(name.strip(), one)]
        uuids = [
            each.uuid
            for one in matches
            for each in ([child for child in places if child.parent == one.uuid] or [one])
        ]
        found.update(dict.fromkeys(uuids))
        if not uuids:
            unknown.append(name)
    return list(found), unknown


def _means(name: str, place: Place) -> bool:
    if name.startswith("MIG-"):
        return name == place.uuid
    if place.parent:  # other names are those of whole GPUs
        return False
    if name.startswith("GPU-"):
        return name == place.uuid
    digits = name.removeprefix("/dev/nvidia")
    if digits.isascii() and digits.isdigit():
        return int(digits) == place.minor
    return ":" in name and pci_address(name) == place.pci


def process_families(processes: Processes, jobs: Jobs) -> list[Metric]:
    """Return how many processes of jobs, and of no job, have each GPU open."""
    samples = []
    for uuid, pids in processes.items():
        owned = sum(jobs.job_of(pid) is not None for pid in pids)
        samples.append(((uuid, "job"), float(owned)))
        samples.append(((uuid, "none"), float(len(pids) - owned)))
    return [PROCESSES.family(samples)]


def job_families(
    jobs: Jobs, places: Sequence[Place], processes: Processes, only: JobFacts | None = None
) -> list[Metric]:
    """Return each job's GPUs: which, how many allocated, used and used without being allocated.

    Args:
        jobs: all jobs of the node.
        places: GPUs and instances of the node, lost ones too.
        processes: who has which GPU open.
        only: the job that alone is shown; its allocation is taken from here.
    """
    used: dict[str, dict[str, list[int | None]]] = {}
    for uuid, pids in processes.items():
        for pid, memory in pids.items():
            jobid = jobs.job_of(pid)
            if jobid is not None:
                used.setdefault(jobid, {}).setdefault(uuid, []).append(memory)
    facts = {jobid: job.facts for jobid, job in jobs.by_id.items()}
    if only is not None:
        known = facts.get(only.jobid, only)
        facts = {only.jobid: only if only.gpus is not None else known}
    found: dict[str, list[Row]] = {}
    for jobid, one in facts.items():
        for name, sample in _of_job(jobid, one, places, used.get(jobid, {})):
            found.setdefault(name, []).append(sample)
    return [
        spec.family(found.get(spec.name, ()))
        for spec in (
            JOB_GPU_INFO,
            JOB_GPUS_ALLOCATED,
            JOB_GPUS_USED,
            JOB_GPUS_FOREIGN,
            JOB_GPU_PROCESSES,
            JOB_GPU_MEMORY_USED,
        )
    ]


def _of_job(
    jobid: str, facts: JobFacts, places: Sequence[Place], used: Mapping[str, Sequence[int | None]]
) -> list[tuple[str, Row]]:
    allocated, unknown = resolve(facts.gpus or (), places)
    if not (allocated or unknown or used):
        return []
    samples: list[tuple[str, Row]] = []
    if facts.gpus is None:
        samples.append((JOB_GPUS_USED.name, ((jobid,), float(len(used)))))
    else:
        own = [uuid for uuid in allocated if uuid in used]
        # A name that means no GPU here is one that was lost before it was seen: allocated still.
        count = len(allocated) + len(unknown)
        samples += [
            (JOB_GPUS_ALLOCATED.name, ((jobid,), float(count))),
            (JOB_GPUS_USED.name, ((jobid,), float(len(own)))),
            (JOB_GPUS_FOREIGN.name, ((jobid,), float(len(used) - len(own)))),
        ]
    for uuid in dict.fromkeys((*allocated, *used)):
        pids = used.get(uuid, ())
        known = [memory for memory in pids if memory is not None]
        samples.append((JOB_GPU_INFO.name, ((jobid, uuid), 1.0)))
        samples.append((JOB_GPU_PROCESSES.name, ((jobid, uuid), float(len(pids)))))
        if known or not pids:
            samples.append((JOB_GPU_MEMORY_USED.name, ((jobid, uuid), float(sum(known)))))
    return samples
