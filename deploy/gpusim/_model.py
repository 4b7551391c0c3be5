"""What a simulated node has (GPUs, MIG devices, processes, events, faults) and its state file."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from deploy.gpusim._curves import Constant, Number, Ramp, Sine, Square, integral, later, text, value

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["TOTALS", "XID", "Event", "Fault", "Gpu", "Mig", "Process", "State"]

XID = 8  # nvmlEventTypeXidCriticalError
GIB = 1 << 30
_T = TypeVar("_T", "Gpu", "Mig", "Process")

# Rates whose integral is a counter; each has a `_base`, the counter's value at the epoch.
TOTALS = (
    *("power", "pcie_tx", "pcie_rx", "nvlink_tx", "nvlink_rx"),
    *("throttle_idle", "throttle_app_clocks", "throttle_sw_power", "throttle_hw_slowdown"),
    *("throttle_sync_boost", "throttle_sw_thermal", "throttle_hw_thermal"),
    *("throttle_hw_power_brake", "throttle_display", "throttle_board_limit"),
    *("throttle_low_util", "throttle_reliability", "throttle_base_clocks"),
    *("gpm_graphics", "gpm_sm", "gpm_occupancy", "gpm_integer", "gpm_tensor", "gpm_dfma"),
    *("gpm_hmma", "gpm_imma", "gpm_dram", "gpm_fp64", "gpm_fp32", "gpm_fp16"),
)


@dataclass(frozen=True)
class Process:
    """A process on a GPU, seen by NVML as long as it lives (`ghost`: also when it does not).

    `kind` is C (compute), G (graphics) or M (client of MPS); `memory` is in bytes, shares are
    percentages.
    """

    pid: int
    memory: Number = GIB
    kind: str = "C"
    sm: Number = 50
    mem: Number = 10
    enc: Number = 0
    dec: Number = 0
    gi: int | None = None
    ci: int | None = None
    ghost: bool = False

    def line(self) -> str:
        """The line of a state file."""
        words = [f"process {self.pid} {self.kind}"]
        words += [
            f"{name}={text(getattr(self, name))}" for name in ("memory", "sm", "mem", "enc", "dec")
        ]
        words += [
            f"{name}={getattr(self, name)}"
            for name in ("gi", "ci")
            if getattr(self, name) is not None
        ]
        return " ".join(words + ["ghost=1"] * self.ghost)


@dataclass(frozen=True)
class Event:
    """Something that happens once, as soon as a state file has it; ids of a GPU grow."""

    number: int
    data: int
    kind: int = XID
    gi: int | None = None
    ci: int | None = None

    def line(self) -> str:
        """The line of a state file."""
        where = "" if self.gi is None else f" {self.gi} {self.ci or 0}"
        return f"event {self.number} {self.kind} {self.data}{where}"


@dataclass(frozen=True)
class Fault:
    """What goes wrong with a function of NVML (pattern, `*` for all), a `field:186` or a `gpm:20`.

    `kind` is fault (`amount` is the code that it returns), slow (milliseconds that each call takes
    longer) or stuck (seconds that each call hangs, at most as long as the state file says so).
    """

    function: str
    amount: float
    kind: str = "fault"
    gpu: int | None = None

    def line(self) -> str:
        """The line of a state file."""
        where = "*" if self.gpu is None else self.gpu
        return f"{self.kind} {self.function} {text(self.amount)} {where}"


@dataclass(frozen=True)
class Device:
    """What GPUs and MIG devices have in common; a value of None is not supported there."""

    name: str = ""
    uuid: str = ""
    mem_total: Number | None = None
    mem_reserved: Number | None = None
    mem_used: Number | None = None  # None: mem_base and what the living processes hold
    mem_base: Number | None = None
    bar1_total: Number | None = None
    bar1_used: Number | None = None
    compute_mode: Number | None = 0
    gpm_graphics: Number | None = None  # GPM: percent
    gpm_sm: Number | None = None
    gpm_occupancy: Number | None = None
    gpm_integer: Number | None = None
    gpm_tensor: Number | None = None
    gpm_dfma: Number | None = None
    gpm_hmma: Number | None = None
    gpm_imma: Number | None = None
    gpm_dram: Number | None = None
    gpm_fp64: Number | None = None
    gpm_fp32: Number | None = None
    gpm_fp16: Number | None = None
    bases: tuple[tuple[str, float], ...] = ()  # what counters of TOTALS had at the epoch

    def total(self, rate: str, t: float) -> float:
        """A counter of TOTALS `t` seconds after the epoch: joules, bytes, seconds."""
        return dict(self.bases).get(rate, 0.0) + integral(getattr(self, rate) or 0, t)

    def lines(self) -> Iterator[str]:
        """The lines of a state file, nested parts left out."""
        for each in dataclasses.fields(self):
            setting = getattr(self, each.name)
            if isinstance(setting, str):
                yield from [f"{each.name} {setting}"] * bool(setting)
            elif isinstance(setting, int | float | Constant | Square | Sine | Ramp):
                yield f"{each.name} {text(setting)}"
        for rate, base in self.bases:
            yield f"{rate}_base {text(base)}"

    def moved(self, t: float) -> tuple[tuple[str, float], ...]:
        """The bases for an epoch that is `t` seconds later, so that no counter jumps."""
        rates = [rate for rate in TOTALS if getattr(self, rate, None) is not None]
        return tuple((rate, self.total(rate, t)) for rate in rates)


@dataclass(frozen=True)
class Mig(Device):
    """A MIG device: an instance of a GPU with its own memory and processes."""

    gi: int = 1
    ci: int = 0
    gi_slices: int = 1
    ci_slices: int = 1
    sm_count: int = 14
    copy_engines: int = 1


@dataclass(frozen=True)
class Gpu(Device):
    """One GPU, an idle A100 of 80 GB unless told otherwise; units as in keys.h."""

    serial: str = ""
    bus_id: str = ""
    pci_id: str = "20B210DE"
    pci_subsystem: str = "147F10DE"
    vbios: str = "92.00.45.00.03"
    cpus: str = ""  # a list such as 0-15,64-79
    numa: str = ""
    minor: int = 0
    cc_major: int = 8
    cc_minor: int = 0
    arch: int = 7
    brand: int = 14
    cores: int = 6912
    bus_width: int = 5120
    util: Number | None = 0
    mem_util: Number | None = 0
    enc_util: Number | None = 0
    dec_util: Number | None = 0
    jpg_util: Number | None = 0
    ofa_util: Number | None = 0
    temp: Number | None = 35
    mem_temp: Number | None = 40
    temp_shutdown: Number | None = 92
    temp_slowdown: Number | None = 89
    temp_mem_max: Number | None = 95
    temp_gpu_max: Number | None = 85
    power: Number | None = 60  # watts; its integral is the energy
    power_limit: Number | None = 400
    power_default: Number | None = 400
    power_min: Number | None = 100
    power_max: Number | None = 400
    power_enforced: Number | None = 400
    clock_graphics: Number | None = 210
    clock_sm: Number | None = 210
    clock_mem: Number | None = 1593
    clock_video: Number | None = 585
    max_graphics: Number | None = 1410
    max_sm: Number | None = 1410
    max_mem: Number | None = 1593
    max_video: Number | None = 1290
    ecc_mode: Number | None = 1
    ecc_vol_cor: Number | None = 0
    ecc_vol_unc: Number | None = 0
    ecc_agg_cor: Number | None = 0
    ecc_agg_unc: Number | None = 0
    pcie_gen: Number | None = 4
    pcie_width: Number | None = 16
    pcie_max_gen: Number | None = 4
    pcie_max_width: Number | None = 16
    pcie_replay: Number | None = 0
    pcie_tx: Number | None = 0  # bytes a second
    pcie_rx: Number | None = 0
    pcie_bits: Number | None = 32  # of the counters in fields 197 and 198, which wrap; or 64
    nvlink_links: Number | None = 12
    nvlink_speed: Number | None = 25000  # Mb/s of one link, in NVML's unit
    nvlink_version: Number | None = 4
    nvlink_crc: Number | None = 0  # of each link, as are the next ones
    nvlink_replay: Number | None = 0
    nvlink_recovery: Number | None = 0
    nvlink_tx: Number | None = 0  # bytes a second
    nvlink_rx: Number | None = 0
    nvlink_counts: Number | None = None  # 1: has the fields 202 and 204
    throttle_idle: Number | None = 0  # share of time for this reason, 0 to 1
    throttle_app_clocks: Number | None = 0
    throttle_sw_power: Number | None = 0
    throttle_hw_slowdown: Number | None = 0
    throttle_sync_boost: Number | None = 0
    throttle_sw_thermal: Number | None = 0
    throttle_hw_thermal: Number | None = 0
    throttle_hw_power_brake: Number | None = 0
    throttle_display: Number | None = 0
    throttle_board_limit: Number | None = 0
    throttle_low_util: Number | None = 0
    throttle_reliability: Number | None = 0
    throttle_base_clocks: Number | None = 0
    fan: Number | None = None
    pstate: Number | None = 0
    persistence: Number | None = 1
    display_active: Number | None = 0
    display_mode: Number | None = 0
    retired_sbe: Number | None = None
    retired_dbe: Number | None = None
    retired_pending: Number | None = None
    remapped_cor: Number | None = 0
    remapped_unc: Number | None = 0
    remapped_pending: Number | None = 0
    remapped_failure: Number | None = 0
    gpm: Number | None = None  # 1 on Hopper and later
    lost: Number | None = None  # 1 and more: fallen off the bus
    mig_mode: Number | None = 0
    mig_pending: Number | None = None
    mig_max: Number | None = 7
    processes: tuple[Process, ...] = ()
    events: tuple[Event, ...] = ()
    mig: tuple[Mig, ...] = ()

    def memory_used(self, t: float) -> float:
        """Bytes in use, if all processes live: NVML's second form, without what is reserved."""
        if self.mem_used is not None:
            return value(self.mem_used, t)
        return value(self.mem_base or 0, t) + sum(value(each.memory, t) for each in self.processes)

    def at(self, t: float) -> Gpu:
        """The same GPU for an epoch that is `t` seconds later: curves and counters go on."""
        mig = tuple(_later(each, t, bases=each.moved(t)) for each in self.mig)
        processes = tuple(_later(each, t) for each in self.processes)
        return _later(self, t, bases=self.moved(t), mig=mig, processes=processes)


def _later(of: _T, t: float, **settings: Any) -> _T:
    curves = {each.name: getattr(of, each.name) for each in dataclasses.fields(of)}
    moved = {
        name: later(curve, t)
        for name, curve in curves.items()
        if isinstance(curve, Square | Sine | Ramp)
    }
    return replace(of, **moved, **settings)


@dataclass(frozen=True)
class State:
    """A node's driver and GPUs; their order is NVML's index."""

    gpus: tuple[Gpu, ...]
    epoch: float = field(
        default_factory=time.time
    )  # all curves count from here; seconds since 1970
    driver: str = "550.90.07"
    nvml: str = "12.550.90.07"
    cuda: int = 12040
    generation: int = (
        1  # another one: the driver was loaded again, and clients must initialise again
    )
    lost: bool = False  # all GPUs at once
    faults: tuple[Fault, ...] = ()

    def text(self) -> str:
        """The state file."""
        lines = ["hpml-gpusim 1", f"epoch {self.epoch!r}", f"generation {self.generation}"]
        lines += [f"driver {self.driver}", f"nvml {self.nvml}", f"cuda {self.cuda}"]
        lines += ["lost 1"] * self.lost + [fault.line() for fault in self.faults]
        for gpu in self.gpus:
            lines += ["gpu", *gpu.lines()]
            lines += [process.line() for process in gpu.processes]
            lines += [event.line() for event in gpu.events]
            for mig in gpu.mig:
                lines += ["mig", *mig.lines()]
        return "\n".join([*lines, ""])

    def changed(self, index: int, **settings: object) -> State:
        """The state with other settings for one GPU, at the same epoch; curves go on."""
        gpu = replace(self.gpus[index], **settings)  # type: ignore[arg-type]
        return replace(self, gpus=(*self.gpus[:index], gpu, *self.gpus[index + 1 :]))

    def at(self, now: float | None = None) -> State:
        """The state for a new epoch, now unless told: change power or other rates after this.

        Curves and counters go on where they are in this state, so nothing jumps.
        """
        moment = time.time() if now is None else now
        gpus = tuple(gpu.at(moment - self.epoch) for gpu in self.gpus)
        return replace(self, epoch=moment, gpus=gpus)
