"""GPU figures: one row per figure, with its NVML sources, their unit and its period.

The reader, the catalogue, docs/metrics.md and the dashboards' units follow from these rows. `uuid`
is the UUID of the GPU, or of an instance of a split GPU (MIG).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Literal, Protocol

from hpml_exporters.core.collector import MetricSpec, metric

Series = tuple[str, tuple[str, ...]]
"""Name of the metric, and values of its labels after `uuid`."""
Total = Literal["", "rate", "wraps"]
"""How readings become a total: not at all; "rate": integrated over time; "wraps": a counter of 32
bits, whose differences are added up."""
On = Literal["gpu", "instance", "both"]
"""What has a source: GPUs, instances of split GPUs, or both."""

_ALL_LINKS = (0xFFFFFFFF,)
_LINKS = tuple(range(18))


class Convert(Protocol):
    """Converts an answer of NVML to our unit."""

    def __call__(self, number: float, /) -> float | None:
        """Return the number in our unit; None if the answer is impossible and so unknown."""


@dataclass(frozen=True)
class Quantity:
    """A unit of NVML, and the physically possible range in ours.

    Attributes:
        most: the highest possible value.
        factor: to multiply NVML's number by.
        divisor: to divide it by.
        slack: share by which rounding may exceed `most`; such values count as `most`.
    """

    most: float
    factor: float = 1
    divisor: float = 1
    slack: float = 0.0

    def __call__(self, number: float, /) -> float | None:
        """Return the number in our unit; None outside the possible range.

        >>> _PERCENT(70), _PERCENT(101), _PERCENT(250), _CELSIUS(4294967295)
        (0.7, 1.0, None, None)
        """
        value = number * self.factor / self.divisor
        if 0 <= value <= self.most:
            return value
        return self.most if self.most < value <= self.most * (1 + self.slack) else None


# Drivers return all ones (4294967295 or 18446744073709551615) and worse for what they cannot read.
_PERCENT = Quantity(1.0, divisor=100, slack=0.05)
_MILLIWATTS = Quantity(20_000, divisor=1000)
_MILLIJOULES = Quantity(1e13, divisor=1000)  # 20 kW for 16 years
_CELSIUS = Quantity(150)
_MEGAHERTZ = Quantity(20e9, factor=1e6)
_BYTES = Quantity(2.0**46)
_BYTES_COUNTED = Quantity(2.0**62)
_KIBIBYTES_COUNTED = Quantity(2.0**62, factor=1024)
_MEBIBYTES_A_SECOND = Quantity(1e14, factor=1024**2)
_ERRORS = Quantity(2.0**32 - 2)
_ROWS = Quantity(1e6)
_LANES = Quantity(64)
_FLAG = Quantity(1)
_ACTION = Quantity(15)


@dataclass(frozen=True)
class Field:
    """A field of nvmlDeviceGetFieldValues.

    Attributes:
        number: NVML_FI_DEV_... of nvml.h.
        convert: the answer to our unit.
        total: see `Total`.
        scopes: links whose converted values are added up.
        on: see `On`.
    """

    number: int
    convert: Convert
    total: Total = ""
    scopes: tuple[int, ...] = (0,)
    on: On = "gpu"


@dataclass(frozen=True)
class NvmlCall:
    """A call `f(handle, [selector,] &answer)` that gives integers.

    Attributes:
        names: of the function, newest first.
        convert: the answer to our unit.
        total: see `Total`.
        selector: second argument (kind of clock, sensor).
        layout: type of the answer.
        pick: which of its integers is meant.
        version: of a structure whose first integer is its version and size; 0 for others.
        pointers: how many arguments point to an integer each.
        on: see `On`.
    """

    names: tuple[str, ...]
    convert: Convert
    total: Total = ""
    selector: int | None = None
    layout: type[ctypes.Array[ctypes.c_uint] | ctypes.Array[ctypes.c_ulonglong]] = ctypes.c_uint * 1
    pick: int = 0
    version: int = 0
    pointers: int = 1
    on: On = "gpu"

    @property
    def question(self) -> object:
        """Key of the rows that one call answers."""
        return (self.names, self.selector)


@dataclass(frozen=True)
class GpmMetric:
    """A metric of nvmlGpmMetricsGet (Hopper and later); other attributes as in `Field`."""

    number: int
    convert: Convert
    total: Total = ""
    on: On = "gpu"


Source = Field | NvmlCall | GpmMetric


@dataclass(frozen=True, eq=False)
class GpuFigure(MetricSpec):
    """A figure of each GPU: a metric, where its series come from, and how often they are read.

    Attributes:
        period: seconds between two readings.
        series: sources by the value of the label after `uuid` ("" without one), best first: a
            reader takes the first that its GPU answers.
    """

    period: float = 1.0
    series: Mapping[str, Sequence[Source]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class GpuSeries:
    """A series of a GPU with one of its sources."""

    figure: GpuFigure
    label: str
    source: Source

    @cached_property
    def key(self) -> Series:
        """Key of the rows that are alternatives."""
        return (self.figure.name, (self.label,) if self.label else ())


_REASONS = {
    "hw_thermal": 0x40,
    "power_brake": 0x80,
    "hw_slowdown": 0x8,
    "sw_thermal": 0x20,
    "power": 0x4,
    "sync_boost": 0x10,
    "board_limit": 0x200,
    "reliability": 0x400,
}
"""Bits of nvmlDeviceGetCurrentClocksEventReasons, the strongest first: the GPU sets HwSlowdown
together with each of the two before it. The fields of these reasons are not used: they overlap, and
their numbers changed between releases of the driver (251-253, then 269-271)."""
_REASONS_END = 1 << 24


@cache
def throttle_reason(bits: int) -> str:
    """Return the strongest reason for reduced clocks, empty for none.

    >>> throttle_reason(0x40 | 0x8 | 0x4), throttle_reason(0x8), throttle_reason(0x1)
    ('hw_thermal', 'hw_slowdown', '')
    """
    return next((reason for reason, bit in _REASONS.items() if bits & bit), "")


def _is_reason(reason: str) -> Convert:
    def convert(bits: float, /) -> float | None:
        return float(throttle_reason(int(bits)) == reason) if bits < _REASONS_END else None

    return convert


def _is_up(state: float, /) -> float | None:
    # 1: active, 2: asleep until there is traffic; 0: inactive, 3: traffic is disabled
    return float(state in (1, 2)) if state in (0, 1, 2, 3) else None


def _call(*names: str, convert: Convert, **more: int) -> NvmlCall:
    return NvmlCall(names, convert, **more)  # type: ignore[arg-type]


def _utilization(pick: int, total: Total = "") -> NvmlCall:
    names = ("nvmlDeviceGetUtilizationRates",)
    return NvmlCall(names, _PERCENT, total, layout=ctypes.c_uint * 2, pick=pick)


def _memory(second: int, first: int) -> Sequence[NvmlCall]:
    """Version 2 does not count the driver's reserved memory as used."""
    # version 2: version, total, reserved, free, used; version 1: total, free, used
    words = ctypes.c_ulonglong
    name = "nvmlDeviceGetMemoryInfo"
    newer = NvmlCall((f"{name}_v2",), _BYTES, layout=words * 5, pick=second, version=2, on="both")
    return newer, NvmlCall((name,), _BYTES, layout=words * 3, pick=first, on="both")


def _power(total: Total = "") -> Sequence[Source]:
    usage = NvmlCall(("nvmlDeviceGetPowerUsage",), _MILLIWATTS, total)
    return Field(186, _MILLIWATTS, total), usage


def _links(number: int) -> Field:
    return Field(number, _ERRORS, scopes=_LINKS)


def _figure(
    name: str,
    help_: str,
    *sources: Source,
    every: float = 1.0,
    label: str = "",
    series: Mapping[str, Sequence[Source]] | None = None,
) -> GpuFigure:
    series = {"": sources} if series is None else series
    spec = metric(f"hpml_gpu_{name}", help_, f"uuid {label}")
    known = dict.fromkeys(one for alternatives in series.values() for one in alternatives)
    where = f"{'; else '.join(_described(known))}; every {every:g} s"
    return GpuFigure(
        spec.name, spec.type, spec.help, spec.labels, spec.unit, where, every, series=series
    )


def _described(sources: Iterable[Source]) -> Iterator[str]:
    """Yield each NVML function with the numbers requested from it."""
    numbers: dict[tuple[str, str, str], list[int]] = {}
    for one in sources:
        if isinstance(one, NvmlCall):
            what, where = one.names[0], ""
        elif isinstance(one, Field):
            of_links = " of each NVLink" if one.scopes == _LINKS else ""
            what, where = "nvmlDeviceGetFieldValues, field", of_links
        else:
            what, where = "nvmlGpmMetricsGet (Hopper and later), metric", ""
        where += {"rate": ", integrated", "wraps": ", 32 bits"}.get(one.total, "")
        where += " (MIG instances)" if one.on == "instance" else ""
        found = numbers.setdefault((what, where, one.total), [])
        if not isinstance(one, NvmlCall):
            found.append(one.number)
    for (what, where, _), found in numbers.items():
        plural = "s" if len(found) > 1 else ""
        yield f"{what}{plural} {', '.join(map(str, found))}".rstrip() + where


_BUSY_OF_INSTANCE = 1
UTILIZATION = _figure(
    "utilization_ratio",
    "Share of the last second or less in which some kernel was resident; a spinning kernel counts"
    " as 1. Of a split GPU: the mean of its instances by their slices.",
    # NVML's utilization only says that some kernel was resident. GPM's SM activity shows how much
    # of the GPU works.
    _utilization(0),
    GpmMetric(_BUSY_OF_INSTANCE, _PERCENT, on="instance"),
)

FIGURES: Sequence[GpuFigure] = (
    _figure(
        "busy_seconds_total",
        "Time in which some kernel was resident, integrated over all readings since the exporter"
        " started; up to two minutes without a reading count as the reading after them.",
        _utilization(0, "rate"),
        GpmMetric(_BUSY_OF_INSTANCE, _PERCENT, "rate", on="instance"),
    ),
    UTILIZATION,
    _figure(
        "memory_utilization_ratio",
        "Share of the last second or less in which GPU memory was read or written.",
        _utilization(1),
    ),
    _figure(
        "memory_used_bytes",
        "GPU memory in use, without what the driver reserves if it reports that.",
        *_memory(4, 2),
    ),
    _figure("memory_total_bytes", "GPU memory there is.", *_memory(1, 0)),
    _figure(
        "sm_active_ratio",
        "Share of the multiprocessors that were busy, mean since the reading before.",
        GpmMetric(2, _PERCENT, on="both"),
    ),
    _figure(
        "sm_occupancy_ratio",
        "Resident warps against the most that fit, mean since the reading before.",
        GpmMetric(3, _PERCENT, on="both"),
    ),
    _figure(
        "tensor_active_ratio",
        "Share of time in which tensor cores worked, mean since the reading before.",
        GpmMetric(5, _PERCENT, on="both"),
    ),
    _figure(
        "dram_active_ratio",
        "Bandwidth of GPU memory in use against its peak, mean since the reading before.",
        GpmMetric(10, _PERCENT, on="both"),
    ),
    _figure("power_watts", "Power drawn.", *_power()),
    _figure(
        "power_limit_watts",
        "Power limit in force.",
        _call("nvmlDeviceGetEnforcedPowerLimit", convert=_MILLIWATTS),
        every=30,
    ),
    _figure(
        "energy_joules_total",
        "Energy used since the driver was loaded, or since the exporter started where the GPU does"
        " not count.",
        Field(83, _MILLIJOULES),
        NvmlCall(
            ("nvmlDeviceGetTotalEnergyConsumption",), _MILLIJOULES, layout=ctypes.c_ulonglong * 1
        ),
        *_power("rate"),
    ),
    _figure(
        "temperature_celsius",
        "Temperature of the GPU's core.",
        # nvmlTemperature_v1_t: version, sensor (0: the core), degrees
        NvmlCall(
            ("nvmlDeviceGetTemperatureV",), _CELSIUS, layout=ctypes.c_uint * 3, pick=2, version=1
        ),
        _call("nvmlDeviceGetTemperature", convert=_CELSIUS, selector=0),
        every=5,
    ),
    _figure(
        "memory_temperature_celsius", "Temperature of GPU memory.", Field(82, _CELSIUS), every=5
    ),
    _figure(
        "temperature_limit_celsius",
        "Temperature of core or memory from which the GPU lowers its clocks.",
        every=300,
        label="sensor",
        series={
            sensor: (_call("nvmlDeviceGetTemperatureThreshold", convert=_CELSIUS, selector=kind),)
            for kind, sensor in ((1, "core"), (2, "memory"))
        },
    ),
    _figure(
        "clock_hertz",
        "Clock rate now, of the multiprocessors (sm) and of memory.",
        every=10,
        label="type",
        series={
            kind: (_call("nvmlDeviceGetClockInfo", convert=_MEGAHERTZ, selector=number),)
            for number, kind in ((1, "sm"), (2, "memory"))
        },
    ),
    _figure(
        "throttled_seconds_total",
        "Time in which clocks were held down, by the strongest reason: hw_thermal, power_brake,"
        " hw_slowdown (for another reason), sw_thermal, power (the power cap), sync_boost,"
        " board_limit, reliability. Reasons never overlap.",
        every=10,
        label="reason",
        series={
            reason: (
                NvmlCall(
                    (
                        "nvmlDeviceGetCurrentClocksEventReasons",
                        "nvmlDeviceGetCurrentClocksThrottleReasons",
                    ),
                    _is_reason(reason),
                    "rate",
                    layout=ctypes.c_ulonglong * 1,
                ),
            )
            for reason in _REASONS
        },
    ),
    _figure(
        "encoder_utilization_ratio",
        "Use of the video encoder.",
        _call("nvmlDeviceGetEncoderUtilization", convert=_PERCENT, pointers=2),
        every=10,
    ),
    _figure(
        "decoder_utilization_ratio",
        "Use of the video decoder.",
        _call("nvmlDeviceGetDecoderUtilization", convert=_PERCENT, pointers=2),
        every=10,
    ),
    _figure(
        "recovery_action",
        "What the driver asks for so that the GPU works again: 0 nothing, 1 a reset of the GPU,"
        " 2 a reboot of the node, 3 that peer-to-peer traffic is drained, 4 that and a reset,"
        " 5 recovery of the IMEX domain, 6 a reset of its bus, 7 a reboot of the system.",
        Field(230, _ACTION),
        every=10,
    ),
    _figure(
        "ecc_errors_total",
        "Memory errors since the driver was loaded, corrected or uncorrected.",
        every=30,
        label="error",
        series={"corrected": (Field(3, _ERRORS),), "uncorrected": (Field(4, _ERRORS),)},
    ),
    _figure(
        "retired_pages_pending",
        "Whether a page waits for the next start of the driver to be taken out of use.",
        Field(31, _FLAG),
        every=30,
    ),
    _figure(
        "remapped_rows",
        "Rows of GPU memory that were replaced by spare ones, by the kind of error.",
        every=30,
        label="error",
        series={"correctable": (Field(142, _ROWS),), "uncorrectable": (Field(143, _ROWS),)},
    ),
    _figure(
        "remapped_rows_pending",
        "Whether a row waits for the next reset of the GPU to be replaced.",
        Field(144, _FLAG),
        every=30,
    ),
    _figure(
        "remapped_rows_failed",
        "Whether a row could not be replaced; the GPU has to be exchanged then.",
        Field(145, _FLAG),
        every=30,
    ),
    _figure(
        "pcie_bytes_total",
        "Bytes over PCIe since the exporter started; without GPM what is above 4 GiB between two"
        " readings is missed.",
        label="direction",
        # Not nvmlDeviceGetPcieThroughput: its two calls block for some 40 ms per GPU.
        series={
            direction: (
                GpmMetric(of_gpm, _MEBIBYTES_A_SECOND, "rate"),
                Field(counter, _BYTES_COUNTED, "wraps"),
            )
            for direction, of_gpm, counter in (("transmit", 20, 197), ("receive", 21, 198))
        },
    ),
    _figure(
        "pcie_replays_total",
        "PCIe packets that had to be sent again.",
        Field(94, _ERRORS),
        every=30,
    ),
    _figure(
        "pcie_link_width",
        "PCIe lanes in use.",
        _call("nvmlDeviceGetCurrPcieLinkWidth", convert=_LANES),
        every=30,
    ),
    _figure(
        "pcie_link_width_max",
        "PCIe lanes that GPU and slot can use.",
        _call("nvmlDeviceGetMaxPcieLinkWidth", convert=_LANES),
        every=300,
    ),
    _figure(
        "nvlink_bytes_total",
        "Payload over all NVLinks, as seen from the GPU.",
        label="direction",
        series={
            direction: (
                Field(counter, _KIBIBYTES_COUNTED, scopes=_ALL_LINKS),
                GpmMetric(of_gpm, _MEBIBYTES_A_SECOND, "rate"),
            )
            for direction, counter, of_gpm in (("transmit", 138, 61), ("receive", 139, 60))
        },
    ),
    _figure("nvlink_links", "NVLinks that the GPU has.", Field(91, _LANES), every=300),
    _figure(
        "nvlink_links_active",
        "NVLinks that are active or asleep, neither down nor with their traffic disabled.",
        Field(165, _is_up, scopes=_LINKS),
        every=30,
    ),
    _figure(
        "nvlink_errors_total",
        "Errors of all NVLinks: crc (of flow control), replay, recovery; on Blackwell recovery, "
        "recovery_failed, malformed, overrun, receive, receive_remote, receive_general, integrity, "
        "discarded, effective (after forward error correction), symbol (before it).",
        every=30,
        label="type",
        # of all links, then of each link on Hopper, then on Blackwell
        series={
            "crc": (Field(38, _ERRORS), _links(163)),
            "replay": (Field(52, _ERRORS), _links(161)),
            "recovery": (Field(59, _ERRORS), _links(162), _links(215)),
            "recovery_failed": (_links(214),),
            "malformed": (_links(206),),
            "overrun": (_links(207),),
            "receive": (_links(208),),
            "receive_remote": (_links(209),),
            "receive_general": (_links(210),),
            "integrity": (_links(211),),
            "discarded": (_links(212),),
            "effective": (_links(219),),
            "symbol": (_links(221),),
        },
    ),
)
"""What is read of each GPU, in the order of the documentation."""


def series_on(kind: On) -> Sequence[GpuSeries]:
    """Return the series of a GPU ("gpu") or of an instance, with each of their sources."""
    return [
        GpuSeries(figure, label, source)
        for figure in FIGURES
        for label, sources in figure.series.items()
        for source in sources
        if source.on in (kind, "both")
    ]


_PROCESS_LISTS = "nvmlDeviceGet{Compute,Graphics,MPSCompute}RunningProcesses"
_ALLOCATION = "the prolog's map or Slurm's environment"

INFO = metric(
    "hpml_gpu_info",
    "A GPU or MIG instance; mig is empty, enabled for a GPU that is split, or the profile of the"
    " instance, parent the UUID of its GPU, gpu_instance the number of its GPU instance.",
    "uuid index name pci_bus_id minor serial mig parent gpu_instance",
    source="nvitop: nvmlDeviceGetUUID, GetName, GetPciInfo, GetMinorNumber, GetSerial, GetMigMode",
)
DRIVER = metric(
    "hpml_gpu_driver_info",
    "Version of the NVIDIA driver.",
    "version",
    source="nvmlSystemGetDriverVersion",
)
UP = metric(
    "hpml_gpu_up",
    "Whether the GPU answers; 0 when it is lost. One that was lost before its UUID was known has"
    " its PCI address as uuid.",
    "uuid",
    source="errors of NVML's calls; /sys/bus/pci/devices",
)
GPUS = metric(
    "hpml_gpus",
    "GPUs of the node by state: up, or lost, also those that were lost before they had a name.",
    "state",
    source="nvmlDeviceGetCount and errors of NVML's calls",
)
XID_ERRORS = metric(
    "hpml_gpu_xid_errors_total",
    "Errors that the driver reported (XID) since it was loaded and an exporter looked; those of"
    " before a restart of the node's exporter are kept in /run/hpml/xids.json.",
    "uuid xid",
    source="nvmlEventSetWait_v2",
)
XID_LAST = metric(
    "hpml_gpu_xid_last_timestamp_seconds",
    "Unix time at which this XID was last reported.",
    "uuid xid",
    source="nvmlEventSetWait_v2",
)
PROCESSES = metric(
    "hpml_gpu_processes",
    "Processes that have the GPU open, of jobs and of no job (owner=none).",
    "uuid owner",
    source=_PROCESS_LISTS,
)
JOB_GPU_INFO = metric(
    "hpml_job_gpu_info",
    "A GPU that the job was allocated (allocated=1) or has a process on; allocated is empty where"
    " the allocation is unknown. At most one series per GPU has owner=1, of several jobs that with"
    " the allocation and the lowest number: join with that.",
    "cluster jobid uuid allocated owner",
    source=f"{_ALLOCATION}, and the processes of NVML",
)
JOB_GPUS_ALLOCATED = metric(
    "hpml_job_gpus_allocated",
    "GPUs of this node that the job was allocated; absent if that is unknown.",
    "cluster jobid",
    source=f"{_ALLOCATION}; by UUID, PCI address and minor number",
)
JOB_GPUS_USED = metric(
    "hpml_job_gpus_used",
    "Allocated GPUs on which the job has a process; every GPU that it uses if the allocation is "
    "unknown. Absent while the processes of one of them cannot be read.",
    "cluster jobid",
    source=_PROCESS_LISTS,
)
JOB_GPUS_FOREIGN = metric(
    "hpml_job_gpus_foreign",
    "GPUs on which the job has a process although they were not allocated to it.",
    "cluster jobid",
    source=_PROCESS_LISTS,
)
JOB_GPU_PROCESSES = metric(
    "hpml_job_gpu_processes",
    "Processes of the job that have the GPU open; 0 for an allocated GPU that it does not use.",
    "cluster jobid uuid",
    source=_PROCESS_LISTS,
)
JOB_GPU_MEMORY_USED = metric(
    "hpml_job_gpu_memory_used_bytes",
    "GPU memory that the job's processes hold.",
    "cluster jobid uuid",
    source=_PROCESS_LISTS,
)
OF_JOBS = (
    *(JOB_GPU_INFO, JOB_GPUS_ALLOCATED, JOB_GPUS_USED, JOB_GPUS_FOREIGN),
    *(JOB_GPU_PROCESSES, JOB_GPU_MEMORY_USED),
)
SPECS: tuple[MetricSpec, ...] = (
    *(INFO, DRIVER, UP, GPUS, *FIGURES, XID_ERRORS, XID_LAST, PROCESSES),
    *OF_JOBS,
)
"""All metrics of GPUs, in the order in which they are shown."""
