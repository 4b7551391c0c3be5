"""Names of allocated GPUs, and the owners of processes, without a driver."""

from __future__ import annotations

from typing import Any

import pytest
from hpml_exporters.gpu.devices import GpuDevice
from hpml_exporters.gpu.jobs import Processes, job_families, resolve
from hpml_exporters.jobs.board import JobFacts, Jobs, JobSeen

from tests.unit.exporters.collectors.families import values

# NVML's order is that of PCI addresses; the minor numbers are another, as on real machines where a
# slower card comes up later.
NODE = (
    GpuDevice("GPU-aa", pci="00000000:07:00.0", minor=2),
    GpuDevice("GPU-bb", pci="00000000:0f:00.0", minor=0),
    GpuDevice("GPU-cc", pci="00000000:b7:00.0", minor=1, mig="enabled"),
    GpuDevice("MIG-c1", pci="00000000:b7:00.0", minor=1, mig="1g.10gb", parent="GPU-cc"),
    GpuDevice("MIG-c2", pci="00000000:b7:00.0", minor=1, mig="2g.20gb", parent="GPU-cc"),
)


@pytest.mark.parametrize(
    ("name", "uuids"),
    [
        ("0", ["GPU-bb"]),
        ("2", ["GPU-aa"]),
        ("/dev/nvidia2", ["GPU-aa"]),
        ("GPU-aa", ["GPU-aa"]),
        ("0000:0f:00.0", ["GPU-bb"]),
        ("00000000:0F:00.0", ["GPU-bb"]),
        ("0f:00.0", ["GPU-bb"]),
        ("2,GPU-aa", ["GPU-aa"]),  # named twice
        ("MIG-c2", ["MIG-c2"]),
        ("1", ["MIG-c1", "MIG-c2"]),
        ("GPU-cc", ["MIG-c1", "MIG-c2"]),
    ],
)
def test_every_way_to_name_a_gpu(name: str, uuids: list[str]) -> None:
    """A number is that of the device file; a split GPU means all of its instances."""
    assert resolve(name.split(","), NODE) == (uuids, [])


@pytest.mark.parametrize("name", ["7", "GPU-zz", "MIG-zz", "0000:99:00.0", "", "gpu", "-1", "²"])
def test_names_that_mean_no_gpu_are_told_apart(name: str) -> None:
    """They still count as allocated, and are never guessed."""
    assert resolve([name, "2"], NODE) == (["GPU-aa"], [name])


def shown(
    seen: list[JobSeen], processes: Processes, only: JobFacts | None = None
) -> dict[tuple[str, ...], float]:
    """Numbers by name (without hpml_job_) and labels after the cluster."""
    jobs = Jobs({job.facts.jobid: job for job in seen})
    families = job_families(jobs, NODE, processes, cluster="c1", only=only)
    found = values(families)
    assert {cluster for _, cluster, *_ in found} <= {"c1"}
    return {
        (name.removeprefix("hpml_job_"), *labels): number
        for (name, _, *labels), number in found.items()
    }


def everywhere(**pids: dict[int, int | None] | None) -> Processes:
    """Process lists: those of the GPUs that are named, and empty ones of all others."""
    leaves = ("GPU-aa", "GPU-bb", "MIG-c1", "MIG-c2")
    return {uuid: pids.get(uuid.replace("-", "_"), {}) for uuid in leaves}


def test_the_gap_between_allocated_and_used() -> None:
    """Two allocated, one used; the series of the unused one has the value 0."""
    job = JobSeen(JobFacts("5", gpus=("0", "2")), pids=frozenset({70, 71}))
    processes = everywhere(GPU_aa={70: 100, 71: 200}, GPU_bb={99: 5})
    assert shown([job], processes) == {
        ("gpu_info", "5", "GPU-bb", "1", "1"): 1,
        ("gpu_info", "5", "GPU-aa", "1", "1"): 1,
        ("gpus_allocated", "5"): 2,
        ("gpus_used", "5"): 1,
        ("gpus_foreign", "5"): 0,
        ("gpu_processes", "5", "GPU-bb"): 0,
        ("gpu_processes", "5", "GPU-aa"): 2,
        ("gpu_memory_used_bytes", "5", "GPU-bb"): 0,
        ("gpu_memory_used_bytes", "5", "GPU-aa"): 300,
    }


@pytest.mark.parametrize(
    ("gpus", "processes", "expected"),
    [
        # on the wrong GPU it does not use its own
        (("0",), {"GPU_aa": {70: 1}}, {"allocated": 1, "used": 0, "foreign": 1}),
        # a list that cannot be read: its own, a neighbour's
        (("0", "2"), {"GPU_aa": None, "GPU_bb": {70: 1}}, {"allocated": 2, "foreign": 0}),
        (("0", "2"), {"MIG_c1": None, "GPU_bb": {70: 1}}, {"allocated": 2, "used": 1}),
        # lost before the exporter began
        (("0", "9"), {"GPU_bb": {70: 1}}, {"allocated": 2, "foreign": 0}),
        # without rights on a split GPU the driver reports no memory
        (("MIG-c1",), {"MIG_c1": {70: None}}, {"allocated": 1, "used": 1, "foreign": 0}),
        # most jobs of a mixed node
        ((), {"GPU_aa": {1: 1}}, {}),
        (None, {"GPU_aa": {1: 1}}, {}),
    ],
)
def test_what_is_not_known_is_absent(
    gpus: tuple[str, ...] | None, processes: Any, expected: dict[str, int]
) -> None:
    """Never 0: an unreadable list gives no counts, and unknown memory no metric of memory."""
    job = JobSeen(JobFacts("5", gpus=gpus), pids=frozenset({70}))
    found = shown([job], everywhere(**processes))
    assert {
        key[0].removeprefix("gpus_"): number for key, number in found.items() if len(key) == 2
    } == expected
    unread = {uuid.replace("_", "-") for uuid, pids in processes.items() if pids is None}
    assert not unread & {key[2] for key in found if key[0] == "gpu_processes"}
    known = {key[2] for key in found if key[0] == "gpu_memory_used_bytes"}
    assert not known & ({"MIG-c1"} if gpus == ("MIG-c1",) else unread)


@pytest.mark.parametrize(
    ("allocations", "flags"),
    [
        ({"9": ("2",), "10": ("2",)}, {"9": ("1", "1"), "10": ("1", "0")}),
        ({"9": None, "10": ("2",)}, {"9": ("", "0"), "10": ("1", "1")}),
        ({"9": (), "10": None}, {"9": ("0", "1"), "10": ("", "0")}),
    ],
)
def test_a_shared_gpu_has_one_owner(
    allocations: dict[str, tuple[str, ...] | None], flags: dict[str, tuple[str, str]]
) -> None:
    """Of those that were allocated it, else of those on it, the lowest number; 9 is below 10.

    If the allocation of a job is unknown, the label is neither 1 nor 0.
    """
    seen = [
        JobSeen(JobFacts(jobid, gpus=gpus), pids=frozenset({int(jobid)}))
        for jobid, gpus in allocations.items()
    ]
    found = shown(seen, everywhere(GPU_aa={9: 1, 10: 1}))
    info = {key[1]: key[3:] for key in found if key[0] == "gpu_info" and key[2] == "GPU-aa"}
    assert info == flags


def test_a_local_run_of_the_same_number() -> None:
    """It has a different id and different GPUs."""
    jobs = {
        "5": JobSeen(JobFacts("5", gpus=("0",)), pids=frozenset({70})),
        "local-3fa9c1-5": JobSeen(JobFacts("5", cluster="local-3fa9c1"), pids=frozenset({71})),
    }
    processes = everywhere(GPU_bb={70: 1}, GPU_aa={71: 1})
    found = values(job_families(Jobs(jobs), NODE, processes, cluster="c1"))
    info = {key[1:] for key in found if key[0] == "hpml_job_gpu_info"}
    assert info == {("c1", "5", "GPU-bb", "1", "1"), ("c1", "local-3fa9c1-5", "GPU-aa", "", "1")}


def test_the_own_job_is_shown_before_its_control_group_was_found() -> None:
    """In a job the allocation is known from the start."""
    found = shown([], everywhere(), only=JobFacts("5", gpus=("0",)))
    assert (found["gpus_allocated", "5"], found["gpus_used", "5"]) == (1, 0)
