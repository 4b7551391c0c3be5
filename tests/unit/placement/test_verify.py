"""The judgement of a node's ranks, rule by rule, on the machines of the binding table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from hpml_orchestrator.placement.model import visible_devices
from hpml_orchestrator.placement.planner import plan
from hpml_orchestrator.placement.verify import (
    NodeContext,
    NodeProof,
    Process,
    Seen,
    judge,
    proof_json,
    proof_of_json,
)
from hpml_orchestrator.topology.cpulist import parse_list
from hpml_orchestrator.topology.model import Gpu, Topology
from tests.unit.placement.machines import dgx_a100, intel, mi250x, milan, two_by_twelve


class Place:
    """A planned node, and ranks that are seen exactly where the plan has them."""

    def __init__(self, topology: Topology, ranks: int, **options: Any) -> None:
        gpus = [one for one in topology.gpus if not one.parent]
        shown = ",".join(str(one.index) for one in gpus) if gpus else None
        self.visible: str | None = options.pop("visible", shown)
        self.topology = topology
        allowed = options.pop("allowed", sorted(topology.cpus))
        chosen = visible_devices(topology, self.visible)
        self.plan = plan(topology, ranks, allowed_cpus=allowed, visible_gpus=chosen, **options)
        self.context = NodeContext(
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

    def change(self, rank: int, **fields: Any) -> Place:
        """Let a rank be seen otherwise."""
        self.seen[rank] = replace(self.seen[rank], **fields)
        return self

    def runs(self, rank: int, cpus: str, **fields: Any) -> Place:
        """Let a rank's one process run on other CPUs."""
        held = parse_list(cpus)
        return self.change(rank, main=Process(100 + rank, "python", held, held), **fields)

    def around_is(self, **fields: Any) -> Place:
        """Change the circumstances."""
        self.context = replace(self.context, **fields)
        return self

    def proof(self) -> NodeProof:
        return judge(self.topology, self.plan, self.seen, self.context, looks=1)

    def wrong(self) -> dict[int, tuple[str, ...]]:
        """What is wrong, by local rank."""
        return {one.local_rank: one.wrong for one in self.proof().ranks if one.wrong}


def pair(**options: Any) -> Place:
    """Two ranks with 8 cores of two threads each: CPUs 0-7,16-23 and 8-15,24-31."""
    return Place(intel((0, 1)), 2, **options)


def four() -> Place:
    """Four ranks with 4 cores of two threads each."""
    return Place(intel((0, 0, 1, 1)), 4)


def untold() -> Topology:
    machine = milan()
    return replace(machine, domains=tuple(replace(one, distances=()) for one in machine.domains))


def mig() -> Topology:
    """A node with one GPU that is cut into three instances."""
    parent = replace(milan((1,)).gpus[0], uuid="GPU-aa")
    parts = [
        Gpu(1 + n, f"GPU0 MIG gi{n}/ci0", parent.address, f"MIG-{n}", "GPU-aa", 1) for n in range(3)
    ]
    return replace(milan(), gpus=(parent, *parts))


OWN = parse_list("0-7,16-23")  # of rank 0 of a pair
ALL = tuple(range(256))
SHELL = Process(100, "bash", OWN, OWN)
SOLVER = Process(555, "solver", (0, 16), (0, 16), 30.0)
LOADERS = tuple(Process(200 + n, "worker", (n, n + 16), (n,), 99.0) for n in range(4))
BUSY = tuple(Process(200 + n, "worker", (3, 19), (3, 19), 99.0) for n in range(4))
HELD = Process(100, "python", OWN, (0, 16), 5.0, "OMP_PROC_BIND=close")
FAR = "runs on CPUs 0-15,64-79 (NUMA 0), its GPU 0000:01:00.0 is next to NUMA 3, its own CPUs are "
FAR_SOME = (FAR + "48-63,112-127", "shares physical cores with rank 11")
NO_CPU = (
    "runs on CPUs 0-7 (NUMA 0), its GPU 0000:01:00.0 is next to NUMA 3, where the job has no CPU: "
    "request whole nodes (resources.exclusive)"
)
LIST = "(its list of visible devices is {})"
FEW = "has 8 cores: itself and 8 loader workers need 9"


def far() -> Place:
    """A job that has the GPU of one domain and the CPUs of another."""
    return Place(milan(), 1, visible="0", allowed=list(range(8)))


CASES: dict[str, tuple[Place, dict[int, tuple[str, ...]]]] = {
    # where it runs
    "another domain": (Place(milan(), 4).runs(0, "0-15,64-79"), {0: FAR_SOME}),
    "other cores of its domain": (
        four().runs(0, "4-7,20-23"),
        {
            0: (
                "runs on CPUs 4-7,20-23 (NUMA 0), not on its own 0-3,16-19",
                "shares physical cores with rank 9",
            )
        },
    ),
    "no CPU near the GPU": (far(), {}),
    "no CPU near the GPU, strict": (far().around_is(verify="strict"), {0: (NO_CPU,)}),
    "narrowed": (
        pair().runs(0, "0"),
        {0: ("runs on CPUs 0 alone, not on its own 0-7,16-23",)},
    ),
    "a wrapper with a narrowed program": (
        pair().change(0, main=Process(555, "python", (0,), (0,), 30.0), others=(SHELL,)),
        {0: ("its process 555 (python) runs on CPUs 0 alone, not on its own 0-7,16-23",)},
    ),
    "a wrapper that divides the CPUs": (
        pair().change(0, main=SOLVER, others=(SHELL, replace(SOLVER, cpus=(1, 17)))),
        {},
    ),
    "a process outside": (
        pair().change(0, others=(Process(7, "dataloader", (0, 8), (0,), 0.0),)),
        {
            0: (
                "its process 7 (dataloader) runs on CPUs 0,8, outside of the rank's 0-7,16-23",
                "shares physical cores with rank 9",
            )
        },
    ),
    # what hpml-bind found
    "bound twice": (
        four().change(2, inherited=(0, 1, 16, 17)),
        {
            2: (
                (
                    "was bound twice: it was started on CPUs 0-1,16-17, neither on all of the "
                    "job's (0-31) nor on its own (8-11,24-27): its launcher binds, too"
                ),
            )
        },
    ),
    "an error, and a child elsewhere": (
        Place(milan(), 4).change(0, error="Invalid argument").change(1, child_cpus=(0,)),
        {
            0: ("hpml-bind: Invalid argument",),
            1: ("a process that it forked may run on CPUs 0, itself on 32-47,96-111",),
        },
    ),
    # loader workers and OpenMP
    "loader workers with a core each": (pair(loader_workers=4).change(0, others=LOADERS), {}),
    "loader workers that share a core": (
        pair(loader_workers=4).change(0, others=BUSY),
        {0: ("4 of its processes, such as its process 200 (worker), share CPUs 3,19",)},
    ),
    "too few cores for the loader workers": (
        pair(loader_workers=8),
        {0: (FEW,), 1: (FEW,)},
    ),
    "OpenMP holds the loader workers": (
        pair(loader_workers=4).change(0, main=HELD),
        {
            0: (
                (
                    "OMP_PROC_BIND=close: OpenMP holds its main thread on CPUs 0,16, and with it "
                    "the 4 loader workers that it forks"
                ),
            )
        },
    ),
    # GPUs
    "hidden peers": (
        Place(milan(), 4).change(2, visible="2"),
        {
            2: (
                (
                    f"sees 1 of the job's 4 GPUs {LIST.format(repr('2'))}: the others' memory is "
                    "out of its reach"
                ),
            )
        },
    ),
    "no GPU": (
        Place(milan(), 4).change(0, visible="").change(1, visible="NoDevFiles"),
        {
            0: (f"sees no GPU {LIST.format(repr(''))}",),
            1: (f"sees no GPU {LIST.format(repr('NoDevFiles'))}",),
        },
    ),
    "a list in another order": (
        Place(milan(), 4).change(1, visible="1,0,2,3"),
        {
            0: ("shares GPU 0000:01:00.0 with rank 9",),
            1: (
                f"has GPU 0000:01:00.0, its own is 0000:02:00.0 {LIST.format(repr('1,0,2,3'))}",
                "shares GPU 0000:01:00.0 with rank 8",
            ),
        },
    ),
    "somebody else's GPUs": (
        Place(milan(), 2, visible="2,3").change(0, visible=None),
        {
            0: (
                f"sees GPU0, GPU1, not the job's {LIST.format('not set')}",
                f"has GPU 0000:01:00.0, its own is 0000:03:00.0 {LIST.format('not set')}",
            )
        },
    ),
    "MIG instances": (Place(mig(), 3, visible="MIG-0,MIG-1,MIG-2").change(2, visible="MIG-2"), {}),
    "GPUs that a cgroup hides": (
        Place(milan(), 2, visible="2,3")
        .around_is(visible="0,1", hidden=frozenset({"0000:01:00.0", "0000:02:00.0"}))
        .change(0, visible="0,1")
        .change(1, visible="0,1"),
        {},
    ),
    # nothing is bound
    "policy none": (
        Place(milan(), 4, policy="none").runs(0, "0", visible="", error="x", inherited=(1,)),
        {},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_wrong(name: str) -> None:
    """Each sentence, by local rank; what is written down is read back alike."""
    place, wrong = CASES[name]
    assert place.wrong() == wrong
    proof = place.proof()
    assert proof.right == (not wrong)
    assert proof_of_json(proof_json(proof)) == proof


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
    assert [(one.rank, one.gpu, one.distance, one.cores) for one in proof.ranks] == [
        (8 + one.local_rank, one.gpu, one.distance, len(one.cores)) for one in place.plan.ranks
    ]


@pytest.mark.parametrize("live", [True, False])
def test_a_rank_that_is_not_bound(live: bool) -> None:
    """It may run everywhere: known from the live process, or its own record once it has ended."""
    place = Place(dgx_a100(), 8).runs(2, "0-255")
    if not live:
        place.change(2, main=None, live=False, cpus=ALL, child_cpus=ALL)
    assert place.wrong()[2][0].startswith(
        "runs on CPUs 0-255 (NUMA 0-7), its GPU 0000:03:00.0 is next to"
    )
    assert (place.proof().ranks[2].cpus, place.proof().ranks[2].distance) == ("0-255", 32)


def test_ranks_more_or_fewer_than_planned() -> None:
    """One that is not in the plan is wrong; those that were not seen are left out."""
    place = Place(milan(), 4)
    place.seen.append(replace(place.seen[0], local_rank=4, rank=12))
    assert "is not in the plan, which has 4 ranks for this node" in place.wrong()[4]
    del place.seen[2:]
    proof = place.proof()
    assert (proof.right, len(proof.ranks), proof.expected) == (True, 2, 4)
