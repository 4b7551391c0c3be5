"""The GPUs of jobs: their processes, their allocations as UUIDs, and what each job has and uses."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet

from prometheus_client.core import Metric

from hpml_exporters.core.collector import MetricSpec, Row
from hpml_exporters.gpu import figures as gpu
from hpml_exporters.gpu.devices import (
    INSUFFICIENT_SIZE,
    UNSUPPORTED,
    GpuDevice,
    Nvml,
    check,
    code_of,
    pci_address,
)
from hpml_exporters.jobs.board import JobFacts, Jobs

Processes = Mapping[str, Mapping[int, int | None] | None]
"""Bytes of GPU memory by process id (None: unknown), by UUID of the GPU or instance; None for one
whose list cannot be read."""

_KINDS = ("Compute", "MPSCompute", "Graphics")
_TRIES = 4


def processes_of(nvml: Nvml, device: GpuDevice) -> dict[int, int | None] | None:
    """Return bytes of GPU memory by process id, or None while the lists cannot be read.

    A process that computes and draws, or is a client of MPS, is in several lists with the same
    memory. nvitop knows which of the five layouts of nvmlProcessInfo_t the driver has; its objects
    of processes are not used: they read /proc for names and times that are shown nowhere.

    Raises:
        GpuLostError: the GPU does not answer.
        DriverLostError: nothing does.
    """
    found: dict[int, int | None] = {}
    handle = ctypes.c_void_p(device.handle)
    for kind in _KINDS:
        code, processes = _list(nvml, kind, handle)
        if kind != "Compute" and code in UNSUPPORTED:  # neither MPS nor graphics here
            continue
        if not check(code):
            return None
        for pid, used in processes:
            memory = used if isinstance(used, int) else None
            before = found.get(pid)
            found[pid] = memory if before is None else max(before, memory or 0)
    return found


def _list(nvml: Nvml, kind: str, handle: ctypes.c_void_p) -> tuple[int, list[tuple[int, object]]]:
    ask = getattr(nvml.nvitop.libnvml, f"nvmlDeviceGet{kind}RunningProcesses")
    code = INSUFFICIENT_SIZE
    for _ in range(_TRIES):
        try:
            return 0, [(one.pid, one.usedGpuMemory) for one in ask(handle)]
        except nvml.error as error:
            code = code_of(error)
            # nvidia-ml-py asks for the size, then for the list: processes may start in between.
            if code != INSUFFICIENT_SIZE:
                break
    return code, []


def resolve(names: Iterable[str], devices: Sequence[GpuDevice]) -> tuple[list[str], list[str]]:
    """Return the UUIDs of an allocation's GPUs, and the names that match no GPU.

    A number is the minor number of the device file, never an index. A split GPU stands for all of
    its instances, the only usable parts of it.

    Args:
        names: minor numbers, device files, UUIDs or PCI addresses.
        devices: GPUs and instances of this node, lost ones too.
    """
    return _resolve(names, _named(devices))


def _named(devices: Sequence[GpuDevice]) -> dict[str, list[str]]:
    """Return the UUIDs by name; an instance's only name is its UUID."""
    children: dict[str, list[str]] = {}
    for device in devices:
        if device.parent:
            children.setdefault(device.parent, []).append(device.uuid)
    found = {device.uuid: [device.uuid] for device in devices if device.parent}
    for device in devices:
        if not device.parent:
            for name in (device.uuid, device.pci, str(device.minor)):
                found[name] = children.get(device.uuid, [device.uuid])
    return found


def _resolve(
    names: Iterable[str], named: Mapping[str, Sequence[str]]
) -> tuple[list[str], list[str]]:
    found: dict[str, None] = {}
    unknown: list[str] = []
    for name in names:
        word = name.strip()
        digits = word.removeprefix("/dev/nvidia")
        if digits.isascii() and digits.isdigit():
            word = str(int(digits))
        elif ":" in word:
            word = pci_address(word)
        uuids = named.get(word, ()) if word else ()
        found.update(dict.fromkeys(uuids))
        if not uuids:
            unknown.append(name)
    return list(found), unknown


def process_families(processes: Processes, jobs: Jobs) -> list[Metric]:
    """Return how many processes of jobs, and of no job, have each GPU open."""
    samples = []
    for uuid, pids in processes.items():
        if pids is not None:
            owned = sum(jobs.job_of(pid) is not None for pid in pids)
            samples.append(((uuid, "job"), float(owned)))
            samples.append(((uuid, "none"), float(len(pids) - owned)))
    return [gpu.PROCESSES.family(samples)]


def job_families(
    jobs: Jobs,
    devices: Sequence[GpuDevice],
    processes: Processes,
    *,
    cluster: str = "",
    only: JobFacts | None = None,
) -> list[Metric]:
    """Return each job's GPUs, and how many it was allocated, uses, and uses without allocation.

    Args:
        jobs: all jobs of the node.
        devices: GPUs and instances of the node, lost ones too.
        processes: by GPU.
        cluster: value of the label.
        only: the only job to show, with its allocation.
    """
    facts = {jobid: job.facts for jobid, job in jobs.by_id.items()}
    if only is not None:
        # The agent knows its job's GPUs from the start; the control group is found later.
        known = facts.get(only.key, only)
        facts = {only.key: only if only.gpus is not None else known}
    used = _used(facts, jobs, processes)
    allocated, missing = {}, {}
    named = _named(devices)
    for jobid, job in facts.items():
        allocated[jobid], missing[jobid] = _resolve(job.gpus or (), named)
    # One owner per GPU, however many jobs share it: dashboards join on (cluster, uuid) with
    # group_left, and Prometheus refuses a join in which two series match.
    owners = _owners(allocated, used)
    split = {device.parent for device in devices}
    leaves = {device.uuid for device in devices} - split
    # A GPU whose process list cannot be read is not idle. Counts that depend on it are left out: a
    # 0 would accuse the job of waste.
    unread = {uuid for uuid in leaves if processes.get(uuid) is None}
    rows: dict[MetricSpec, list[Row]] = {spec: [] for spec in gpu.OF_JOBS}
    for jobid, job in facts.items():
        where = cluster, jobid
        own, mine = set(allocated[jobid]), used[jobid]
        if own or missing[jobid] or mine:
            counts = _counts(job, own, len(missing[jobid]), mine.keys(), unread)
            for spec, count in counts.items():
                rows[spec].append((where, count))
        # Start from the allocation: allocated GPUs without a process waste most, and a loop over
        # processes would miss them.
        for uuid in dict.fromkeys((*allocated[jobid], *mine)):
            which = (*where, uuid)
            is_allocated = "" if job.gpus is None else str(int(uuid in own))
            owns = str(int(owners[uuid] == jobid))
            rows[gpu.JOB_GPU_INFO].append(((*which, is_allocated, owns), 1))
            if uuid not in unread:
                sizes = mine.get(uuid, [])
                told = [size for size in sizes if size is not None]
                rows[gpu.JOB_GPU_PROCESSES].append((which, len(sizes)))
                # No process is 0 bytes. Processes of unknown size are no series.
                if told or not sizes:
                    rows[gpu.JOB_GPU_MEMORY_USED].append((which, sum(told)))
    return [spec.family(samples) for spec, samples in rows.items()]


def _used(
    shown: Iterable[str], jobs: Jobs, processes: Processes
) -> dict[str, dict[str, list[int | None]]]:
    used: dict[str, dict[str, list[int | None]]] = {jobid: {} for jobid in shown}
    for uuid, pids in processes.items():
        for pid, memory in (pids or {}).items():
            jobid = jobs.job_of(pid)
            if jobid in used:
                used[jobid].setdefault(uuid, []).append(memory)
    return used


def _counts(
    job: JobFacts,
    own: AbstractSet[str],
    missing: int,
    used: AbstractSet[str],
    unread: AbstractSet[str],
) -> dict[MetricSpec, int]:
    """Return a job's GPU counts, except those that depend on an unreadable process list."""
    if job.gpus is None:
        return {} if unread else {gpu.JOB_GPUS_USED: len(used)}
    counts = {gpu.JOB_GPUS_ALLOCATED: len(own) + missing}
    if not missing and not own & unread:
        counts[gpu.JOB_GPUS_USED] = len(own & used)
    if not unread - own:
        counts[gpu.JOB_GPUS_FOREIGN] = len(used - own)
    return counts


def _owners(
    allocated: Mapping[str, Iterable[str]], used: Mapping[str, Iterable[str]]
) -> dict[str, str]:
    """Return the owner of each GPU: the lowest id of the jobs that have it, or else use it."""
    owners: dict[str, str] = {}
    for jobs in (allocated, used):
        fresh: dict[str, str] = {}
        # Ids are text: the length sorts 9 before 10. The owner must be the same at each reading.
        for jobid in sorted(jobs, key=lambda jobid: (len(jobid), jobid)):
            for uuid in jobs[jobid]:
                fresh.setdefault(uuid, jobid)
        owners = {**fresh, **owners}
    return owners
