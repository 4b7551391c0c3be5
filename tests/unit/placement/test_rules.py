"""The planner's rules, one by one, with plans written by hand."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.placement.model import Plan, visible_devices
from hpml_orchestrator.placement.planner import plan
from hpml_orchestrator.topology.model import Domain, Gpu, Nic, Topology
from tests.unit.placement.machines import dgx_a100, intel, milan, node, threads, two_by_twelve


def lists(made: Plan) -> list[str]:
    return [one.cpu_list() for one in made.ranks]


def quad(gpus: tuple[int | None, ...]) -> Topology:
    """Four domains of 8 cores on two sockets, near within a socket."""

    def distance(one: int, other: int) -> int:
        return 10 if one == other else 12 if one // 2 == other // 2 else 32

    return node([(number // 2, threads(8 * number, 8)) for number in range(4)], gpus, distance)


FLAT = node([(socket, threads(8 * n, 8)) for n, socket in enumerate((0, 1, 1, 0))], (0, 1))
IDLE = "no rank has a GPU next to NUMA domain {}: {} cores there stay idle"
PLANS: dict[str, tuple[Topology, int, dict[str, Any], list[str], list[str]]] = {
    # machine, ranks, options, CPUs of each rank, beginnings of the warnings
    "the split follows the machine": (
        intel((0, 0, 0, 1)),
        4,
        {},
        ["0-2,16-18", "3-5,19-21", "6-7,22-23", "8-15,24-31"],
        [],
    ),
    "visible GPUs in another order": (
        intel((0, 0, 1, 1)),
        2,
        {"visible": "3,0"},
        ["8-15,24-31", "0-7,16-23"],
        [],
    ),
    "no visible GPU is a CPU-only job": (
        intel((0, 0, 0, 1)),
        2,
        {"visible": ""},
        ["0-7,16-23", "8-15,24-31"],
        [],
    ),
    "domains whose GPUs have no rank lend nothing": (
        quad((3, 2, 1, 0)),
        2,
        {},
        ["24-31", "16-23"],
        [IDLE.format("0, 1", 16)],
    ),
    "a domain without a GPU lends to the nearest": (
        quad((0, 2, 3)),
        2,
        {},
        ["0-15", "16-23"],
        [IDLE.format("3", 8)],
    ),
    "GPUs that the job does not see keep nothing": (
        quad((3, 2, 1, 0)),
        2,
        {"visible": "0,1"},
        ["8-15,24-31", "0-7,16-23"],  # a whole domain is better than two halves
        [],
    ),
    "lending goes by distance before need": (
        quad((0, 2, 3, 3)),
        4,
        {},
        ["0-15", "16-23", "24-27", "28-31"],
        [],
    ),
    "the nearest lent cores go out first": (quad((3, 3)), 2, {}, ["0-3,16-27", "4-15,28-31"], []),
    "without distances the own socket is nearer": (FLAT, 2, {}, ["0-7,24-31", "8-23"], []),
    "siblings that are not allowed are left out": (
        intel((0, 1)),
        2,
        {"allowed_cpus": [0, 1, 9, 25]},
        ["0-1", "9,25"],
        [],
    ),
    "no allowed CPU next to two GPUs": (
        quad((0, 1, 3)),
        3,
        {"allowed_cpus": range(16, 32)},
        ["16-19", "20-23", "24-31"],
        [
            (
                "no CPU is allowed in NUMA domain 0, 1, next to GPU 0000:01:00.0, 0000:02:00.0: "
                "ranks 0-1 on domain 2"
            )
        ],
    ),
    "GPUs of unknown domain go where most cores are left": (
        quad((0, None, 1, None)),
        4,
        {},
        ["0-7", "16-23", "8-15", "24-31"],
        ["no NUMA domain is known for GPU 0000:02:00.0, 0000:04:00.0: ranks 1,3 spread evenly"],
    ),
    "more ranks than cores share": (
        intel((0, 1)),
        3,
        {"allowed_cpus": [0, 8], "ranks_per_gpu": 2},
        ["0", "8", "0"],
        ["3 ranks on 2 cores: some share a core with another"],
    ),
    "CPU-only ranks leave a full socket": (
        two_by_twelve(),
        4,
        {"policy": "socket", "allowed_cpus": [0, *range(12, 24)]},
        ["0", "12-15", "16-19", "20-23"],
        [],
    ),
    "a domain with too few cores borrows": (
        intel((0, 0, 0, 1)),
        4,
        {"allowed_cpus": [0, 8, 9, 10, 11]},
        ["0", "10", "11", "8-9"],
        ["NUMA domain 0 has too few allowed cores for ranks 0-2: ranks 1-2 on domain 1"],
    ),
    "a domain borrows from the nearest": (
        quad((3, 3, 2, 0)),
        4,
        {"policy": "numa", "allowed_cpus": [*range(8), 16, 17, 18, 24]},
        ["24", "18", "16-17", "0-7"],
        ["NUMA domain 3 has too few allowed cores for ranks 0-1: rank 1 on domain 2"],
    ),
    "several ranks per GPU": (
        intel((0, 1)),
        4,
        {"ranks_per_gpu": 2},
        ["0-3,16-19", "8-11,24-27", "4-7,20-23", "12-15,28-31"],
        [],
    ),
    "too few cores for loader workers": (
        intel((0, 0, 1, 1)),
        4,
        {"loader_workers": 4},
        ["0-3,16-19", "4-7,20-23", "8-11,24-27", "12-15,28-31"],
        ["ranks 0-3: fewer cores than 1 and 4 loader workers need"],
    ),
    "policy socket": (quad((0, 0)), 2, {"policy": "socket"}, ["0-3,8-11", "4-7,12-15"], []),
    "policy spread": (quad((3, 3)), 2, {"policy": "spread"}, ["0-15", "16-31"], []),
    "policy none": (intel((0, 1)), 2, {"policy": "none"}, ["0-31", "0-31"], []),
    "no CPUs": (
        Topology("by hand", (), (), (Gpu(0, "GPU0"), Gpu(1, "GPU1"))),
        2,
        {},
        ["", ""],
        ["the topology has no CPUs: no rank can be bound"],
    ),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_rule(name: str) -> None:
    """CPUs of each rank, and what the plan warns of."""
    topology, ranks, options, cpus, warnings = PLANS[name]
    options = dict(options)
    if "visible" in options:
        options["visible_gpus"] = visible_devices(topology, options.pop("visible"))
    made = plan(topology, ranks, **options)
    assert lists(made) == cpus
    assert len(made.warnings) == len(warnings)
    for warning, beginning in zip(made.warnings, warnings, strict=True):
        assert warning.startswith(beginning)


@pytest.mark.parametrize(
    ("topology", "ranks", "options", "field", "values"),
    [
        (intel((0, 1)), 4, {"ranks_per_gpu": 2}, "gpu_index", [0, 1, 0, 1]),
        (quad((0, 3)), 2, {}, "distance", [12, 12]),
        (quad((0, 1, 3)), 3, {"allowed_cpus": range(16, 32)}, "distance", [32, 32, 10]),
        (quad((0, None, 1)), 3, {}, "distance", [10, None, 10]),
        (quad((3, 3)), 2, {"policy": "spread"}, "distance", [32, 12]),
        (intel((0, 0, 1, 1)), 4, {"loader_workers": 3}, "threads", [1, 1, 1, 1]),
        (intel((0, 1)), 2, {"policy": "none"}, "threads", [8, 8]),
        (intel((0, 1)), 2, {"policy": "none"}, "memory", [None, None]),
        (intel((0, 1)), 2, {"smt": False}, "threads", [8, 8]),
        (dgx_a100(), 4, {}, "numa", [(2, 3), (2, 3), (0, 1), (0, 1)]),
    ],
)
def test_what_else_a_rank_gets(
    topology: Topology, ranks: int, options: dict[str, Any], field: str, values: list[Any]
) -> None:
    """GPU, distance, threads, memory and domains."""
    made = plan(topology, ranks, **options)
    assert [getattr(one, field) for one in made.ranks] == values


HIDDEN = frozenset({"0000:01:00.0", "0000:03:00.0"})


@pytest.mark.parametrize(
    ("text", "hidden", "devices"),
    [
        (None, (), "GPU0 GPU1 GPU2 GPU3"),
        ("2,0", (), "GPU2 GPU0"),
        (" 1 , GPU-3 ", (), "GPU1 GPU3"),
        ("", (), ""),
        ("NoDevFiles", (), ""),
        ("0,1,-1,2", (), "GPU0 GPU1"),
        ("0,,1", (), "GPU0"),
        ("0,9", (), "GPU0 ?"),
        ("GPU-unknown", (), "?"),
        ("gpu-2,GPU-", (), "GPU2 ?"),  # of several that begin so, none is meant
        # indices count what the cgroup admits
        (None, HIDDEN, "GPU1 GPU3"),
        ("1,0", HIDDEN, "GPU3 GPU1"),
        ("2", HIDDEN, "?"),
        ("GPU-1", HIDDEN, "GPU1"),
    ],
)
def test_visible_devices(text: str | None, hidden: frozenset[str], devices: str) -> None:
    """Indices and UUIDs in their order; what can be no device ends the list."""
    found = visible_devices(milan(), text, hidden)
    assert [gpu.name if gpu else "?" for gpu in found] == devices.split()
    unknown: list[str] = []
    visible_devices(milan(), text, hidden, unknown)
    assert len(unknown) == devices.count("?")


def test_local_cpus_stand_in_for_an_unknown_domain() -> None:
    """All CPUs of the node say nothing."""
    topology = quad((None, None))
    cpus = (tuple(range(24, 32)), tuple(range(16)))
    gpus = tuple(replace(gpu, cpus=near) for gpu, near in zip(topology.gpus, cpus, strict=True))
    made = plan(replace(topology, gpus=gpus), 2)
    assert [(one.memory, one.distance) for one in made.ranks] == [(3, 12), (0, 10)]
    assert made.warnings == ()
    everywhere = replace(topology, gpus=(replace(gpus[0], cpus=tuple(range(32))),))
    assert "no NUMA domain is known" in plan(everywhere, 1).warnings[0]


def test_memory() -> None:
    """No rank runs on memory alone, and a domain without memory uses the nearest that has some."""
    topology = intel((0, 2))
    own = Domain(2, (), 2**36, ((0, 40), (1, 20), (2, 10)))
    made = plan(replace(topology, domains=(*topology.domains, own)), 2)
    assert [(one.cpu_list(), one.memory) for one in made.ranks] == [
        ("0-7,16-23", 0),
        ("8-15,24-31", 1),
    ]
    topology = milan()
    bare = replace(topology.domains[3], memory_bytes=0, distances=((0, 16), (1, 14), (2, 12)))
    made = plan(replace(topology, domains=(*topology.domains[:3], bare)), 4)
    assert [one.memory for one in made.ranks] == [2, 2, 1, 0]


@pytest.mark.parametrize("parent", ["GPU-1", "0000:02:00.0"])
def test_mig_instances_are_where_their_parent_is(parent: str) -> None:
    """With its links; the parent itself is not used."""
    instances = [Gpu(2 + n, f"MIG{n}", uuid=f"MIG-{n}", parent=parent) for n in range(2)]
    topology = replace(
        intel((0, 1)),
        gpus=(*intel((0, 1)).gpus, *instances),
        nics=(Nic("ib0"), Nic("ib1")),
        links=(("GPU1", "ib0", "SYS"), ("GPU1", "ib1", "PIX")),
    )
    made = plan(topology, 3)
    assert [one.gpu_uuid for one in made.ranks] == ["GPU-0", "MIG-0", "MIG-1"]
    assert lists(made) == ["0-7,16-23", "8-11,24-27", "12-15,28-31"]
    chosen = plan(topology, 1, visible_gpus=visible_devices(topology, "MIG-1")).ranks[0]
    assert (chosen.gpu, chosen.memory, chosen.nic) == ("MIG1", 1, "ib1")
    alone = replace(topology, gpus=(instances[0], replace(instances[1], domain=1)))
    assert [one.memory for one in plan(alone, 2).ranks] == [1, 1]


LINKS = {"GPU0": "PXB PIX", "GPU1": "SYS PHB", "GPU2": "NODE NODE"}


@pytest.mark.parametrize(
    ("topology", "ranks", "nics"),
    [
        (  # the nearest on PCI, then of the same domain; ties in turn
            node(
                [(0, threads(0, 8)), (1, threads(8, 8))],
                (0, 0, 0, 1),
                nics=(0, 0, 1),
                links=[
                    (gpu, f"mlx5_{n}", level)
                    for gpu, levels in LINKS.items()
                    for n, level in enumerate(levels.split())
                ],
            ),
            4,
            "mlx5_1 mlx5_1 mlx5_0 mlx5_2",
        ),
        (node([(0, threads(0, 12))], (0,) * 4, nics=(0, 0)), 4, "mlx5_0 mlx5_1 mlx5_0 mlx5_1"),
        (  # a rank next to both cards leaves the only one to others
            node(
                [(0, threads(0, 8))],
                (0, 0),
                nics=(0, 0),
                links=[
                    ("GPU0", "mlx5_0", "NODE"),
                    ("GPU0", "mlx5_1", "NODE"),
                    ("GPU1", "mlx5_0", "PIX"),
                    ("GPU1", "mlx5_1", "NODE"),
                ],
            ),
            2,
            "mlx5_1 mlx5_0",
        ),
        (  # without a GPU the rank's own domain decides
            replace(quad(()), nics=(Nic("ib0", cpus=tuple(range(8, 16))), Nic("ib1", domain=3))),
            4,
            "ib0 ib0 ib1 ib1",
        ),
    ],
)
def test_network_cards(topology: Topology, ranks: int, nics: str) -> None:
    """The nearest, and among equals each as often."""
    assert " ".join(one.nic or "-" for one in plan(topology, ranks).ranks) == nics


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"policy": "closest"}, "policy"),
        ({"ranks_per_gpu": 0}, "ranks per GPU"),
        ({"loader_workers": -1}, "loader workers"),
        ({"allowed_cpus": [99]}, "allowed CPUs"),
        ({"allowed_cpus": []}, "allowed CPUs"),
    ],
)
def test_what_no_plan_can_be_made_of(options: dict[str, Any], field: str) -> None:
    """Wrong values are refused by name."""
    with pytest.raises(InputError) as caught:
        plan(intel((0, 1)), 2, **options)
    assert caught.value.field == field


@pytest.mark.parametrize(("fast", "slow", "ranks"), [(6, 7, 2), (6, 8, 2), (8, 16, 4), (8, 4, 3)])
@pytest.mark.parametrize("gpus", [0, 1])
def test_equal_shares_of_fast_and_slow_cores(fast: int, slow: int, ranks: int, gpus: int) -> None:
    """Of a CPU with two kinds of cores no rank gets only the slow ones, with and without GPUs."""
    flat = node([(0, threads(0, fast + slow))], [0] * gpus * ranks)
    kinds = ["core"] * fast + ["atom"] * slow
    cores = tuple(replace(core, kind=kind) for core, kind in zip(flat.cores, kinds, strict=True))
    made = plan(replace(flat, cores=cores), ranks)
    counts = [Counter(kinds[core] for core in rank.cores) for rank in made.ranks]
    for kind, count in (("core", fast), ("atom", slow)):
        assert {rank[kind] for rank in counts} <= {count // ranks, -(-count // ranks)}
