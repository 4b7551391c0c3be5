"""What a list of visible devices means, and what a cgroup hides."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpml_orchestrator.placement.visible import chosen_names, visible_devices
from hpml_orchestrator.topology.model import Gpu, Topology
from tests.unit.placement.machines import milan

HIDDEN = frozenset({"0000:01:00.0", "0000:03:00.0"})


def shown(topology: Topology, text: str | None, hidden: frozenset[str] = frozenset()) -> list[str]:
    return [one.name if one else "?" for one in visible_devices(topology, text, hidden)]


@pytest.mark.parametrize(
    ("text", "devices"),
    [
        (None, "GPU0 GPU1 GPU2 GPU3"),
        ("2,0", "GPU2 GPU0"),
        (" 1 , GPU-3 ", "GPU1 GPU3"),
        ("", ""),
        ("NoDevFiles", ""),
        ("-1", ""),
        ("0,1,-1,2", "GPU0 GPU1"),
        ("0,,1", "GPU0"),
        ("0,9", "GPU0 ?"),
        ("GPU-unknown", "?"),
    ],
)
def test_a_list_as_the_driver_reads_it(text: str | None, devices: str) -> None:
    """Indices and UUIDs in their order; what can be no device ends the list."""
    assert shown(milan(), text) == devices.split()


@pytest.mark.parametrize(
    ("text", "devices"),
    [(None, "GPU1 GPU3"), ("0", "GPU1"), ("1,0", "GPU3 GPU1"), ("2", "?"), ("GPU-1", "GPU1")],
)
def test_indices_count_what_the_cgroup_admits(text: str | None, devices: str) -> None:
    """The kernel's description lists hidden GPUs too; the driver does not count them."""
    assert shown(milan(), text, HIDDEN) == devices.split()


def test_the_planner_takes_all_where_nothing_is_said() -> None:
    """No list and nothing hidden."""
    assert chosen_names(milan(), None) is None


def divided() -> Topology:
    whole = milan()
    gpus = [replace(one, uuid=f"GPU-{one.index:08x}") for one in whole.gpus]
    first = gpus[0]
    parts = [
        Gpu(4 + n, f"GPU0 MIG gi{7 + n}/ci0", first.address, "", first.uuid, 3) for n in range(2)
    ]
    return replace(whole, gpus=(*gpus, *parts))


def test_mig_instances_by_their_older_names() -> None:
    """Drivers before R470 name the GPU and the instance's numbers."""
    topology = divided()
    assert shown(topology, "MIG-GPU-00000000/8/0,MIG-GPU-00000000/7/0") == [
        "GPU0 MIG gi8/ci0",
        "GPU0 MIG gi7/ci0",
    ]
    assert shown(topology, "MIG-GPU-00000002/1/0") == ["GPU2"], "at least its GPU is known"
    assert shown(topology, "MIG-GPU-000000ff/1/0") == ["?"]


def test_instances_of_a_hidden_gpu_are_hidden() -> None:
    """Without a list there are the instances of admitted GPUs, and whole ones."""
    topology = divided()
    names = ["GPU1", "GPU2", "GPU3"]
    assert shown(topology, None) == [*names, "GPU0 MIG gi7/ci0", "GPU0 MIG gi8/ci0"]
    assert shown(topology, None, frozenset({"0000:01:00.0"})) == names
