"""Plans of real machines: what must hold with every policy, and some of them written by hand.

Where the GPUs and CPUs of each file are is told by hand in tests/unit/topology/test_real_files.py.
"""

from __future__ import annotations

from collections import Counter

import pytest

from hpml_orchestrator.placement.cpulist import cpu_numbers
from hpml_orchestrator.placement.model import Plan
from hpml_orchestrator.placement.planner import POLICIES, plan
from hpml_orchestrator.topology import Topology
from hpml_orchestrator.topology.recognise import read_topology
from tests.unit.topology.test_real_files import DATA, MACHINES

BY_HAND = {
    # GPUs on domains 2, 3, 0, 1, one each
    "nccl/topo_4p_940.xml": [
        "48-71,144-167",
        "72-95,168-191",
        "0-23,96-119",
        "24-47,120-143",
    ],
    # MI250X: 3, 3, 1, 1, 0, 0, 2, 2 with all 64 cores
    "nccl/topo_8p1h_3.xml": [
        "48-55,112-119",
        "56-63,120-127",
        "16-23,80-87",
        "24-31,88-95",
        "0-7,64-71",
        "8-15,72-79",
        "32-39,96-103",
        "40-47,104-111",
    ],
    # 1, 1, 0, 0, 3, 3, 2, 2, each CPU a core
    "nccl/azure-ndv4-topo.xml": [
        "24-35",
        "36-47",
        "0-11",
        "12-23",
        "72-83",
        "84-95",
        "48-59",
        "60-71",
    ],
    # one GPU on domain 0, two on domain 1
    "nccl/topo_3p_pcie.xml": ["0-15,32-47", "16-23,48-55", "24-31,56-63"],
    "nvidia-smi/titanx-4gpu-2socket.txt": ["0-2", "3-5", "6-8", "9-11"],
    # two cores of two threads for each
    "hwloc/power8gpudistances.xml": [
        "0-1,8-9",
        "16-17,24-25",
        "80-81,88-89",
        "96-97,104-105",
    ],
    "nvidia-smi/1gpu-numa1.txt": ["32-63,96-127"],
}


@pytest.mark.parametrize("name", BY_HAND)
def test_a_real_machines_plan(name: str) -> None:
    """The plan is the one that somebody writes down who looks at the file."""
    wanted = BY_HAND[name]
    made = plan(read_topology(DATA / name), len(wanted))
    assert [one.cpu_list() for one in made.ranks] == wanted
    assert {one.distance for one in made.ranks} == {10 if name.startswith("hwloc") else None}
    assert made.warnings == ()


def held(made: Plan) -> Counter[int]:
    return Counter(core for one in made.ranks for core in one.cores)


def within_one(counts: list[int]) -> bool:
    return max(counts) - min(counts) <= 1


@pytest.mark.parametrize("half", [False, True], ids=["whole", "half"])
@pytest.mark.parametrize("per_gpu", [1, 2, 3])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", MACHINES)
def test_what_holds_on_every_real_machine(name: str, policy: str, per_gpu: int, half: bool) -> None:
    """Every rank is served, with cores of its own, next to its GPU, and as many as its neighbours.

    On the whole node, and on every second core of each domain.
    """
    topology, known = read_topology(DATA / name), MACHINES[name]
    ranks = per_gpu * len(known.gpus) or 2 * per_gpu
    cores = list(topology.cores)
    allowed = None
    if half:
        cores = cores[::2]
        allowed = [cpu for core in cores for cpu in core.cpus]
    made = plan(topology, ranks, policy=policy, ranks_per_gpu=per_gpu, allowed_cpus=allowed)
    cpus_of = {core.number: core.cpus for core in cores}
    assert len(made.ranks) == ranks
    count = held(made)
    for one in made.ranks:
        assert one.cores
        assert set(one.cores) <= set(cpus_of)
        assert one.cpus == tuple(sorted(cpu for core in one.cores for cpu in cpus_of[core]))
        assert {number for number in one.numa if known.domains[number]} == set(one.numa)
        assert one.memory in ({None} if policy == "none" else known.domains)
    if policy == "none":
        assert all(set(one.cores) == set(cpus_of) for one in made.ranks)
    elif len(cores) < ranks:
        assert within_one([count[core] for core in cpus_of])
    else:
        assert set(count.values()) == {1}
    if not known.gpus or policy in ("none", "spread") or len(cores) < ranks:
        return
    homes = list(known.gpus) * per_gpu
    local = Counter[int | None](core.domain for core in cores)
    if all(local[home] >= number for home, number in Counter(homes).items()):
        assert made.warnings == ()
        _next_to_its_gpu(topology, made, policy, homes, known.domains)
    else:
        assert any("has too few allowed cores" in one for one in made.warnings)


def _next_to_its_gpu(
    topology: Topology,
    made: Plan,
    policy: str,
    homes: list[int | None],
    domains: dict[int, str],
) -> None:
    """What holds where every rank's GPU is next to enough cores."""
    home_of = {core.number: core.domain for core in topology.cores}
    sockets = {core.domain: core.socket for core in topology.cores}
    for one, home in zip(made.ranks, homes, strict=True):
        assert home is not None
        assert set(cpu_numbers(domains[home])) & set(one.cpus), "no core next to its GPU"
        others = set(one.numa) - {home}
        if policy == "gpu-local":
            assert not others & set(homes), "cores of a domain that other ranks are next to"
        elif policy == "numa":
            assert not others
        else:
            assert {sockets[other] for other in others} <= {sockets[home]}
    for home in set(homes):
        mine = [one for one, domain in zip(made.ranks, homes, strict=True) if domain == home]
        assert within_one([sum(home_of[core] == home for core in one.cores) for one in mine])
        if policy != "socket":
            assert within_one([len(one.cores) for one in mine])
