"""A topology as the planner needs it: the usable cores, and distances between domains."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from hpml_orchestrator.topology.model import Core, Topology

UNKNOWN_DISTANCE = 256  # the kernel's distances end at 255
_LOCAL, _REMOTE = 10, 20  # assumed for comparisons if distances are unknown


class Machine:
    """The usable part of a node.

    Args:
        topology: the node.
        allowed: the CPUs that may be used; None for all.
        smt: whether all hardware threads of a core are used, or only its first usable one.

    Attributes:
        pool: NUMA domain to its usable cores, by socket and number, those of different kinds in
            turns; none is empty.
        order: NUMA domain to its number in `pool`.
        cpus_of: core to its usable CPUs.
        domain_of: core to its NUMA domain.
        socket_of: core to its socket.
        home_of: CPU to its domain, for all CPUs that are online.
    """

    def __init__(self, topology: Topology, allowed: Iterable[int] | None, *, smt: bool) -> None:
        usable = topology.cpus if allowed is None else topology.cpus.intersection(allowed)
        self.cpus_of: dict[int, tuple[int, ...]] = {}
        self.domain_of: dict[int, int] = {}
        self.socket_of: dict[int, int] = {}
        self.home_of: dict[int, int] = {}
        self._sockets: dict[int, set[int]] = {}
        pool: dict[int, list[int]] = {}
        for core in topology.cores:
            self.home_of.update(dict.fromkeys(core.cpus, core.domain))
            self._sockets.setdefault(core.domain, set()).add(core.socket)
        for core in _mixed([core for core in topology.cores if usable.intersection(core.cpus)]):
            # Not always the core's first thread: a job's mask may hold only the second one.
            cpus = tuple(cpu for cpu in core.cpus if cpu in usable)
            self.cpus_of[core.number] = cpus if smt else cpus[:1]
            self.domain_of[core.number] = core.domain
            self.socket_of[core.number] = core.socket
            pool.setdefault(core.domain, []).append(core.number)
        self.pool = {domain: tuple(cores) for domain, cores in pool.items()}
        self.order = {domain: number for number, domain in enumerate(self.pool)}
        self._distances = {domain.number: dict(domain.distances) for domain in topology.domains}
        self._memory = {domain.number: domain.memory_bytes for domain in topology.domains}

    @property
    def cores(self) -> tuple[int, ...]:
        """All usable cores, by socket, domain and number."""
        return tuple(self.cpus_of)

    @property
    def domains_with_cpus(self) -> tuple[int, ...]:
        """All domains that have CPUs, usable or not."""
        return tuple(sorted(self._sockets))

    def distance(self, domain: int, other: int) -> int:
        """Return the distance between two domains; if unknown, 10 within and 20 between domains.

        For comparisons only; `farthest` has the distances to display.
        """
        default = _LOCAL if domain == other else _REMOTE
        return self._distances.get(domain, {}).get(other, default)

    def farthest(self, near: Collection[int], domains: Iterable[int]) -> int | None:
        """Return the largest distance of some domains, each from the nearest of `near`.

        None if the distance of one of them is unknown.
        """
        rows = [self._distances.get(domain, {}) for domain in near]
        away = [[row[other] for row in rows if other in row] for other in domains]
        return max(map(min, away), default=None) if all(away) else None

    def gap(self, domain: int, other: int) -> tuple[int, int]:
        """Return the distance, and 1 if no socket is shared: for sources without distances."""
        sockets, others = self._sockets.get(domain, set()), self._sockets.get(other, set())
        return self.distance(domain, other), int(sockets.isdisjoint(others))

    def nearest(self, domain: int, among: Iterable[int]) -> tuple[int, ...]:
        """Return the domains in `among` that are nearest to `domain`; several if they tie."""
        gaps = {other: self.gap(domain, other) for other in among}
        least = min(gaps.values(), default=None)
        return tuple(other for other, gap in gaps.items() if gap == least)

    def domains_of_cpus(self, cpus: Iterable[int]) -> tuple[int, ...]:
        """Return the domains of the CPUs."""
        return tuple(sorted({self.home_of[cpu] for cpu in cpus if cpu in self.home_of}))

    def memory_for(self, domain: int) -> int:
        """Return the domain to take memory from: itself, unless it has none and others do."""
        others = [other for other in self._sockets if other != domain and self._memory.get(other)]
        if self._memory.get(domain) or not others:
            return domain
        # The number breaks ties, so that equal nodes get equal plans.
        return min(others, key=lambda other: (self.gap(domain, other), other))


def _mixed(cores: Collection[Core]) -> list[Core]:
    """Return cores by socket, domain and number, those of different kinds in turns.

    However many equal parts the list is cut into, each has its share of every kind.
    """
    like: dict[tuple[int, int, str], list[Core]] = {}
    for core in sorted(cores, key=lambda core: core.number):
        like.setdefault((core.socket, core.domain, core.kind), []).append(core)
    places = [
        (socket, domain, (at + 0.5) / len(some), core.number, core)
        for (socket, domain, _), some in like.items()
        for at, core in enumerate(some)
    ]
    return [place[-1] for place in sorted(places)]
