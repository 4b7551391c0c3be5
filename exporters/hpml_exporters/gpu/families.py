"""Families out of the readers' numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from prometheus_client.core import Metric

from hpml_exporters.core.metric import MetricSpec
from hpml_exporters.gpu import metrics as gpu
from hpml_exporters.gpu.devices import Place
from hpml_exporters.gpu.reader import Reader

__all__ = ["SERIES", "identity", "numbers"]

SERIES: Mapping[MetricSpec, Sequence[tuple[str, tuple[str, ...]]]] = {
    gpu.BUSY: [("busy", ())],
    gpu.UTILIZATION: [("utilization", ())],
    gpu.MEMORY_UTILIZATION: [("memory_utilization", ())],
    gpu.MEMORY_USED: [("memory_used", ())],
    gpu.MEMORY_TOTAL: [("memory_total", ())],
    gpu.SM_ACTIVE: [("sm_active", ())],
    gpu.SM_OCCUPANCY: [("sm_occupancy", ())],
    gpu.TENSOR_ACTIVE: [("tensor_active", ())],
    gpu.DRAM_ACTIVE: [("dram_active", ())],
    gpu.POWER: [("power", ())],
    gpu.POWER_LIMIT: [("power_limit", ())],
    gpu.ENERGY: [("energy", ())],
    gpu.TEMPERATURE: [("temperature", ())],
    gpu.MEMORY_TEMPERATURE: [("memory_temperature", ())],
    gpu.FAN: [("fan", ())],
    gpu.CLOCK: [("clock_sm", ("sm",)), ("clock_memory", ("memory",))],
    gpu.CLOCK_MAX: [("clock_max_sm", ("sm",)), ("clock_max_memory", ("memory",))],
    gpu.THROTTLED: [
        (f"throttled_{reason}", (reason,))
        for reason in (
            "power",
            "thermal",
            "sync_boost",
            "board_limit",
            "reliability",
            "hw_thermal",
            "power_brake",
        )
    ],
    gpu.ECC_ERRORS: [
        (f"ecc_{error}_{counter}", (error, counter))
        for counter in ("volatile", "aggregate")
        for error in ("corrected", "uncorrected")
    ],
    gpu.REMAPPED_ROWS: [
        (f"remapped_{error}", (error,)) for error in ("correctable", "uncorrectable")
    ],
    gpu.REMAPPED_PENDING: [("remapped_pending", ())],
    gpu.REMAPPED_FAILED: [("remapped_failed", ())],
    gpu.PCIE: [("pcie_transmit", ("transmit",)), ("pcie_receive", ("receive",))],
    gpu.PCIE_REPLAYS: [("pcie_replays", ())],
    gpu.NVLINK: [("nvlink_transmit", ("transmit",)), ("nvlink_receive", ("receive",))],
}
"""Key of a number and the labels after `uuid`, by metric."""

_TABLE = tuple((spec, tuple(series)) for spec, series in SERIES.items())


def numbers(readers: Sequence[Reader]) -> list[Metric]:
    """Return what the readers know now."""
    found = []
    each = [(reader.place.uuid, reader.values) for reader in readers]
    for spec, series in _TABLE:
        samples = [
            ((uuid, *more), values[key])
            for uuid, values in each
            for key, more in series
            if key in values
        ]
        if samples:
            found.append(spec.family(samples))
    return found


def identity(places: Iterable[Place], down: Mapping[str, Place], nameless: int) -> list[Metric]:
    """Return which GPUs there are and whether they answer.

    Args:
        places: GPUs and instances that answer.
        down: GPUs that were there and do not answer, by UUID.
        nameless: GPUs that did not even tell their name.
    """
    places = tuple(places)
    up = [one for one in places if not one.parent]
    info = [
        ((one.uuid, one.name, one.pci, str(one.minor) if one.minor >= 0 else "", one.mig), 1.0)
        for one in (*places, *down.values())
    ]
    states = [(("up",), len(up)), (("lost",), max(len(down), nameless))]
    return [
        gpu.INFO.family(info),
        gpu.UP.family([*(((one.uuid,), 1) for one in up), *(((uuid,), 0) for uuid in down)]),
        gpu.GPUS.family(states),  # one that was lost after it was seen is in both
    ]
