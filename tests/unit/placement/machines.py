"""The machines of the binding table, and a short way to write others down."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hpml_orchestrator.topology.model import Core, Domain, Gpu, Nic, Topology

GIB = 2**30


def node(
    domains: Sequence[tuple[int, Sequence[tuple[int, ...]]]],
    gpus: Sequence[int | None] = (),
    distance: Callable[[int, int], int] | None = None,
    nics: Sequence[int | None] = (),
    links: Sequence[tuple[str, str, str]] = (),
) -> Topology:
    """A node of domains, each with its socket and the hardware threads of its cores.

    GPU number n has the PCI address `0000:<n + 1>:00.0`, card number n is called `mlx5_<n>`.
    """
    cores = sorted(
        (cpus, socket, number)
        for number, (socket, threads) in enumerate(domains)
        for cpus in threads
    )
    far = distance or (lambda one, other: 10 if one == other else 20)
    numbers = range(len(domains))
    return Topology(
        source="by hand",
        cores=tuple(
            Core(place, socket, number, cpus) for place, (cpus, socket, number) in enumerate(cores)
        ),
        domains=tuple(
            Domain(
                number,
                tuple(sorted(cpu for cpus in threads for cpu in cpus)),
                64 * GIB,
                tuple((other, far(number, other)) for other in numbers),
            )
            for number, (_, threads) in enumerate(domains)
        ),
        gpus=tuple(
            Gpu(place, f"GPU{place}", f"0000:{place + 1:02x}:00.0", f"GPU-{place}", domain=domain)
            for place, domain in enumerate(gpus)
        ),
        nics=tuple(Nic(f"mlx5_{place}", domain=domain) for place, domain in enumerate(nics)),
        links=tuple(links),
    )


def threads(first: int, count: int, *siblings: int) -> list[tuple[int, ...]]:
    """Cores from a CPU on, each with its siblings so many CPUs further on."""
    return [(cpu, *(cpu + more for more in siblings)) for cpu in range(first, first + count)]


def intel(gpus: Sequence[int | None]) -> Topology:
    """Two sockets of 8 cores with two hardware threads each."""
    return node([(0, threads(0, 8, 16)), (1, threads(8, 8, 16))], gpus)


def milan(gpus: Sequence[int | None] = (3, 2, 1, 0)) -> Topology:
    """One socket of 64 cores in four domains, with the GPUs in reversed order."""
    return node([(0, threads(16 * number, 16, 64)) for number in range(4)], gpus)


def dgx_a100() -> Topology:
    """Two sockets of 64 cores in four domains each; only every other domain has GPUs."""

    def distance(one: int, other: int) -> int:
        return 10 if one == other else 12 if one // 4 == other // 4 else 32

    domains = [(number // 4, threads(16 * number, 16, 128)) for number in range(8)]
    return node(domains, (3, 3, 1, 1, 7, 7, 5, 5), distance, nics=(3, 3, 1, 1, 7, 7, 5, 5))


def mi250x() -> Topology:
    """One socket of 64 cores in four domains, with eight GPUs."""
    return node([(0, threads(16 * number, 16)) for number in range(4)], (3, 3, 1, 1, 0, 0, 2, 2))


def two_by_twelve() -> Topology:
    """Two sockets of 12 cores without GPUs."""
    return node([(0, threads(0, 12)), (1, threads(12, 12))])
