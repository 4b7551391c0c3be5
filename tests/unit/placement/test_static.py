"""Static forms: what they say, and why they are not given."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hpml_orchestrator.placement.planner import plan
from hpml_orchestrator.placement.static import Form, openmpi_rankfile
from hpml_orchestrator.topology import Domain, Topology
from tests.unit.placement.machines import forms, intel, milan, node, threads


def two(cores: int, *gpus: int, sockets: int = 1) -> Topology:
    """Two domains of so many cores."""
    parts = [(number * (sockets - 1), threads(cores * number, cores)) for number in range(2)]
    return node(parts, gpus)


WITH_MEMORY = replace(two(4, 0, 1), domains=(*two(4).domains, Domain(2, ())))
TOLD_IN_PART = replace(node([(0, threads(16, 16))], (0, 0)), source="NCCL XML")
ONE = node([(0, threads(0, 2))], (0,))
SEVEN = node([(0, threads(0, 7))], (0, 0))
HALF_CORES = "rank 0 does not have all hardware threads of its cores"
WHOLE = "rank 0 has not exactly one whole domain"
CASES: list[tuple[Topology, int, dict[str, Any], dict[str, str]]] = [
    # machine, ranks, options, what forms say or why not
    (
        intel((0, 1)),
        2,
        {"smt": False},
        {"cores": HALF_CORES, "map-by": HALF_CORES, "rankfile": HALF_CORES},
    ),
    (
        ONE,
        3,
        {"ranks_per_gpu": 3},
        {"rankfile": "ranks share a core", "mask_cpu": "--cpu-bind=mask_cpu:1,2,1"},
    ),
    (two(4, 0, 0), 1, {}, {"map_ldom": WHOLE}),
    (two(4, 0, 0), 2, {"policy": "numa"}, {"map_ldom": WHOLE}),
    (two(4, 0, 0), 1, {"policy": "numa"}, {"map_ldom": "--cpu-bind=map_ldom:0"}),
    (two(4, 0, 0), 1, {"policy": "numa", "allowed_cpus": [0, 1, 2]}, {"map_ldom": WHOLE}),
    (
        two(6, sockets=2),
        3,
        {"policy": "spread"},
        {
            "cores": "a rank has cores of two sockets",
            "map-by": "the ranks are not equal parts, in order, of sockets or domains",
        },
    ),
    (
        two(6, sockets=2),
        4,
        {"policy": "spread"},
        {"cores": "--cpu-bind=cores --distribution=block:block --cpus-per-task=3"},
    ),
    (
        SEVEN,  # 4 and 3 cores
        2,
        {},
        {
            "cores": "the ranks' cores are not equal blocks in order",
            "map-by": "the ranks are not equal parts, in order, of sockets or domains",
            "mask_cpu": "--cpu-bind=mask_cpu:f,70",
        },
    ),
    (two(4, 0, 1), 2, {}, {"map-by": "--map-by ppr:1:numa --bind-to numa"}),
    (two(4, 0, 0, 1, 1), 4, {}, {"map-by": "--map-by ppr:4:socket:pe=2 --bind-to core"}),
    (WITH_MEMORY, 2, {}, {"map-by": "--map-by ppr:2:socket:pe=4 --bind-to core"}),
    (
        TOLD_IN_PART,
        2,
        {},
        {
            "mask_cpu": "--cpu-bind=mask_cpu:ff0000,ff000000",
            "cores": "NCCL XML does not have all cores, so that they cannot be counted",
        },
    ),
]


@pytest.mark.parametrize(("topology", "ranks", "options", "said"), CASES)
def test_a_form(
    topology: Topology, ranks: int, options: dict[str, Any], said: dict[str, str]
) -> None:
    """The options of a launcher, or the reason why it cannot say the plan exactly."""
    found = {form.name: form for form in forms(topology, plan(topology, ranks, **options))}
    assert {name: found[name].value or found[name].reason for name in said} == said


def test_a_plan_that_binds_nothing_has_no_form() -> None:
    """Policy `none` leaves binding to the launcher, and every form says so."""
    for form in forms(milan(), plan(milan(), 4, policy="none")):
        assert form == Form(form.name, None, "the plan binds nothing")


def test_a_rankfile_of_two_nodes() -> None:
    """Ranks are in blocks, and slots are cores: both hardware threads belong to them."""
    made = plan(intel((1, 0)), 2)
    assert openmpi_rankfile(intel((1, 0)), made, ["a", "b"]).value == (
        "rank 0=a slot=8-15\nrank 1=a slot=0-7\nrank 2=b slot=8-15\nrank 3=b slot=0-7\n"
    )
