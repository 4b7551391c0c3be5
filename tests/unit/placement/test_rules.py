"""The planner's rules, one by one, with plans written by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.placement.cpulist import cpu_numbers
from hpml_orchestrator.placement.model import Plan
from hpml_orchestrator.placement.planner import POLICIES, plan
from hpml_orchestrator.topology.model import Domain, Gpu, Nic, Topology
from tests.unit.placement.machines import dgx_a100, intel, milan, node, threads, two_by_twelve


def lists(made: Plan) -> list[str]:
    return [one.cpu_list() for one in made.ranks]


def quad(gpus: tuple[int | None, ...]) -> Topology:
    """Four domains of 8 cores on two sockets, near within a socket."""

    def distance(one: int, other: int) -> int:
        return 10 if one == other else 12 if one // 2 == other // 2 else 32

    return node([(number // 2, threads(8 * number, 8)) for number in range(4)], gpus, distance)


def test_three_gpus_on_one_domain_and_one_on_the_other() -> None:
    """The split follows the machine: three ranks share the first domain, one has the second."""
    made = plan(intel((0, 0, 0, 1)), 4)
    assert [one.cores for one in made.ranks] == [
        (0, 1, 2),
        (3, 4, 5),
        (6, 7),
        (8, 9, 10, 11, 12, 13, 14, 15),
    ]
    assert [one.threads for one in made.ranks] == [3, 3, 2, 8]


def test_interleaved_gpus() -> None:
    """GPUs that alternate between the sockets keep their order, and the CPUs follow them."""
    made = plan(intel((1, 0, 1, 0)), 4)
    assert lists(made) == ["8-11,24-27", "0-3,16-19", "12-15,28-31", "4-7,20-23"]
    assert [one.gpu_index for one in made.ranks] == [0, 1, 2, 3]


def test_visible_gpus_in_another_order() -> None:
    """Rank r has the visible device r, whichever GPU of the node that is."""
    made = plan(intel((0, 0, 1, 1)), 2, visible_gpus=["3", "0"])
    assert [one.gpu for one in made.ranks] == ["0000:04:00.0", "0000:01:00.0"]
    assert [one.numa for one in made.ranks] == [(1,), (0,)]


@pytest.mark.parametrize(
    "entry", [2, "2", "GPU-2", "gpu-2", "GPU2", "0000:03:00.0", "00000000:03:00.0", "03:00.0"]
)
def test_visible_gpus_by_any_name(entry: object) -> None:
    """A visible GPU is an index, UUID, name or PCI address, with as many digits as it likes."""
    made = plan(intel((0, 0, 1, 1)), 1, visible_gpus=[entry])
    assert made.ranks[0].gpu == "0000:03:00.0"
    assert made.warnings == ()


def test_a_uuid_may_be_cut_short_when_only_one_begins_so() -> None:
    """CUDA takes the beginning of a UUID; one that fits two GPUs means none."""
    topology = intel((0, 1))
    gpus = (
        replace(topology.gpus[0], uuid="GPU-aa11-0001"),
        replace(topology.gpus[1], uuid="GPU-aa22-0002"),
    )
    topology = replace(topology, gpus=gpus)
    assert plan(topology, 1, visible_gpus=["GPU-aa2"]).ranks[0].gpu_index == 1
    made = plan(topology, 1, visible_gpus=["GPU-aa"])
    assert made.ranks[0].gpu_index is None
    assert "visible GPU 'GPU-aa' is not in the topology" in made.warnings


def test_a_visible_gpu_that_is_not_there_keeps_its_place() -> None:
    """The ranks behind it keep their devices, and its own rank still gets cores."""
    made = plan(intel((0, 1)), 2, visible_gpus=["7", "1"])
    assert [one.gpu_index for one in made.ranks] == [None, 1]
    assert lists(made) == ["0-7,16-23", "8-15,24-31"]
    assert made.warnings == ("visible GPU '7' is not in the topology",)


def test_no_visible_gpu_is_a_cpu_only_job() -> None:
    """An empty CUDA_VISIBLE_DEVICES hides all: the cores are shared out evenly."""
    made = plan(intel((0, 0, 0, 1)), 2, visible_gpus=[])
    assert [one.gpu for one in made.ranks] == [None, None]
    assert lists(made) == ["0-7,16-23", "8-15,24-31"]
    assert made.warnings == ()


def test_fewer_ranks_than_gpus() -> None:
    """Domains whose GPUs have no rank lend nothing: a rank has cores next to its own GPU."""
    made = plan(quad((3, 2, 1, 0)), 2)
    assert lists(made) == ["24-31", "16-23"]
    told = "no rank has a GPU next to NUMA domain 0, 1: 16 cores there stay idle, which the policy"
    assert made.warnings == (f"{told} spread would use",)


def test_fewer_ranks_than_gpus_beside_a_domain_without_any() -> None:
    """Domain 1 has no GPU and lends, to the nearest; domain 3 has one without a rank, and keeps."""
    made = plan(quad((0, 2, 3)), 2)
    assert lists(made) == ["0-15", "16-23"]
    assert "NUMA domain 3: 8 cores there" in made.warnings[0]


def test_half_of_the_ranks_of_a_dgx_stay_on_their_socket() -> None:
    """Domains 4 and 6 have no GPU and are next to 5 and 7, whose GPUs have no rank: they lend none.

    GPUs 0 and 1 are at domain 3, 2 and 3 at domain 1; 16 cores in each, and second threads 128 on.
    """
    made = plan(dgx_a100(), 4)
    assert [(one.numa, len(one.cores)) for one in made.ranks] == [
        ((2, 3), 16),
        ((2, 3), 16),
        ((0, 1), 16),
        ((0, 1), 16),
    ]
    told = "no rank has a GPU next to NUMA domain 4, 5, 6, 7: 64 cores there stay idle, which the"
    assert made.warnings == (f"{told} policy spread would use",)


def test_a_domain_next_to_a_ranks_gpu_and_to_an_idle_one_is_the_ranks() -> None:
    """GPUs that are told by the CPUs of a whole socket: its other domain is next to the rank."""
    halves = tuple(range(16)), tuple(range(16, 32))
    gpus = [Gpu(number, f"GPU{number}", cpus=halves[number // 2]) for number in range(4)]
    made = plan(replace(quad((0, 1, 2, 3)), gpus=tuple(gpus)), 1)
    assert lists(made) == ["0-15"]
    assert "NUMA domain 2, 3: 16 cores there" in made.warnings[0]


def test_gpus_that_the_job_does_not_see_keep_nothing() -> None:
    """What the job was given is its own, whoever has the GPUs next to it."""
    made = plan(quad((3, 2, 1, 0)), 2, visible_gpus=[0, 1])
    # Both idle domains are equally far from both ranks, and a whole one is better than two halves.
    assert lists(made) == ["8-15,24-31", "0-7,16-23"]
    assert made.warnings == ()


def test_a_domain_without_a_rank_gives_a_core_where_one_is_missing() -> None:
    """Two ranks next to one allowed core: the second has one of the domain whose GPU is idle."""
    made = plan(quad((0, 0, 1)), 2, allowed_cpus=[0, 8, 9])
    assert [len(one.cores) for one in made.ranks] == [2, 1]
    assert sorted(cpu for one in made.ranks for cpu in one.cpus) == [0, 8, 9]
    assert "has too few allowed cores for ranks 0-1" in made.warnings[0]


def test_idle_domains_lend_to_their_own_socket() -> None:
    """Fewer GPUs than domains: the nearest by distance gets the cores, in balance or not."""
    made = plan(quad((0, 3)), 2)
    assert lists(made) == ["0-15", "16-31"]
    assert [one.distance for one in made.ranks] == [12, 12]
    assert [one.memory for one in made.ranks] == [0, 3]
    made = plan(quad((0, 0, 1)), 3)
    assert sorted(len(one.cores) for one in made.ranks) == [10, 11, 11]
    assert [one.cores[:4] for one in made.ranks] == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11)]


def test_lending_goes_by_distance_before_need() -> None:
    """Three ranks on the other socket get nothing of a domain that is nearer to a single one."""
    made = plan(quad((0, 2, 3, 3)), 4)
    assert lists(made) == ["0-15", "16-23", "24-27", "28-31"]


def test_the_nearest_lent_cores_go_out_first() -> None:
    """A rank takes of the near domain before the far ones, whatever their numbers."""
    made = plan(quad((3, 3)), 2)
    assert lists(made) == ["0-3,16-27", "4-15,28-31"]


def test_without_distances_the_own_socket_is_nearer() -> None:
    """A source that tells no distances still tells sockets."""
    flat = node(
        [(socket, threads(8 * number, 8)) for number, socket in enumerate((0, 1, 1, 0))], (0, 1)
    )
    assert lists(plan(flat, 2)) == ["0-7,24-31", "8-23"]


def test_a_partial_allocation() -> None:
    """Only allowed CPUs are used; siblings that are not allowed are left out of their core."""
    made = plan(intel((0, 0, 1, 1)), 4, allowed_cpus=cpu_numbers("0-3,16-19,8-9,24,25"))
    assert lists(made) == ["0-1,16-17", "2-3,18-19", "8,24", "9,25"]
    assert not made.whole
    made = plan(intel((0, 1)), 2, allowed_cpus=[0, 1, 9, 25])
    assert lists(made) == ["0-1", "9,25"]


def test_a_gpu_whose_domain_has_no_allowed_cpu() -> None:
    """Its rank runs on the nearest allowed cores, and the plan says so."""
    no_cpu = "GPU 0000:0{}:00.0 is next to NUMA domain {}, where no CPU is allowed"
    made = plan(quad((0, 1, 3)), 3, allowed_cpus=range(16, 32))
    assert lists(made) == ["16-19", "20-23", "24-31"]
    assert [one.distance for one in made.ranks] == [32, 32, 10]
    (told,) = made.warnings
    assert told == (
        "GPU 0000:01:00.0, 0000:02:00.0 are next to NUMA domain 0, 1, where no CPU is allowed: "
        "ranks 0-1 run on domain 2"
    )
    near = plan(quad((0, 1)), 2, allowed_cpus=range(8, 16))
    assert lists(near) == ["8-11", "12-15"]
    assert [one.distance for one in near.ranks] == [12, 10]
    assert near.warnings == (f"{no_cpu.format(1, 0)}: rank 0 runs on domain 1",)


def test_gpus_of_unknown_domain_are_spread_not_put_on_domain_0() -> None:
    """With a warning, they go where known GPUs leave most cores."""
    made = plan(quad((0, None, 1, None)), 4)
    assert [one.numa for one in made.ranks] == [(0,), (2,), (1,), (3,)]
    assert [one.distance for one in made.ranks] == [10, None, 10, None]
    (told,) = made.warnings
    assert told == (
        "no NUMA domain is known for GPU 0000:02:00.0, 0000:04:00.0: ranks 1,3 spread evenly, "
        "perhaps far from the GPU"
    )


def test_all_gpus_of_unknown_domain() -> None:
    """All cores in equal parts, none twice, and a warning."""
    made = plan(quad((None, None, None)), 3)
    assert lists(made) == ["0-10", "11-21", "22-31"]
    assert [one.gpu_index for one in made.ranks] == [0, 1, 2]
    assert len(made.warnings) == 1
    assert plan(quad((None,)), 1).ranks[0].numa == (0, 1, 2, 3)


def test_one_domain_leaves_nothing_unknown() -> None:
    """Where a node has one domain with CPUs, every GPU is next to it, told or not."""
    made = plan(node([(0, threads(0, 8))], (None, None)), 2)
    assert lists(made) == ["0-3", "4-7"]
    assert made.warnings == ()


def test_local_cpus_stand_in_for_an_unknown_domain() -> None:
    """A GPU that tells only its CPUs is next to their domain; all CPUs of the node tell nothing."""
    topology = quad((None, None))
    gpus = (
        replace(topology.gpus[0], cpus=tuple(range(24, 32))),
        replace(topology.gpus[1], cpus=tuple(range(16))),
    )
    made = plan(replace(topology, gpus=gpus), 2)
    assert made.ranks[0].memory == 3
    assert made.ranks[1].memory == 0
    assert [one.distance for one in made.ranks] == [12, 10]
    assert made.warnings == ()
    everywhere = replace(topology, gpus=(replace(topology.gpus[0], cpus=tuple(range(32))),))
    assert "no NUMA domain is known" in plan(everywhere, 1).warnings[0]


def test_no_rank_runs_on_memory_alone() -> None:
    """A GPU that a source puts next to its own memory is next to the nearest domain with CPUs."""
    topology = intel((0, 2))
    own = Domain(2, (), 2**36, ((0, 40), (1, 20), (2, 10)))
    made = plan(replace(topology, domains=(*topology.domains, own)), 2)
    assert lists(made) == ["0-7,16-23", "8-15,24-31"]
    assert [one.memory for one in made.ranks] == [0, 1]


def test_memory_is_preferred_where_there_is_some() -> None:
    """A domain with CPUs and no memory uses the nearest that has some."""
    topology = milan()
    bare = replace(topology.domains[3], memory_bytes=0, distances=((0, 16), (1, 14), (2, 12)))
    made = plan(replace(topology, domains=(*topology.domains[:3], bare)), 4)
    assert [one.memory for one in made.ranks] == [2, 2, 1, 0]
    untold = tuple(replace(one, memory_bytes=0) for one in topology.domains)
    made = plan(replace(topology, domains=untold), 4)
    assert [one.memory for one in made.ranks] == [3, 2, 1, 0]


def test_more_ranks_than_cores_share() -> None:
    """Every rank gets a core, each core equally many ranks, and a warning says so."""
    made = plan(intel((0, 1)), 3, allowed_cpus=[0, 8], ranks_per_gpu=2)
    assert lists(made) == ["0", "8", "0"]
    assert [one.threads for one in made.ranks] == [1, 1, 1]
    assert "3 ranks on 2 cores: some share a core with another" in made.warnings
    cpu_only = plan(intel(()), 4, allowed_cpus=[0, 8])
    assert lists(cpu_only) == ["0", "0", "8", "8"]


def test_no_core_is_idle_while_ranks_share() -> None:
    """Beside two cores for four ranks there is a far third one: it is used before a third share."""
    made = plan(intel((0,)), 4, allowed_cpus=[0, 1, 8], ranks_per_gpu=4)
    assert lists(made) == ["0", "1", "0", "8"]


def test_cpu_only_ranks_leave_a_socket_that_is_full() -> None:
    """With one core allowed on the first socket, three of four ranks go to the second."""
    made = plan(two_by_twelve(), 4, policy="socket", allowed_cpus=[0, *range(12, 24)])
    assert lists(made) == ["0", "12-15", "16-19", "20-23"]


def test_a_domain_with_too_few_cores_borrows() -> None:
    """No core belongs to two ranks while the node has one for each."""
    made = plan(intel((0, 0, 0, 1)), 4, allowed_cpus=[0, 8, 9, 10, 11])
    held = [core for one in made.ranks for core in one.cores]
    assert len(held) == len(set(held)) == 5
    assert all(one.cores for one in made.ranks)
    assert made.ranks[0].cores == (0,)
    assert made.warnings == (
        "NUMA domain 0 has too few allowed cores for ranks 0-2: ranks 1-2 on domain 1",
    )


def test_a_domain_borrows_of_the_nearest() -> None:
    """Of two domains with cores to spare it is the nearer one that gives, though it has fewer."""
    made = plan(quad((3, 3, 2, 0)), 4, policy="numa", allowed_cpus=[*range(8), 16, 17, 18, 24])
    assert lists(made) == ["24", "18", "16-17", "0-7"]
    assert made.warnings == (
        "NUMA domain 3 has too few allowed cores for ranks 0-1: rank 1 on domain 2",
    )


def test_several_ranks_per_gpu_share_its_cores() -> None:
    """The devices are dealt out round and round, as `local_rank % device_count` does."""
    made = plan(intel((0, 1)), 4, ranks_per_gpu=2)
    assert [one.gpu_index for one in made.ranks] == [0, 1, 0, 1]
    assert lists(made) == ["0-3,16-19", "8-11,24-27", "4-7,20-23", "12-15,28-31"]
    assert made.warnings == ()
    more = plan(intel((0, 1)), 3)
    assert more.warnings == ("3 ranks for 2 visible GPUs: more than 1 on one GPU",)


def test_one_of_a_thing_is_told_as_one() -> None:
    """One core, and one GPU."""
    made = plan(intel((0,)), 2, allowed_cpus=[0])
    assert "2 ranks for 1 visible GPU: more than 1 on one GPU" in made.warnings
    assert "2 ranks on 1 core: some share a core with another" in made.warnings


def mig(*instances: Gpu) -> Topology:
    """Two GPUs, of which the second is cut into instances."""
    topology = intel((0, 1))
    return replace(topology, gpus=(*topology.gpus, *instances))


@pytest.mark.parametrize("parent", ["GPU-1", "0000:02:00.0"])
def test_mig_instances_are_where_their_parent_is(parent: str) -> None:
    """Instances that tell no domain share their parent's, and the parent itself is not used."""
    topology = mig(
        Gpu(2, "MIG0", uuid="MIG-a", parent=parent), Gpu(3, "MIG1", uuid="MIG-b", parent=parent)
    )
    made = plan(topology, 3)
    assert [one.gpu_uuid for one in made.ranks] == ["GPU-0", "MIG-a", "MIG-b"]
    assert lists(made) == ["0-7,16-23", "8-11,24-27", "12-15,28-31"]
    assert made.warnings == ()
    chosen = plan(topology, 1, visible_gpus=["MIG-b"])
    assert chosen.ranks[0].gpu == "MIG1"
    assert chosen.ranks[0].memory == 1


def test_mig_instances_of_a_parent_that_is_not_told() -> None:
    """One instance that tells its domain speaks for its siblings."""
    topology = replace(
        intel(()),
        gpus=(
            Gpu(0, "MIG0", uuid="MIG-a", parent="GPU-x"),
            Gpu(1, "MIG1", uuid="MIG-b", parent="GPU-x", domain=1),
        ),
    )
    assert [one.memory for one in plan(topology, 2).ranks] == [1, 1]


def test_loader_workers_take_cores_from_the_threads() -> None:
    """Threads are the cores less the workers, at least one, and too few cores are told."""
    made = plan(intel((0, 0, 1, 1)), 4, loader_workers=3)
    assert [one.threads for one in made.ranks] == [1, 1, 1, 1]
    assert [one.loader_workers for one in made.ranks] == [3, 3, 3, 3]
    assert made.warnings == ()
    made = plan(intel((0, 0, 1, 1)), 4, loader_workers=4)
    assert [one.threads for one in made.ranks] == [1, 1, 1, 1]
    assert made.warnings == ("ranks 0-3: fewer cores than 1 and 4 loader workers need",)


def test_without_hyper_threads() -> None:
    """With smt off a core gives its first allowed CPU alone; the threads stay the same."""
    made = plan(intel((0, 1)), 2, smt=False)
    assert lists(made) == ["0-7", "8-15"]
    assert [one.threads for one in made.ranks] == [8, 8]


def test_policy_socket_stays_on_the_socket() -> None:
    """Own domain first, then the rest of the socket; other sockets' cores stay idle."""
    made = plan(quad((0, 0)), 2, policy="socket")
    assert lists(made) == ["0-3,8-11", "4-7,12-15"]
    made = plan(quad((0, 0, 1)), 3, policy="socket")
    assert [len(one.cores) for one in made.ranks] == [5, 5, 6]
    assert made.ranks[2].numa == (1,)


def test_policy_spread_goes_by_order_alone() -> None:
    """Equal parts of all cores, GPU or not."""
    made = plan(quad((3, 3)), 2, policy="spread")
    assert lists(made) == ["0-15", "16-31"]
    assert [one.gpu_index for one in made.ranks] == [0, 1]
    assert [one.distance for one in made.ranks] == [32, 12]


def test_policy_none_binds_nothing() -> None:
    """Every rank may run anywhere, and threads divide the cores all the same."""
    made = plan(intel((0, 1)), 2, policy="none")
    assert lists(made) == ["0-31", "0-31"]
    assert [one.threads for one in made.ranks] == [8, 8]
    assert [one.nic for one in made.ranks] == [None, None]
    assert made.policy == "none"


def test_nics_by_link_then_domain() -> None:
    """The nearest on PCI; where no link is told, one of the same domain; ties in turn."""
    links = (
        ("GPU0", "mlx5_0", "PXB"),
        ("GPU0", "mlx5_1", "PIX"),
        ("GPU1", "mlx5_0", "SYS"),
        ("GPU1", "mlx5_1", "PHB"),
        ("GPU2", "mlx5_0", "NODE"),
        ("GPU2", "mlx5_1", "NODE"),
    )
    topology = node(
        [(0, threads(0, 8)), (1, threads(8, 8))], (0, 0, 0, 1), nics=(0, 0, 1), links=links
    )
    made = plan(topology, 4)
    assert [one.nic for one in made.ranks] == ["mlx5_1", "mlx5_1", "mlx5_0", "mlx5_2"]


def test_equally_near_nics_are_used_equally_often() -> None:
    """Six ranks next to two cards: three each; with one card all share it."""
    topology = node([(0, threads(0, 12))], (0,) * 6, nics=(0, 0))
    names = [one.nic for one in plan(topology, 6).ranks]
    assert names == ["mlx5_0", "mlx5_1"] * 3
    topology = node([(0, threads(0, 12))], (0,) * 6, nics=(0,))
    assert {one.nic for one in plan(topology, 6).ranks} == {"mlx5_0"}


def test_ranks_with_a_choice_of_nics_leave_the_only_one_to_others() -> None:
    """A rank next to both cards takes the one that nobody else needs."""
    links = (
        ("GPU0", "mlx5_0", "NODE"),
        ("GPU0", "mlx5_1", "NODE"),
        ("GPU1", "mlx5_0", "PIX"),
        ("GPU1", "mlx5_1", "NODE"),
    )
    topology = node([(0, threads(0, 8))], (0, 0), nics=(0, 0), links=links)
    assert [one.nic for one in plan(topology, 2).ranks] == ["mlx5_1", "mlx5_0"]


def test_nics_of_cpu_only_ranks_and_by_distance() -> None:
    """Without a GPU the rank's own domain decides; the next domain is nearer than the far one."""
    base = quad(())
    topology = replace(base, nics=(Nic("ib0", domain=1), Nic("ib1", domain=3)))
    assert [one.nic for one in plan(topology, 4).ranks] == ["ib0", "ib0", "ib1", "ib1"]
    by_cpus = replace(base, nics=(Nic("ib0", cpus=tuple(range(8, 16))), Nic("ib1", domain=3)))
    assert [one.nic for one in plan(by_cpus, 4).ranks] == ["ib0", "ib0", "ib1", "ib1"]


def test_a_mig_instance_has_its_parents_links() -> None:
    """Sources tell links of whole GPUs only."""
    topology = replace(
        mig(Gpu(2, "MIG0", uuid="MIG-a", parent="GPU-1")),
        nics=(Nic("ib0"), Nic("ib1")),
        links=(("GPU1", "ib0", "SYS"), ("GPU1", "ib1", "PIX")),
    )
    assert plan(topology, 1, visible_gpus=["MIG-a"]).ranks[0].nic == "ib1"


def test_a_topology_without_cpus_binds_nothing() -> None:
    """A source that tells no CPUs gives a plan without any, and says so."""
    made = plan(Topology("by hand", (), (), (Gpu(0, "GPU0"),)), 2)
    assert lists(made) == ["", ""]
    assert [one.threads for one in made.ranks] == [1, 1]
    assert any("tells of no CPUs" in one for one in made.warnings)


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
def test_what_no_plan_can_be_made_of(options: dict[str, object], field: str) -> None:
    """Wrong values are refused by name."""
    with pytest.raises(InputError) as caught:
        plan(intel((0, 1)), 2, **options)  # type: ignore[arg-type]
    assert caught.value.field == field
    with pytest.raises(InputError):
        plan(intel((0, 1)), 0)


def test_every_policy_is_described_and_plans() -> None:
    """The table of policies is what the planner takes."""
    assert list(POLICIES) == ["gpu-local", "numa", "socket", "spread", "none"]
    for policy in POLICIES:
        assert len(plan(dgx_a100(), 8, policy=policy).ranks) == 8
