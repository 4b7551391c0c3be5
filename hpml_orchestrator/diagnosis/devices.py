"""What vendors specify of their GPUs: peak FLOP/s by dtype, bandwidth of memory and host link.

FLOP/s are those of dense matrix products with the boost clock, tensor or matrix cores included:
about half of what data sheets print with a footnote about sparsity. Nobody reaches them: a good
matrix product gets 75 to 90 %. The host link is one direction.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from hpml_orchestrator.diagnosis.model import Peaks

_PCIE3, _PCIE4, _PCIE5 = 15.75e9, 31.5e9, 63e9  # 16 lanes


@dataclass(frozen=True)
class Device:
    """One GPU as its vendor specifies it, in TFLOP/s and GB/s."""

    name: str
    pattern: str  # of what the driver calls it, without vendor and product line, in lower case
    float64: float
    float32: float
    tf32: float | None
    float16: float
    bfloat16: float | None
    memory: float
    host: float
    source: str


_P100 = "NVIDIA, P100 data sheet, 2016"
_V100 = "NVIDIA, V100 data sheet, January 2020"
_A100 = "NVIDIA, A100 data sheet, June 2021"
_H100 = "NVIDIA, H100 data sheet, 2024"
_H200 = "NVIDIA, H200 data sheet, 2024"
_B200 = "NVIDIA, Blackwell (HGX B200, GB200) data sheet, 2025"
_CDNA2 = "AMD, Instinct MI200 series data sheet, 2022; one of the two dies, which is one device"
_CDNA3 = "AMD, Instinct MI300 series data sheet, 2024"
_ADA = "NVIDIA, data sheet of the card, 2023"
_AMPERE = "NVIDIA, data sheet of the card, 2021"

DEVICES = (
    # name, pattern, float64, float32, TF32, float16, bfloat16, memory, host link, source
    Device("P100 SXM", r"p100-sxm2-\d+gb", 5.3, 10.6, None, 21.2, None, 732, _PCIE3, _P100),
    Device("V100 SXM", r"v100-sxm[23]-\d+gb(-ls)?", 7.8, 15.7, None, 125, None, 900, _PCIE3, _V100),
    Device("V100 PCIe", r"v100-pcie-\d+gb", 7, 14, None, 112, None, 900, _PCIE3, _V100),
    Device("V100S PCIe", r"v100s-pcie-32gb", 8.2, 16.4, None, 130, None, 1134, _PCIE3, _V100),
    Device("T4", "t4", 0.25, 8.1, None, 65, None, 320, _PCIE3, "NVIDIA, T4 data sheet"),
    Device("A100 SXM 40 GB", "a100-sxm4-40gb", 19.5, 19.5, 156, 312, 312, 1555, _PCIE4, _A100),
    Device("A100 SXM 80 GB", "a100-sxm4-80gb", 19.5, 19.5, 156, 312, 312, 2039, _PCIE4, _A100),
    Device("A100 PCIe 40 GB", "a100-pcie-40gb", 19.5, 19.5, 156, 312, 312, 1555, _PCIE4, _A100),
    Device("A100 PCIe 80 GB", "a100 80gb pcie", 19.5, 19.5, 156, 312, 312, 1935, _PCIE4, _A100),
    Device("A30", "a30", 10.3, 10.3, 82, 165, 165, 933, _PCIE4, _AMPERE),
    Device("A40", "a40", 0.58, 37.4, 74.8, 149.7, 149.7, 696, _PCIE4, _AMPERE),
    Device("A10", "a10", 0.49, 31.2, 62.5, 125, 125, 600, _PCIE4, _AMPERE),
    Device("RTX A6000", "rtx a6000", 0.6, 38.7, 77.4, 154.8, 154.8, 768, _PCIE4, _AMPERE),
    Device("RTX 3090", "rtx 3090", 0.56, 35.6, 35.6, 71.2, 71.2, 936, _PCIE4, _AMPERE),
    Device("L4", "l4", 0.47, 30.3, 60, 121, 121, 300, _PCIE4, _ADA),
    Device("L40", "l40", 1.4, 90.5, 90.5, 181, 181, 864, _PCIE4, _ADA),
    Device("L40S", "l40s", 1.4, 91.6, 183, 362, 362, 864, _PCIE4, _ADA),
    Device("RTX 6000 Ada", "rtx 6000 ada generation", 1.4, 91.1, 182, 364, 364, 960, _PCIE4, _ADA),
    Device("RTX 4090", "rtx 4090", 1.3, 82.6, 82.6, 165.2, 165.2, 1008, _PCIE4, _ADA),
    Device("H100 SXM", "h100 80gb hbm3", 67, 67, 495, 989, 989, 3350, _PCIE5, _H100),
    Device("H100 PCIe", "h100 pcie", 51, 51, 378, 756, 756, 2000, _PCIE5, _H100),
    Device("H100 NVL", "h100 nvl", 60, 60, 418, 836, 836, 3900, _PCIE5, _H100),
    Device("H200 SXM", "h200", 67, 67, 495, 989, 989, 4800, _PCIE5, _H200),
    Device("H200 NVL", "h200 nvl", 60, 60, 418, 836, 836, 4800, _PCIE5, _H200),
    Device("GH200", "gh200 480gb", 67, 67, 495, 990, 990, 4000, 450e9, "NVIDIA, GH200 data sheet"),
    Device("B200", "b200", 37, 75, 1125, 2250, 2250, 7700, _PCIE5, _B200),
    Device("GB200", "gb200", 40, 80, 1250, 2500, 2500, 8000, 450e9, _B200),
    Device("MI100", "mi100", 11.5, 46.1, None, 184.6, 92.3, 1229, _PCIE4, "AMD, MI100 data sheet"),
    Device("MI210", "mi210", 45.3, 45.3, None, 181, 181, 1638, _PCIE4, _CDNA2),
    Device("MI250 die", "mi250", 45.3, 45.3, None, 181, 181, 1638, _PCIE4, _CDNA2),
    Device("MI250X die", "mi250x( / mi250)?", 47.9, 47.9, None, 191.5, 191.5, 1638, 36e9, _CDNA2),
    Device("MI300A", "mi300a", 122.6, 122.6, 490.3, 980.6, 980.6, 5300, _PCIE5, _CDNA3),
    Device("MI300X", "mi300x", 163.4, 163.4, 653.7, 1307.4, 1307.4, 5300, _PCIE5, _CDNA3),
    Device("MI325X", "mi325x", 163.4, 163.4, 653.7, 1307.4, 1307.4, 6000, _PCIE5, _CDNA3),
)  # fmt: skip

_AROUND = re.compile(
    r"^(nvidia|amd|advanced micro devices, inc\.|tesla|geforce|instinct|radeon)\s+"
)


def specification(gpu_name: str) -> Peaks | None:
    """Return what the vendor specifies of a GPU; None if the table does not have exactly it.

    A part of a GPU (MIG, vGPU) has none: its share of the whole is not specified. Nor has a name
    of several products, such as `a100`.

    Args:
        gpu_name: as the driver, nvidia-smi and PyTorch call it, such as `NVIDIA H100 80GB HBM3`.
    """
    # Driver, nvidia-smi and PyTorch put different words around the same product, so these are
    # removed; what remains must match the whole pattern. A100 PCIe and SXM differ in bandwidth,
    # and a near match would give the wrong roof.
    name = " ".join(gpu_name.lower().removesuffix("(simulated)").split())
    while (shorter := _AROUND.sub("", name)) != name:
        name = shorter
    device = next((one for one in DEVICES if re.fullmatch(one.pattern, name)), None)
    if device is None:
        return None
    flops = {
        dtype: rate * 1e12
        for dtype in ("float64", "float32", "tf32", "float16", "bfloat16")
        if (rate := getattr(device, dtype)) is not None
    }
    return Peaks(
        flops=flops,
        memory_bandwidth=device.memory * 1e9,
        host_to_device=device.host,
        origin=f"specification of {device.name}",
    )
