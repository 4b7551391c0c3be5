"""What holds for the plan of any machine: random topologies, masks and orders of GPUs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from hypothesis import HealthCheck, event, example, given, settings
from hypothesis import strategies as st

from hpml_orchestrator.placement.model import Plan
from hpml_orchestrator.placement.planner import POLICIES, plan
from hpml_orchestrator.topology.model import Core, Domain, Gpu, Nic, Topology
from tests.unit.placement.machines import dgx_a100

MANY = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
BORROWS, SHARES = "too few allowed cores", "some share a core"


@dataclass(frozen=True)
class Case:
    """A node and what is asked of the planner."""

    topology: Topology
    ranks: int
    policy: str
    ranks_per_gpu: int
    allowed: tuple[int, ...] | None
    visible: tuple[int, ...] | None
    workers: int
    smt: bool = True

    def plan(self) -> Plan:
        return plan(
            self.topology,
            self.ranks,
            policy=self.policy,
            ranks_per_gpu=self.ranks_per_gpu,
            allowed_cpus=self.allowed,
            visible_gpus=self.gpus(),
            loader_workers=self.workers,
            smt=self.smt,
        )

    def usable(self) -> dict[int, tuple[int, ...]]:
        """Usable cores and their usable CPUs: the first of each alone without hardware threads."""
        wanted = self.topology.cpus if self.allowed is None else set(self.allowed)
        found = {
            core.number: tuple(cpu for cpu in core.cpus if cpu in wanted)
            for core in self.topology.cores
        }
        return {number: cpus if self.smt else cpus[:1] for number, cpus in found.items() if cpus}

    def gpus(self) -> list[Gpu]:
        """The visible GPUs in order."""
        if self.visible is None:
            return list(self.topology.gpus)
        return [self.topology.gpus[index] for index in self.visible]

    def near(self) -> list[int | None]:
        """Each rank's GPU's domain with CPUs; None without a GPU or if unknown."""
        held = {core.domain for core in self.topology.cores}
        gpus = self.gpus()
        if not gpus:
            return [None] * self.ranks
        domains = [gpus[rank % len(gpus)].domain for rank in range(self.ranks)]
        return [one if one in held else None for one in domains]

    def distance(self, one: int, other: int) -> int:
        """The distance between domains: as given, else 10 within and 20 between."""
        domain = self.topology.domain(one)
        assert domain is not None
        return dict(domain.distances).get(other, 10 if one == other else 20)

    def nearest(self, domain: int, among: Iterable[int | None]) -> set[int]:
        """Those of some domains that are nearest to one; one of the same socket before others."""
        socket = {core.domain: core.socket for core in self.topology.cores}

        def far(other: int) -> tuple[int, bool]:
            return self.distance(domain, other), socket.get(other) != socket[domain]

        known = [other for other in among if other is not None]
        return {one for one in known if far(one) == min(map(far, known))}


@st.composite
def cases(draw: st.DrawFn, policy: str | None = None, gpus: int | None = None) -> Case:
    """Nodes of 1-16 domains, some without CPUs, with holes and any numbering of the CPUs."""
    sizes = draw(st.lists(st.integers(0, 6), min_size=1, max_size=16))
    sizes[draw(st.integers(0, len(sizes) - 1))] += 1  # at least one core
    smt = draw(st.integers(1, 4))
    per_socket = draw(st.integers(1, len(sizes)))
    total = sum(sizes) * smt
    numbers = draw(st.permutations(range(total + draw(st.integers(0, 8)))))[:total]
    if draw(st.booleans()):
        numbers = sorted(numbers)
    offline = draw(st.sets(st.sampled_from(numbers), max_size=3)) if draw(st.booleans()) else set()
    found: list[tuple[tuple[int, ...], int]] = []
    begin = 0
    for domain, size in enumerate(sizes):
        for _ in range(size):
            cpus = tuple(sorted(set(numbers[begin : begin + smt]) - offline))
            begin += smt
            found += [(cpus, domain)] if cpus else []
    if not found:
        found = [((numbers[0],), next(one for one, size in enumerate(sizes) if size))]
    cores = tuple(
        Core(number, domain // per_socket, domain, cpus)
        for number, (cpus, domain) in enumerate(sorted(found))
    )
    told = draw(st.booleans())
    domains = tuple(
        Domain(
            number,
            tuple(sorted(cpu for core in cores if core.domain == number for cpu in core.cpus)),
            2**34,
            tuple(
                (
                    other,
                    10
                    if other == number
                    else 12 + 20 * (other // per_socket != number // per_socket),
                )
                for other in range(len(sizes))
            )
            if told
            else (),
        )
        for number in range(len(sizes))
    )
    known = st.integers(0, len(sizes) - 1)
    places = st.none() | known if draw(st.booleans()) else known
    wanted: list[int | None] = draw(
        st.lists(places, min_size=gpus or 0, max_size=16 if gpus is None else gpus)
    )
    cards = draw(st.lists(places, max_size=6))
    topology = Topology(
        "random",
        cores,
        domains,
        tuple(Gpu(n, f"GPU{n}", f"0000:{n:02x}:00.0", domain=one) for n, one in enumerate(wanted)),
        tuple(Nic(f"mlx5_{n}", domain=one) for n, one in enumerate(cards)),
    )
    online = sorted(topology.cpus)
    masks = st.lists(st.sampled_from(online), min_size=1, unique=True)
    allowed = tuple(draw(masks)) if draw(st.booleans()) else None
    visible = None
    hides = draw(st.booleans())
    if wanted and hides:
        order = draw(st.permutations(range(len(wanted))))
        visible = tuple(order[: draw(st.integers(1, len(wanted)))])
    per_gpu = draw(st.integers(1, 3))
    devices = len(wanted if visible is None else visible)
    full = bool(devices) and draw(st.booleans())  # as many ranks as a job file asks for by itself
    return Case(
        topology,
        devices * per_gpu if full else draw(st.integers(1, 24)),
        policy or draw(st.sampled_from(list(POLICIES))),
        per_gpu,
        allowed,
        visible,
        draw(st.integers(0, 3)),
        draw(st.booleans()),
    )


DGX = Case(dgx_a100(), 8, "gpu-local", 1, None, None, 2)


def within_one(counts: list[int]) -> bool:
    return max(counts, default=0) - min(counts, default=0) <= 1


@MANY
@given(cases())
@example(DGX)
def test_every_rank_is_served_with_what_is_its_own(case: Case) -> None:
    """All ranks, in order, on usable CPUs, whole cores, own cores, real domains, right threads."""
    made = case.plan()
    usable = case.usable()
    home = {core.number: core.domain for core in case.topology.cores}
    assert [one.local_rank for one in made.ranks] == list(range(case.ranks))
    held = Counter(core for one in made.ranks for core in one.cores)
    if case.policy != "none" and len(usable) >= case.ranks:
        assert max(held.values()) == 1
        assert not any(SHARES in one for one in made.warnings)
    elif case.policy != "none":
        event("fewer cores than ranks")
        assert any(SHARES in one for one in made.warnings)
        assert within_one([held[core] for core in usable])
    for one in made.ranks:
        assert one.cores
        assert one.cores == tuple(sorted(one.cores))
        assert one.cpus == tuple(sorted(cpu for core in one.cores for cpu in usable[core]))
        assert one.numa == tuple(sorted({home[core] for core in one.cores}))
        assert one.memory in ({None} if case.policy == "none" else set(home.values()))
        assert one.loader_workers == case.workers
        cores = len(one.cores) if case.policy != "none" else len(usable) // case.ranks
        assert one.threads == max(1, cores - case.workers)


@MANY
@given(cases(policy="gpu-local"))
@example(DGX)
def test_gpu_local_cores_come_first_and_in_balance(case: Case) -> None:
    """Own domain before others, nobody else's domain, one core's difference.

    No core is idle, but those that are nearest to GPUs without a rank.
    """
    made = case.plan()
    usable = case.usable()
    if len(usable) < case.ranks:
        return
    home = {core.number: core.domain for core in case.topology.cores}
    near = case.near()
    with_cores = {home[core] for core in usable}
    borrowed = any(BORROWS in one for one in made.warnings)
    idle = set(usable) - {core for one in made.ranks for core in one.cores}
    unused = {gpu.domain for gpu in case.gpus()[case.ranks :]} - {None}
    apart = {one.number for one in case.topology.domains} - {home[core] for core in home}
    if not unused & apart:  # memory without CPUs counts to the nearest
        for spared in {home[core] for core in idle}:
            assert case.nearest(spared, unused.union(near) - {None}) <= unused - set(near)
    assert bool(idle) == any("stay" in one and "idle" in one for one in made.warnings)
    ranks_of: dict[int, list[int]] = {}
    for rank, domain in enumerate(near):
        if domain in with_cores:
            assert domain is not None
            ranks_of.setdefault(domain, []).append(rank)
    owner = {core: one.local_rank for one in made.ranks for core in one.cores}
    alone = all(one in with_cores for one in near)  # every rank's GPU is next to usable cores
    event(f"every GPU next to usable cores: {alone}")
    for domain, ranks in ranks_of.items():
        local = [sum(home[core] == domain for core in made.ranks[rank].cores) for rank in ranks]
        assert within_one([len(made.ranks[rank].cores) for rank in ranks])
        if borrowed:
            continue
        assert within_one(local)
        assert min(local) >= 1
        if alone:  # nobody else has a core of this domain
            assert {owner[core] for core in usable if home[core] == domain} <= set(ranks)
