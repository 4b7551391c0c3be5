"""The judgement of a node's ranks, rule by rule, on the machines of the binding table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from hpml_orchestrator.placement.cpulist import cpu_numbers
from hpml_orchestrator.placement.model import Plan
from hpml_orchestrator.placement.planner import plan
from hpml_orchestrator.placement.proof import (
    NodeProof,
    Process,
    Seen,
    proof_json,
    proof_of_json,
)
from hpml_orchestrator.placement.verify import Circumstances, judge
from hpml_orchestrator.topology.model import Gpu, Topology
from tests.unit.placement.machines import dgx_a100, intel, mi250x, milan, node, two_by_twelve


class Place:
    """A planned node, and ranks that are seen exactly where the plan has them."""

    def __init__(self, topology: Topology, ranks: int, **options: Any) -> None:
        gpus = [one for one in topology.gpus if not one.parent]
        shown = ",".join(str(one.index) for one in gpus) if gpus else None
        self.visible: str | None = options.pop("visible", shown)
        self.topology = topology
        allowed = options.pop("allowed", sorted(topology.cpus))
        chosen = None if self.visible is None else self.visible.split(",")
        self.plan: Plan = plan(
            topology, ranks, allowed_cpus=allowed, visible_gpus=chosen, **options
        )
        self.around = Circumstances(
            node="node1",
            verify="warn",
            allowed=tuple(allowed),
            visible=self.visible,
            ranks_per_gpu=options.get("ranks_per_gpu", 1),
        )
        self.seen = [
            Seen(
                local_rank=one.local_rank,
                rank=8 + one.local_rank,
                pid=100 + one.local_rank,
                inherited=tuple(allowed),
                cpus=one.cpus,
                child_cpus=one.cpus,
                main=Process(100 + one.local_rank, "python", one.cpus, one.cpus),
                visible=self.visible,
                threads=one.threads,
                live=True,
            )
            for one in self.plan.ranks
        ]

    def change(self, rank: int, **fields: Any) -> None:
        """Let a rank be seen otherwise."""
        self.seen[rank] = replace(self.seen[rank], **fields)

    def runs(self, rank: int, cpus: str, **fields: Any) -> None:
        """Let a rank's one process run on other CPUs."""
        held = cpu_numbers(cpus)
        self.change(rank, main=Process(100 + rank, "python", held, held), **fields)

    def proof(self) -> NodeProof:
        return judge(self.topology, self.plan, self.seen, self.around, looks=1)

    def wrong(self) -> dict[int, tuple[str, ...]]:
        """What is wrong, by local rank."""
        return {one.local_rank: one.wrong for one in self.proof().ranks if one.wrong}


MACHINES: dict[str, tuple[Callable[[], Topology], int]] = {
    "intel": (lambda: intel((0, 0, 1, 1)), 4),
    "milan": (milan, 4),
    "dgx": (dgx_a100, 8),
    "mi250x": (mi250x, 8),
    "cpus": (two_by_twelve, 2),
}


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("policy", ["gpu-local", "socket", "numa", "spread", "none"])
def test_ranks_on_their_plan_are_right(name: str, policy: str) -> None:
    """Whatever the policy, also with cores that an idle domain lends: nothing is wrong."""
    make, ranks = MACHINES[name]
    place = Place(make(), ranks, policy=policy)
    proof = place.proof()
    assert (place.wrong(), proof.right, proof.expected) == ({}, True, ranks)
    assert [one.rank for one in proof.ranks] == [8 + rank for rank in range(ranks)]
    assert [one.gpu for one in proof.ranks] == [one.gpu for one in place.plan.ranks]
    assert [one.distance for one in proof.ranks] == [one.distance for one in place.plan.ranks]
    assert [one.cores for one in proof.ranks] == [len(one.cores) for one in place.plan.ranks]


@pytest.mark.parametrize("verify", ["warn", "strict"])
def test_no_cpu_near_the_gpu_is_wrong_where_proof_is_wanted(verify: str) -> None:
    """Slurm gave the GPU of one domain and the CPUs of another: told by a warning, or wrong."""
    place = Place(milan(), 1, visible="0", allowed=list(range(8)))
    place.around = replace(place.around, verify=verify)
    assert any("where no CPU is allowed" in one for one in place.proof().warnings)
    told = (
        "runs on CPUs 0-7 (NUMA 0), its GPU 0000:01:00.0 is next to NUMA 3, where the job has no "
        "CPU: ask for whole nodes (resources.exclusive)"
    )
    assert place.wrong() == ({0: (told,)} if verify == "strict" else {})


def test_a_job_without_gpus_has_none() -> None:
    """Whatever the ranks' own environment shows, the node's GPUs are nothing to it."""
    place = Place(milan(), 2, visible="")
    place.change(0, visible=None)
    assert [one.gpu for one in place.proof().ranks] == [None, None]
    assert place.wrong() == {}


def test_a_proof_survives_as_plain_data() -> None:
    """What is written down is read back alike."""
    place = Place(milan(), 4)
    place.runs(0, "0-15,64-79")
    proof = place.proof()
    assert proof_of_json(proof_json(proof)) == proof


@pytest.mark.parametrize("distance", [20, None])
def test_a_rank_on_another_domain_is_told_with_its_gpu(distance: int | None) -> None:
    """The sentence says where it runs, which GPU it has, and where that is; distances or not."""
    machine = milan()
    if distance is None:
        domains = tuple(replace(one, distances=()) for one in machine.domains)
        machine = replace(machine, domains=domains)
    place = Place(machine, 4)
    place.runs(0, "0-15,64-79")
    (sentence, shared) = place.wrong()[0]
    assert sentence == (
        "runs on CPUs 0-15,64-79 (NUMA 0), its GPU 0000:01:00.0 is next to NUMA 3, "
        "its own CPUs are 48-63,112-127"
    )
    assert shared == "shares physical cores with rank 11"
    assert set(place.wrong()) == {0}, "rank 3, whose cores these are, is where it should be"
    proof = place.proof().ranks[0]
    assert (proof.distance, proof.numa, proof.cpus) == (distance, (0,), "0-15,64-79")


def test_a_rank_on_other_cores_of_its_domain() -> None:
    """Near enough, and not its own: told without the GPU."""
    place = Place(intel((0, 0, 1, 1)), 4)
    place.runs(0, "4-7,20-23")
    assert place.wrong()[0] == (
        "runs on CPUs 4-7,20-23 (NUMA 0), not on its own 0-3,16-19",
        "shares physical cores with rank 9",
    )


def test_the_other_hardware_thread_is_the_same_core() -> None:
    """Two ranks on two hardware threads of a core share it."""
    place = Place(intel((0, 0, 1, 1)), 4, smt=False)
    assert place.plan.ranks[1].cpu_list() == "4-7"
    place.runs(1, "16-19")
    assert "shares physical cores with rank 8" in place.wrong()[1]


@pytest.mark.parametrize("live", [True, False])
def test_a_rank_that_is_not_bound(live: bool) -> None:
    """It may run everywhere: known of the live process, or of its own record once it has ended."""
    place = Place(dgx_a100(), 8)
    every = place.around.allowed
    if live:
        place.runs(2, "0-255")
    else:
        place.change(2, main=None, live=False, cpus=every, child_cpus=every)
    told = place.wrong()[2]
    assert told[0].startswith("runs on CPUs 0-255 (NUMA 0-7), its GPU 0000:03:00.0 is next to")


def test_bound_twice() -> None:
    """Started on a part of the CPUs that is not its own, something bound it before hpml did."""
    place = Place(intel((0, 0, 1, 1)), 4)
    place.change(1, inherited=place.plan.ranks[1].cpus)  # a static form: that is right
    place.change(2, inherited=(0, 1, 16, 17))
    assert set(place.wrong()) == {2}
    assert place.wrong()[2][0].startswith(
        "was bound twice: it was started on CPUs 0-1,16-17, neither on all of the job's (0-31) nor "
        "on its own (8-11,24-27)"
    )


def test_a_partial_allocation_is_all_that_the_job_has() -> None:
    """Inherited are the job's CPUs, not the node's."""
    place = Place(intel((0, 0, 1, 1)), 4, allowed=[*range(4), *range(8, 12)])
    assert place.wrong() == {}
    place.change(0, inherited=tuple(range(32)))
    assert "bound twice" in place.wrong()[0][0]


def test_the_fault_that_hpml_bind_met() -> None:
    """Its own words are told, and a forked child that was elsewhere."""
    place = Place(milan(), 4)
    place.change(0, error="sched_setaffinity: Invalid argument")
    place.change(1, child_cpus=(0,))
    assert place.wrong() == {
        0: ("hpml-bind: sched_setaffinity: Invalid argument",),
        1: ("a process that it forked may run on CPUs 0, itself on 32-47,96-111",),
    }


def test_a_rank_narrowed_behind_hpml_bind() -> None:
    """`taskset -c 0 python`: the main process has a part of its CPUs only."""
    place = Place(intel((0, 1)), 2)
    place.runs(0, "0")
    assert place.wrong() == {0: ("runs on CPUs 0 alone, not on its own 0-7,16-23",)}


def test_a_wrapper_with_a_narrowed_program() -> None:
    """The shell has all CPUs and waits; the program, which does the work, has not."""
    place = Place(intel((0, 1)), 2)
    own = place.plan.ranks[0].cpus
    shell = Process(100, "bash", own, own)
    place.change(0, main=Process(555, "python", (0,), (0,), 30.0), others=(shell,))
    assert place.wrong() == {
        0: ("its process 555 (python) runs on CPUs 0 alone, not on its own 0-7,16-23",)
    }
    assert place.proof().ranks[0].cpus == "0"


def test_a_wrapper_that_divides_the_cpus() -> None:
    """A shell that starts a program on each of some cores: none of these is the rank's only one."""
    place = Place(intel((0, 1)), 2)
    own = place.plan.ranks[0].cpus
    main = Process(555, "solver", (0, 16), (0, 16), 30.0)
    shell = Process(100, "bash", own, own)
    place.change(0, main=main, others=(shell, replace(main, pid=556, cpus=(1, 17))))
    assert place.wrong() == {}
    place.change(0, main=main, others=(shell, replace(main, pid=556, cpus=(0, 1, 16, 17))))
    assert set(place.wrong()) == {0}


def test_any_process_outside_is_wrong() -> None:
    """A helper on a neighbour's core takes it from that one."""
    place = Place(intel((0, 1)), 2)
    place.change(0, others=(Process(7, "dataloader", (0, 8), (0,), 0.0),))
    assert place.wrong() == {
        0: (
            "its process 7 (dataloader) runs on CPUs 0,8, outside of its own 0-7,16-23",
            "shares physical cores with rank 9",
        )
    }


def test_loader_workers_with_a_core_each_are_right() -> None:
    """Processes on parts of the rank's CPUs are no fault while these parts suffice."""
    place = Place(intel((0, 1)), 2, loader_workers=4)
    workers = tuple(Process(200 + n, "worker", (n, n + 16), (n,), 99.0) for n in range(4))
    place.change(0, others=workers)
    assert place.wrong() == {}


def test_loader_workers_that_share_a_core() -> None:
    """Four at work on one core wait for each other; idle ones do not count."""
    place = Place(intel((0, 1)), 2, loader_workers=4)
    busy = tuple(Process(200 + n, "worker", (3, 19), (3, 19), 99.0) for n in range(4))
    place.change(0, others=busy)
    assert place.wrong() == {
        0: ("4 of its processes, such as its process 200 (worker), share CPUs 3,19",)
    }
    idle = tuple(replace(one, load=0.0) for one in busy)
    place.change(0, others=(busy[0], *idle[1:]))
    assert place.wrong() == {}
    place.change(0, others=tuple(replace(one, load=0.2) for one in busy))
    assert place.wrong() == {}, "the core is not full"


def test_openmp_that_binds_its_own_threads() -> None:
    """Right for OpenMP: threads on single cores. Told, since what it forks shares one."""
    place = Place(intel((0, 1)), 2)
    own = place.plan.ranks[0].cpus
    place.change(0, main=Process(100, "python", own, (0, 16), 5.0, "OMP_PROC_BIND=close"))
    assert (place.wrong(), place.proof().warnings) == ({}, ())
    place.change(0, main=Process(100, "python", (0, 16), (0, 16), 5.0, "OMP_PROC_BIND=close"))
    assert place.wrong() == {}
    (warning,) = place.proof().warnings
    assert warning == (
        "rank 8: OMP_PROC_BIND=close: OpenMP holds its threads on CPUs 0,16 of its own 0-7,16-23, "
        "and what it forks on 0,16"
    )


def test_openmp_that_holds_the_loader_workers_on_one_core() -> None:
    """pytorch#91989: the main thread is on one core, and all that it forks."""
    place = Place(intel((0, 1)), 2, loader_workers=4)
    own = place.plan.ranks[0].cpus
    place.change(0, main=Process(100, "python", own, (0, 16), 5.0, "OMP_PROC_BIND=close"))
    assert set(place.wrong()) == {0}
    (sentence,) = place.wrong()[0]
    assert sentence == (
        "OMP_PROC_BIND=close: OpenMP holds its main thread on CPUs 0,16, and with it the 4 loader "
        "workers that it forks"
    )


def test_too_few_cores_for_the_loader_workers() -> None:
    """A core for the rank, and one for each process that loads its data."""
    place = Place(intel((0, 1)), 2, loader_workers=8)
    told = ("has 8 cores: itself and 8 loader workers need 9",)
    assert place.wrong() == {0: told, 1: told}
    assert Place(intel((0, 1)), 2, loader_workers=7).wrong() == {}


def test_hidden_peers() -> None:
    """One GPU for each rank alone: its peers' memory is out of reach."""
    place = Place(dgx_a100(), 8)
    for rank in range(8):
        place.change(rank, visible=str(rank))
    told = place.wrong()
    assert set(told) == set(range(8))
    (sentence,) = told[3]
    assert sentence == (
        "sees 1 of the job's 8 GPUs (its list of visible devices is '3'): the others' memory is "
        "out of its reach"
    )


def test_no_gpu_is_seen() -> None:
    """An empty list hides them all."""
    place = Place(dgx_a100(), 8)
    place.change(0, visible="")
    place.change(1, visible="NoDevFiles")
    assert place.wrong()[0] == ("sees no GPU (its list of visible devices is '')",)
    assert place.wrong()[1] == ("sees no GPU (its list of visible devices is 'NoDevFiles')",)
    assert place.proof().ranks[0].gpu is None


def test_the_same_gpu_for_two_ranks() -> None:
    """A list in another order gives a rank another one's GPU; that is found by what it has."""
    place = Place(dgx_a100(), 8)
    place.change(1, visible="1,0,2,3,4,5,6,7")
    told = place.wrong()
    assert set(told) == {0, 1}
    assert told[1][0].startswith("has GPU 0000:01:00.0, its own is 0000:02:00.0")
    assert told[1][-1] == "shares GPU 0000:01:00.0 with rank 8"
    assert told[0] == ("shares GPU 0000:01:00.0 with rank 9",)


def test_the_same_gpus_by_uuid() -> None:
    """An index and a UUID may mean the same device."""
    place = Place(milan(), 4)
    place.change(2, visible="GPU-0,GPU-1,GPU-2,GPU-3")
    assert place.wrong() == {}


def test_gpus_of_somebody_else() -> None:
    """A rank that sees GPUs which the job was not given."""
    place = Place(milan(), 2, visible="2,3")
    assert place.wrong() == {}
    place.change(0, visible=None)
    sentences = place.wrong()[0]
    assert sentences[0] == (
        "sees GPU0, GPU1, not the job's (its list of visible devices is not set)"
    )
    assert sentences[1].startswith("has GPU 0000:01:00.0, its own is 0000:03:00.0")


def test_ranks_that_share_a_gpu_on_purpose() -> None:
    """So many as the job file says, and no more."""
    assert Place(milan(), 8, ranks_per_gpu=2).wrong() == {}
    place = Place(milan(), 8, ranks_per_gpu=1)
    assert place.wrong()[0] == ("shares GPU 0000:01:00.0 with rank 12",)


def test_a_job_without_gpus_on_a_node_with_some() -> None:
    """Nobody gave it any: that eight ranks have four GPUs beside them is no fault of theirs."""
    place = Place(milan(), 8, visible=None)
    assert place.wrong() == {}


def mig() -> Topology:
    """A node with one GPU that is cut into three instances."""
    whole = milan((1,))
    parent = replace(whole.gpus[0], uuid="GPU-aa")
    parts = tuple(
        Gpu(1 + n, f"GPU0 MIG gi{n}/ci0", parent.address, f"MIG-{n}", "GPU-aa", 1) for n in range(3)
    )
    return replace(whole, gpus=(parent, *parts))


def test_mig_instances() -> None:
    """A process sees one instance alone: that is its own, and no peer is hidden."""
    place = Place(mig(), 3, visible="MIG-0,MIG-1,MIG-2")
    for rank in range(3):
        place.change(rank, visible=f"MIG-{rank}")
    assert place.wrong() == {}
    assert [one.uuid for one in place.proof().ranks] == ["MIG-0", "MIG-1", "MIG-2"]
    place.change(2, visible="MIG-0")
    assert place.wrong()[2][-1] == "shares GPU 0000:01:00.0 with rank 8"


def test_hidden_gpus_do_not_count() -> None:
    """Index 0 is the first GPU that the cgroup admits."""
    topology = milan()
    hidden = frozenset({"0000:01:00.0", "0000:02:00.0"})
    place = Place(topology, 2, visible="2,3")
    place.around = replace(place.around, visible="0,1", hidden=hidden)
    for rank in range(2):
        place.change(rank, visible="0,1")
    assert place.wrong() == {}
    assert [one.gpu for one in place.proof().ranks] == ["0000:03:00.0", "0000:04:00.0"]


def test_more_ranks_than_cores_share_them() -> None:
    """What the plan had to do is no fault of the ranks."""
    place = Place(intel((0, 1)), 4, allowed=[0, 8], ranks_per_gpu=2)
    assert place.wrong() == {}


def test_a_rank_that_is_not_in_the_plan() -> None:
    """More ranks were started on the node than it was planned for."""
    place = Place(milan(), 4)
    place.seen.append(replace(place.seen[0], local_rank=4, rank=12, visible="0,1,2,3"))
    assert "is not in the plan, which has 4 ranks for this node" in place.wrong()[4]


def test_nothing_is_wrong_where_nothing_is_bound() -> None:
    """Policy none: where ranks run is written down, and that is all."""
    place = Place(milan(), 4, policy="none")
    place.runs(0, "0", visible="", error="x", inherited=(1,))
    proof = place.proof()
    assert proof.right
    assert proof.ranks[0].cpus == "0"


def test_ranks_that_were_not_seen_are_left_out() -> None:
    """Whether they should have been is known at the end."""
    place = Place(milan(), 4)
    del place.seen[2]
    proof = place.proof()
    assert (proof.right, len(proof.ranks), proof.expected) == (True, 3, 4)


def test_an_unknown_domain_is_not_judged() -> None:
    """A GPU whose place nobody knows: the CPUs must be the plan's, near to what they may."""
    topology = node([(0, [(0,), (1,)]), (1, [(2,), (3,)])], (None, None))
    place = Place(topology, 2)
    assert place.wrong() == {}
    place.runs(0, "2-3")
    assert place.wrong()[0][0] == "runs on CPUs 2-3 (NUMA 1), not on its own 0-1"
