"""Static forms: what they say, and why they are not given."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpml_orchestrator.placement.planner import plan
from hpml_orchestrator.placement.static import (
    Form,
    forms,
    openmpi_map_by,
    openmpi_rankfile,
    slurm_cores,
    slurm_ldoms,
    slurm_masks,
    slurm_memory,
)
from hpml_orchestrator.topology.model import Domain
from tests.unit.placement.machines import intel, milan, node, threads


def test_a_plan_that_binds_nothing_has_no_form() -> None:
    """Policy `none` leaves binding to the launcher, and every form says so."""
    made = plan(milan(), 4, policy="none")
    for one in forms(milan(), made):
        assert one == Form(one.name, None, "the plan binds nothing")


def test_rankfile_of_two_nodes() -> None:
    """Ranks stand in blocks, and slots are cores: both hardware threads belong to them."""
    topology = intel((1, 0))
    made = plan(topology, 2)
    assert openmpi_rankfile(topology, made, ["a", "b"]).value == (
        "rank 0=a slot=8-15\nrank 1=a slot=0-7\nrank 2=b slot=8-15\nrank 3=b slot=0-7\n"
    )


@pytest.mark.parametrize("form", [slurm_cores, openmpi_map_by])
def test_whole_cores_cannot_say_half_a_core(form: object) -> None:
    """Launchers bind all hardware threads of a core; a plan with one of them is told so."""
    topology = intel((0, 1))
    made = plan(topology, 2, smt=False)
    got = form(topology, made)  # type: ignore[operator]
    assert got.value is None
    assert got.reason == "rank 0 does not have all hardware threads of its cores"


def test_whole_cores_cannot_say_shared_cores() -> None:
    """More ranks than cores cannot be told by blocks of cores; masks may overlap."""
    topology = node([(0, threads(0, 2))], (0,))
    made = plan(topology, 3, ranks_per_gpu=3)
    assert openmpi_rankfile(topology, made, ["a"]).reason == "ranks share a core"
    assert slurm_masks(made).value == "--cpu-bind=mask_cpu:1,2,1"


def test_domains_are_whole_or_not_named() -> None:
    """Half a domain, or one and a half, is no map of domains."""
    topology = node([(0, threads(4 * number, 4)) for number in range(2)], (0, 0))
    assert slurm_ldoms(topology, plan(topology, 1)).value is None
    assert slurm_ldoms(topology, plan(topology, 2, policy="numa")).value is None
    alone = plan(topology, 1, policy="numa")
    assert slurm_ldoms(topology, alone).value == "--cpu-bind=map_ldom:0"
    less = plan(topology, 1, policy="numa", allowed_cpus=[0, 1, 2])
    assert slurm_ldoms(topology, less).reason == "rank 0 has not exactly one whole domain"


def test_blocks_of_cores_do_not_cross_sockets() -> None:
    """Three equal parts of two sockets: one rank would be on both."""
    topology = node([(0, threads(0, 6)), (1, threads(6, 6))])
    made = plan(topology, 3, policy="spread")
    assert slurm_cores(topology, made).reason == "a rank has cores of two sockets"
    assert openmpi_map_by(topology, made).value is None
    made = plan(topology, 4, policy="spread")
    assert slurm_cores(topology, made).value == (
        "--cpu-bind=cores --distribution=block:block --cpus-per-task=3"
    )


def test_unequal_parts_are_told_by_masks_alone() -> None:
    """Seven cores for two ranks are four and three."""
    topology = node([(0, threads(0, 7))], (0, 0))
    made = plan(topology, 2)
    assert slurm_cores(topology, made).value is None
    assert openmpi_map_by(topology, made).value is None
    assert slurm_masks(made).value == "--cpu-bind=mask_cpu:f,70"


def test_map_by_domain_and_by_its_parts() -> None:
    """One rank per domain binds to it, several to equal parts of it."""
    topology = node([(0, threads(4 * number, 4)) for number in range(2)], (0, 1))
    made = plan(topology, 2)
    assert openmpi_map_by(topology, made).value == "--map-by ppr:1:numa --bind-to numa"
    three = node([(0, threads(5 * number, 5)) for number in range(2)], (0, 0, 1, 1))
    made = plan(three, 4, allowed_cpus=None)
    assert openmpi_map_by(three, made).value is None  # 3, 2, 3, 2 cores
    even = node([(0, threads(4 * number, 4)) for number in range(2)], (0, 0, 1, 1))
    assert openmpi_map_by(even, plan(even, 4)).value == (
        "--map-by ppr:4:socket:pe=2 --bind-to core"
    )


def test_open_mpi_would_count_domains_without_cpus() -> None:
    """With memory alone among the domains, parts are told by socket or not at all."""
    topology = node([(0, threads(4 * number, 4)) for number in range(2)], (0, 1))
    topology = replace(topology, domains=(*topology.domains, Domain(2, ())))
    assert openmpi_map_by(topology, plan(topology, 2)).value == (
        "--map-by ppr:2:socket:pe=4 --bind-to core"
    )
    swapped = replace(topology, gpus=(topology.gpus[1], topology.gpus[0]))
    assert openmpi_map_by(swapped, plan(swapped, 2)).value is None


def test_no_memory_to_prefer() -> None:
    """A rank without a preferred domain leaves the memory to the launcher."""
    made = plan(intel((0, 1)), 2)
    ranks = (made.ranks[0], replace(made.ranks[1], memory=None))
    assert slurm_memory(replace(made, ranks=ranks)).reason == "no memory is preferred for rank 1"


@pytest.mark.parametrize("source", ["NCCL XML", "nvidia-smi topo -m"])
def test_cores_are_not_counted_where_only_some_are_told(source: str) -> None:
    """Sources that tell of CPUs next to GPUs alone give masks, and no numbers of cores."""
    topology = replace(node([(0, threads(16, 16))], (0, 0)), source=source)
    made = plan(topology, 2)
    assert slurm_masks(made).value == "--cpu-bind=mask_cpu:ff0000,ff000000"
    for form in (slurm_cores, openmpi_map_by):
        assert source in form(topology, made).reason
    assert openmpi_rankfile(topology, made, ["a"]).value is None
