"""Plans of the binding table's machines and of real ones, written by hand."""

from __future__ import annotations

import pytest

from hpml_orchestrator.placement.model import Plan
from hpml_orchestrator.placement.planner import plan
from hpml_orchestrator.topology.sysfs import read_topology
from tests.unit.placement.machines import (
    dgx_a100,
    intel,
    mi250x,
    milan,
    node,
    two_by_twelve,
)
from tests.unit.topology.real_machines import DATA


def lists(made: Plan) -> list[str]:
    return [one.cpu_list() for one in made.ranks]


def test_two_sockets_with_four_gpus() -> None:
    """The first half of the GPUs gets the first socket, the second half the second."""
    made = plan(intel((0, 0, 1, 1)), 4)
    assert lists(made) == ["0-3,16-19", "4-7,20-23", "8-11,24-27", "12-15,28-31"]
    assert [one.cores for one in made.ranks] == [
        (0, 1, 2, 3),
        (4, 5, 6, 7),
        (8, 9, 10, 11),
        (12, 13, 14, 15),
    ]
    assert [one.numa for one in made.ranks] == [(0,), (0,), (1,), (1,)]
    assert [one.memory for one in made.ranks] == [0, 0, 1, 1]
    assert [one.threads for one in made.ranks] == [4, 4, 4, 4]
    assert [one.distance for one in made.ranks] == [10, 10, 10, 10]
    assert [one.gpu for one in made.ranks] == [f"0000:0{bus}:00.0" for bus in (1, 2, 3, 4)]
    assert made.warnings == ()


def test_two_sockets_whose_cpu_numbers_alternate() -> None:
    """Even CPUs on the first socket, odd ones on the second, as many Intel machines have it."""
    even_odd = node(
        [(0, [(cpu,) for cpu in range(0, 32, 2)]), (1, [(cpu,) for cpu in range(1, 32, 2)])],
        (0, 0, 0, 0, 1, 1, 1, 1),
    )
    made = plan(even_odd, 8)
    assert lists(made) == [
        "0,2,4,6",
        "8,10,12,14",
        "16,18,20,22",
        "24,26,28,30",
        "1,3,5,7",
        "9,11,13,15",
        "17,19,21,23",
        "25,27,29,31",
    ]


def test_milan_with_reversed_gpus() -> None:
    """Each rank has the whole domain of its GPU, in reversed order."""
    made = plan(milan(), 4)
    assert lists(made) == ["48-63,112-127", "32-47,96-111", "16-31,80-95", "0-15,64-79"]
    assert [one.memory for one in made.ranks] == [3, 2, 1, 0]


def test_dgx_a100() -> None:
    """Half of each GPU domain, and half of the idle domain of the same socket that lends to it."""
    made = plan(dgx_a100(), 8)
    assert lists(made) == [
        "32-39,48-55,160-167,176-183",
        "40-47,56-63,168-175,184-191",
        "0-7,16-23,128-135,144-151",
        "8-15,24-31,136-143,152-159",
        "96-103,112-119,224-231,240-247",
        "104-111,120-127,232-239,248-255",
        "64-71,80-87,192-199,208-215",
        "72-79,88-95,200-207,216-223",
    ]
    assert [one.memory for one in made.ranks] == [3, 3, 1, 1, 7, 7, 5, 5]
    assert {one.distance for one in made.ranks} == {12}
    assert [one.nic for one in made.ranks] == [f"mlx5_{number}" for number in range(8)]


def test_mi250x_with_seven_of_eight_cores() -> None:
    """Seven of eight cores of each cache are usable; the CPUs are the published ones."""
    usable = [cpu for cpu in range(64) if cpu % 8]
    made = plan(mi250x(), 8, allowed_cpus=usable)
    assert lists(made) == ["49-55", "57-63", "17-23", "25-31", "1-7", "9-15", "33-39", "41-47"]
    assert [one.threads for one in made.ranks] == [7] * 8


@pytest.mark.parametrize("policy", ["gpu-local", "socket", "numa", "spread"])
def test_one_worker_per_socket(policy: str) -> None:
    """Two CPU-only ranks on two sockets of 12 cores: a socket and 12 threads for each."""
    made = plan(two_by_twelve(), 2, policy=policy)
    assert lists(made) == ["0-11", "12-23"]
    assert [one.threads for one in made.ranks] == [12, 12]
    assert [one.memory for one in made.ranks] == [0, 1]
    assert [one.gpu for one in made.ranks] == [None, None]


def test_a_real_machines_plan() -> None:
    """Two cores of two threads for each GPU, as somebody writes down who looks at the file."""
    made = plan(read_topology(DATA / "hwloc/power8gpudistances.xml"), 4)
    assert lists(made) == ["0-1,8-9", "16-17,24-25", "80-81,88-89", "96-97,104-105"]
    assert {one.distance for one in made.ranks} == {10}
    assert made.warnings == ()
