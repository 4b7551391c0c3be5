"""Files of real machines, and their content as somebody works it out who looks at them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

DATA = Path(__file__).parent / "data"


@dataclass(frozen=True)
class Machine:
    """The content of a file, worked out by hand.

    Attributes:
        cores: number of cores.
        sockets: number of sockets; 0 where the file has none.
        domains: domain -> its CPUs.
        gpus: domain of each GPU, in order.
        first: name and address of GPU 0.
        near: GPU -> level and names of the cards nearest to it, for some GPUs.
        nics: card -> domain.
    """

    cores: int
    sockets: int
    domains: dict[int, str]
    gpus: Sequence[int | None]
    first: tuple[str, str] = ("", "")
    near: dict[int, tuple[str, str]] | None = None
    nics: Mapping[str, int | None] | None = None


POWER8 = {0: "0-1,8-9,16-17,24-25", 1: "80-81,88-89,96-97,104-105"}
H100_NICS = {f"NIC{i}": int(i >= 6) for i in range(12)}
MACHINES = {
    "hwloc/AMD-19h-Zen3-2xEpyc-7763.xml": Machine(128, 2, {0: "0-127"}, []),
    "hwloc/Intel-SapphireRapids-2xXeonMax9460.xml": Machine(80, 2, {0: "0-159"}, []),
    "hwloc/nvidiaDGX2.xml": Machine(
        4, 2, {0: "0-1", 1: "24-25"}, [0] * 8 + [1] * 8, ("nvml0", "0000:34:00.0")
    ),
    "hwloc/power8gpudistances.xml": Machine(8, 2, POWER8, [0, 0, 1, 1], ("nvml0", "0002:01:00.0")),
    "nccl/azure-ndv4-topo.xml": Machine(
        96,
        0,
        {0: "0-23", 1: "24-47", 2: "48-71", 3: "72-95"},
        [1, 1, 0, 0, 3, 3, 2, 2],  # by PCI address, as the driver counts; the file begins with 0003
        ("GPU0", "0001:00:00.0"),
        {0: ("PIX", "0101:00:00.0 0102:00:00.0"), 7: ("PIX", "0107:00:00.0 0108:00:00.0")},
        {
            f"010{n}:00:00.0": {1: 1, 2: 1, 3: 0, 4: 0, 5: 3, 6: 3, 7: 2, 8: 2}[n]
            for n in range(1, 9)
        },
    ),
    "nccl/topo_16p1h.xml": Machine(
        128,
        0,
        {0: "0-31,128-159", 1: "32-63,160-191", 2: "64-95,192-223", 3: "96-127,224-255"},
        [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4,
        ("GPU0", "0000:4e:00.0"),
        {0: ("PIX", "mlx5_0"), 2: ("PIX", "mlx5_1"), 12: ("PIX", "mlx5_7"), 15: ("PIX", "mlx5_8")},
        {"mlx5_0": 0, "mlx5_1": 0, "mlx5_2": 1, "mlx5_3": 1, "mlx5_4": 2, "mlx5_5": 2, "mlx5_7": 3}
        | {"mlx5_8": 3},
    ),
    "nccl/topo_3p_pcie.xml": Machine(
        32,
        0,
        {0: "0-15,32-47", 1: "16-31,48-63"},
        [0, 1, 1],
        ("GPU0", "0000:23:00.0"),
        {0: ("NODE", "mlx5_0"), 1: ("SYS", "mlx5_0"), 2: ("SYS", "mlx5_0")},
        {"mlx5_0": 0},
    ),
    "nccl/topo_8p_90a_1.xml": Machine(
        48,
        0,
        {0: "0-15,64-79", 1: "16-31,80-95", 3: "48-63,112-127"},
        [3, 3, 1, 1, 0, 0, 0, 0],
        ("GPU0", "0000:c1:00.0"),
        nics={"bond0": None},  # no PCI device: NCCL puts it below some CPU
    ),
    "nccl/topo_8p_rome_n4.xml": Machine(
        112,
        0,
        {n: f"{16 * n}-{16 * n + 15}" for n in range(1, 8)},
        [1, 2, 2, 3, 5, 5, 6, 7],
        ("GPU0", "0000:43:00.0"),
        dict.fromkeys(range(8), ("SYS", "mlx5_0")),
        {"mlx5_0": 4},
    ),
    "nvidia-smi/1gpu-numa1.txt": Machine(
        32,
        0,
        {1: "32-63,96-127"},
        [1],
        ("GPU0", ""),
        {0: ("NODE", "mlx5_0 mlx5_1")},
        {"mlx5_0": 1, "mlx5_1": 1},
    ),
    "nvidia-smi/h100-hgx-8gpu-2socket.txt": Machine(
        112,
        0,
        {0: "0-55,112-167", 1: "56-111,168-223"},
        [0] * 4 + [1] * 4,
        ("GPU0", ""),
        {n: ("PXB", f"NIC{(0, 3, 4, 5, 6, 9, 10, 11)[n]}") for n in range(8)},
        H100_NICS,
    ),
    "nvidia-smi/rtx4090-8gpu-2socket.txt": Machine(
        128, 0, {0: "0-63,128-191", 1: "64-127,192-255"}, [0] * 4 + [1] * 4, ("GPU0", "")
    ),
    "nvidia-smi/titanx-4gpu-2socket.txt": Machine(
        12,
        0,
        {0: "0-5", 1: "6-11"},
        [0, 0, 1, 1],
        ("GPU0", ""),
        {0: ("PHB", "mlx4_0"), 1: ("PHB", "mlx4_0"), 2: ("PHB", "mlx4_1"), 3: ("PHB", "mlx4_1")},
        {"mlx4_0": 0, "mlx4_1": 1},
    ),
    "nvidia-smi/v100-sxm2-8gpu-2socket.txt": Machine(
        48,
        0,
        {0: "0-23,48-71", 1: "24-47,72-95"},
        [0] * 4 + [1] * 4,
        ("GPU0", ""),
        {0: ("NODE", "mlx5_0"), 2: ("PIX", "mlx5_0"), 4: ("NODE", "mlx5_1"), 7: ("PIX", "mlx5_1")},
        {"mlx5_0": 0, "mlx5_1": 1},
    ),
}
