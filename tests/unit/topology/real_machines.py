"""Files of real machines, and their content as somebody works it out who looks at them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

DATA = Path(__file__).parent / "data"


@dataclass(frozen=True)
class Machine:
    """The content of a file, worked out by hand.

    Attributes:
        cores: number of cores.
        sockets: number of sockets.
        domains: domain -> its CPUs.
        gpus: domain of each GPU, in order.
        first: name and address of GPU 0.
    """

    cores: int
    sockets: int
    domains: dict[int, str]
    gpus: Sequence[int | None]
    first: tuple[str, str] = ("", "")


POWER8 = {0: "0-1,8-9,16-17,24-25", 1: "80-81,88-89,96-97,104-105"}
MACHINES = {
    "hwloc/AMD-19h-Zen3-2xEpyc-7763.xml": Machine(128, 2, {0: "0-127"}, []),
    "hwloc/Intel-SapphireRapids-2xXeonMax9460.xml": Machine(80, 2, {0: "0-159"}, []),
    "hwloc/nvidiaDGX2.xml": Machine(
        4, 2, {0: "0-1", 1: "24-25"}, [0] * 8 + [1] * 8, ("nvml0", "0000:34:00.0")
    ),
    "hwloc/power8gpudistances.xml": Machine(8, 2, POWER8, [0, 0, 1, 1], ("nvml0", "0002:01:00.0")),
}
