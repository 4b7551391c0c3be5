"""Names of allocated GPUs, and whose the processes are: no driver is asked here."""

from __future__ import annotations

import pytest
from hpml_exporters.gpu.devices import Place, pci_address
from hpml_exporters.gpu.jobs import job_families, resolve
from hpml_exporters.jobs.board import JobFacts, Jobs, JobSeen
from hpml_exporters.metric import Family

# NVML's order is that of PCI addresses; the minor numbers are another, as on real machines where a
# slower card comes up later.
NODE = (
    Place("GPU-aa", pci="00000000:07:00.0", minor=2),
    Place("GPU-bb", pci="00000000:0f:00.0", minor=0),
    Place("GPU-cc", pci="00000000:b7:00.0", minor=1, mig="enabled"),
    Place("MIG-c1", pci="00000000:b7:00.0", minor=1, mig="1g.10gb", parent="GPU-cc"),
    Place("MIG-c2", pci="00000000:b7:00.0", minor=1, mig="2g.20gb", parent="GPU-cc"),
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
        ("MIG-c2", ["MIG-c2"]),
        ("1", ["MIG-c1", "MIG-c2"]),
        ("GPU-cc", ["MIG-c1", "MIG-c2"]),
    ],
)
def test_every_way_to_name_a_gpu(name: str, uuids: list[str]) -> None:
    """A number is the device file's; a split GPU stands for its instances."""
    assert resolve([name], NODE) == (uuids, [])


@pytest.mark.parametrize("name", ["7", "GPU-zz", "MIG-zz", "0000:99:00.0", "", "gpu", "-1", "²"])
def test_names_that_mean_no_gpu_are_told_apart(name: str) -> None:
    """They are allocated all the same, and never guessed."""
    assert resolve([name, "2"], NODE) == (["GPU-aa"], [name])


def test_a_gpu_named_twice_is_one() -> None:
    """By its number and by its UUID."""
    assert resolve(["2", "GPU-aa"], NODE) == (["GPU-aa"], [])


def test_addresses_have_one_form() -> None:
    """NVML writes eight digits of domain, sysfs four, lspci none."""
    assert {pci_address(one) for one in ("00000000:3B:00.0", "0000:3b:00.0", "3b:00.0")} == {
        "00000000:3b:00.0"
    }
    assert pci_address("10000:3b:00.0") == "00010000:3b:00.0"


def jobs(*seen: JobSeen) -> Jobs:
    """A node's jobs."""
    return Jobs({one.facts.jobid: one for one in seen})


def shown(families: object) -> dict[tuple[str, ...], object]:
    """Numbers by name (without hpml_job_) and labels."""
    assert isinstance(families, tuple)
    found: dict[tuple[str, ...], object] = {}
    for family in families:
        assert isinstance(family, Family)
        for sample in family.samples:
            found[family.spec.name.removeprefix("hpml_job_"), *sample.labels] = sample.value
    return found


def test_the_gap_between_allocated_and_used() -> None:
    """Two allocated, one used; the unused one has a series that says 0."""
    view = jobs(JobSeen(JobFacts("5", gpus=("0", "2")), pids=frozenset({70, 71})))
    processes = {"GPU-aa": {70: 100, 71: 200}, "GPU-bb": {99: 5}}
    assert shown(job_families(view, NODE, processes)) == {
        ("gpu_info", "5", "GPU-bb"): 1,
        ("gpu_info", "5", "GPU-aa"): 1,
        ("gpus_allocated", "5"): 2,
        ("gpus_used", "5"): 1,
        ("gpus_foreign", "5"): 0,
        ("gpu_processes", "5", "GPU-bb"): 0,
        ("gpu_processes", "5", "GPU-aa"): 2,
        ("gpu_memory_used_bytes", "5", "GPU-bb"): 0,
        ("gpu_memory_used_bytes", "5", "GPU-aa"): 300,
    }


def test_using_a_foreign_gpu_does_not_close_the_gap() -> None:
    """A job on the wrong GPU uses none of its own."""
    view = jobs(JobSeen(JobFacts("5", gpus=("0",)), pids=frozenset({70})))
    told = shown(job_families(view, NODE, {"GPU-aa": {70: 1}}))
    assert (told["gpus_allocated", "5"], told["gpus_used", "5"], told["gpus_foreign", "5"]) == (
        1,
        0,
        1,
    )


def test_a_gpu_that_nobody_can_see_is_allocated_still() -> None:
    """It was lost before the exporter began."""
    view = jobs(JobSeen(JobFacts("5", gpus=("0", "9"))))
    assert shown(job_families(view, NODE, {}))["gpus_allocated", "5"] == 2


def test_memory_that_the_driver_does_not_tell_is_not_zero() -> None:
    """Without rights on a split GPU there is no figure, and so no series."""
    view = jobs(JobSeen(JobFacts("5", gpus=("MIG-c1",)), pids=frozenset({70})))
    told = shown(job_families(view, NODE, {"MIG-c1": {70: None}}))
    assert told["gpu_processes", "5", "MIG-c1"] == 1
    assert ("gpu_memory_used_bytes", "5", "MIG-c1") not in told


def test_a_job_without_gpus_has_no_series() -> None:
    """Most jobs of a mixed node."""
    view = jobs(JobSeen(JobFacts("5", gpus=())), JobSeen(JobFacts("6")))
    assert shown(job_families(view, NODE, {"GPU-aa": {1: 1}})) == {}


def test_the_own_job_is_shown_before_its_control_group_was_found() -> None:
    """In a job the allocation is known from the start."""
    own = JobFacts("5", gpus=("0",))
    told = shown(job_families(jobs(), NODE, {}, own))
    assert told["gpus_allocated", "5"] == 1
    assert told["gpus_used", "5"] == 0
