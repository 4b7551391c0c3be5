"""What a simulated node has (GPUs, MIG devices, processes, events, faults) and its state file."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from deploy.gpusim._curves import Number, integral, parse

XID = 8  # nvmlEventTypeXidCriticalError
_GIB = 1 << 30


@dataclass(frozen=True)
class Process:
    """A process on a GPU, seen by NVML as long as it lives (`ghost`: also when it does not).

    `kind` is C (compute), G (graphics) or M (client of MPS); `memory` is in bytes, shares are
    percentages.
    """

    pid: int
    memory: Number = _GIB
    kind: str = "C"
    sm: Number = 50
    mem: Number = 10
    gi: int | None = None
    ci: int | None = None
    ghost: bool = False

    def line(self) -> str:
        """The line of a state file."""
        names = ("memory", "sm", "mem", "gi", "ci")
        given = {name: getattr(self, name) for name in names} | {"ghost": int(self.ghost)}
        words = [f"{name}={number}" for name, number in given.items() if number is not None]
        return " ".join([f"process {self.pid} {self.kind}", *words])

    @classmethod
    def parse(cls, rest: str) -> Process:
        """Return the process of a line, without its first word."""
        pid, kind, *words = rest.split()
        given: Any = {name: parse(text) for name, text in (word.split("=") for word in words)}
        return cls(int(pid), kind=kind, **given | {"ghost": given.get("ghost") == 1})


@dataclass(frozen=True)
class Event:
    """Something that happens once, as soon as a state file has it; ids of a GPU grow."""

    number: int
    data: int
    kind: int = XID

    def line(self) -> str:
        """The line of a state file."""
        return f"event {self.number} {self.kind} {self.data}"


@dataclass(frozen=True)
class Fault:
    """What goes wrong with a function of NVML (pattern, `*` for all), a `field:186` or a `gpm:20`.

    `field:165:17` is field 165 of link 17.
    `kind` is fault (`amount` is the code that it returns) or stuck (seconds that each call hangs,
    but only while the state file demands it).
    """

    function: str
    amount: float
    kind: str = "fault"
    gpu: int | None = None

    def line(self) -> str:
        """The line of a state file."""
        return f"{self.kind} {self.function} {self.amount} {'*' if self.gpu is None else self.gpu}"


Setting: TypeAlias = Number | str
_GPM = "graphics sm occupancy tensor dram".split()
_THROTTLE = """
idle app_clocks sw_power hw_slowdown sync_boost sw_thermal hw_thermal hw_power_brake
display""".split()
_COUNTED = (
    *("power", "pcie_tx", "pcie_rx", "nvlink_tx", "nvlink_rx"),
    *(f"gpm_{metric}" for metric in _GPM),
)
"""Rates whose integral is a counter; each has a `_base`, the counter's value at the epoch."""
_TEXTS = frozenset("driver name uuid serial bus_id pci_id pci_subsystem".split())


def _table(text: str) -> dict[str, Any]:
    """Return settings of words NAME=VALUE."""
    pairs = (word.split("=") for word in text.split())
    return {name: int(number) if number.isdigit() else number for name, number in pairs}


_A100 = dict.fromkeys([f"throttle_{reason}" for reason in _THROTTLE], 0) | _table("""
name= uuid= serial= bus_id= minor=0 pci_id=20B210DE pci_subsystem=147F10DE cc_major=8 cc_minor=0
compute_mode=0 util=0 mem_util=0 enc_util=0 dec_util=0 temp=35 temp_shutdown=95 temp_slowdown=92
temp_mem_max=105 mem_temp=40 power=60 power_limit=400 power_enforced=400 clock_graphics=210
clock_sm=210 clock_mem=1593 clock_video=585 max_graphics=1410 max_sm=1410 max_mem=1593
max_video=1290 ecc_mode=1 ecc_vol_cor=0 ecc_vol_unc=0 ecc_agg_cor=0 ecc_agg_unc=0 pcie_gen=4
pcie_width=16 pcie_max_gen=4 pcie_max_width=16 pcie_replay=0 pcie_tx=0 pcie_rx=0 pcie_bits=32
nvlink_links=12 nvlink_state=1 nvlink_speed=25000 nvlink_crc=0 nvlink_replay=0 nvlink_recovery=0
nvlink_tx=0 nvlink_rx=0 pstate=0 persistence=1 display_active=0 display_mode=0 remapped_cor=0
remapped_unc=0 remapped_pending=0 remapped_failure=0 mig_mode=0 mig_max=7 mem_total=85899345920
mem_reserved=629145600 mem_base=4194304 bar1_total=137438953472 bar1_used=1048576""")
_H100 = dict.fromkeys([f"gpm_{metric}" for metric in _GPM], 0) | _table("""
pci_id=233010DE pci_subsystem=16C110DE cc_major=9 power_limit=700 power_enforced=700 power=75
clock_graphics=345 clock_sm=345 clock_mem=2619 max_graphics=1980 max_sm=1980 max_mem=2619 pcie_gen=5
pcie_max_gen=5 nvlink_links=18 gpm=1""")
_OTHERS = "fan mem_used lost retired_sbe retired_dbe retired_pending recovery_action gi ci".split()
_BLACKWELL = [f"nvlink_field{field}" for field in (*range(206, 213), 214, 215, 219, 221)]
_KNOWN = frozenset([*_A100, *_H100, *_OTHERS, *_BLACKWELL, *(f"{rate}_base" for rate in _COUNTED)])


@dataclass(frozen=True, init=False)
class Device:
    """A GPU or a MIG device; its settings are attributes: None is not supported there.

    Units are percent, bytes, watts, degrees Celsius and MHz; the `throttle_` shares are 0 to 1, the
    `nvlink_` counters those of one link, and of `pcie_bits` bits (32 or 64) fields 197 and 198.
    """

    settings: Mapping[str, Setting]
    processes: tuple[Process, ...]
    events: tuple[Event, ...]
    mig: tuple[Device, ...]

    def __init__(
        self,
        settings: Mapping[str, Setting] | None = None,
        processes: tuple[Process, ...] = (),
        events: tuple[Event, ...] = (),
        mig: tuple[Device, ...] = (),
        **changes: Setting | None,
    ) -> None:
        if unknown := changes.keys() - _KNOWN:
            raise TypeError(f"a GPU has no {', '.join(sorted(unknown))}")
        given = {**(settings or {}), **changes}
        kept = {name: setting for name, setting in given.items() if setting is not None}
        vars(self).update(settings=kept, processes=processes, events=events, mig=mig)

    def __getattr__(self, name: str) -> Any:
        """The setting of that name."""
        if name not in _KNOWN:
            raise AttributeError(name)
        return self.settings.get(name)

    def changed(self, **changes: Any) -> Device:
        """The same device with other settings, processes, events or MIG devices."""
        return replace(self, **changes)

    def total(self, rate: str, t: float) -> float:
        """Return a counter `t` seconds after the epoch: joules, bytes, seconds."""
        base: float = self.settings.get(f"{rate}_base", 0)  # type: ignore[assignment]
        return base + integral(self.settings.get(rate, 0), t)  # type: ignore[arg-type]

    def going_on(self, before: Device, t: float) -> Device:
        """Return the same device with counters that are at `t` what they were before."""
        rates = [rate for rate in _COUNTED if getattr(self, rate) != getattr(before, rate)]
        unset = self.changed(**{f"{rate}_base": 0 for rate in rates})
        jumps = {f"{rate}_base": before.total(rate, t) - unset.total(rate, t) for rate in rates}
        return self.changed(**jumps)

    def lines(self) -> Iterator[str]:
        """The lines of a state file."""
        yield from (f"{name} {setting}" for name, setting in self.settings.items() if setting != "")
        yield from (process.line() for process in self.processes)
        yield from (event.line() for event in self.events)
        for device in self.mig:
            yield from ("mig", *device.lines())


def a100(number: int, node: str = "", **settings: Any) -> Device:
    """An A100 of 80 GB, idle; `number` makes its UUID (with the node's name) and PCI address."""
    identity = {
        "name": "NVIDIA A100-SXM4-80GB (simulated)",
        "uuid": f"GPU-{uuid.uuid5(uuid.NAMESPACE_URL, f'hpml-gpusim/{node}{number}')}",
        "serial": f"132462200{number:04d}",
        "bus_id": f"0000:{0x07 + 8 * number:02x}:00.0",
        "minor": number,
    }
    return Device(_A100 | identity, **settings)


def h100(number: int, node: str = "", **settings: Any) -> Device:
    """An H100 of 80 GB, idle: it has GPM, and 18 NVLinks."""
    return a100(number, node, **{**_H100, "name": "NVIDIA H100 80GB HBM3 (simulated)", **settings})


def divided(gpu: Device, *slices: int) -> Device:
    """The GPU in MIG mode with one MIG device per number of slices (of 7): 1, 2, 3, 4 or 7."""
    model = gpu.name.removesuffix(" (simulated)")
    gpm = {f"gpm_{metric}" for metric in _GPM} & gpu.settings.keys()
    devices = []
    for index, size in enumerate(slices):
        memory = {1: 10, 2: 20, 3: 40, 4: 40, 7: 80}[size]
        devices.append(
            Device(
                dict.fromkeys(sorted(gpm), 0),
                name=f"{model} MIG {size}g.{memory}gb (simulated)",
                uuid=f"MIG-{uuid.uuid5(uuid.NAMESPACE_URL, f'{gpu.uuid}/{index}')}",
                mem_total=memory * _GIB,
                mem_reserved=0,
                mem_base=12 << 20,
                bar1_total=16 * _GIB,
                bar1_used=0,
                compute_mode=0,
                gi=7 + index,
                ci=0,
            )
        )
    return gpu.changed(mig_mode=1, mig=tuple(devices))


@dataclass(frozen=True)
class State:
    """A node's driver and GPUs; their order is NVML's index.

    Attributes:
        epoch: from which all curves count, seconds since 1970.
        generation: another one means that the driver was loaded again: clients must initialise.
        lost: all GPUs at once.
    """

    gpus: tuple[Device, ...]
    epoch: float = field(default_factory=time.time)
    driver: str = "550.90.07"
    cuda: int = 12040
    generation: int = 1
    lost: bool = False
    faults: tuple[Fault, ...] = ()

    def text(self) -> str:
        """The state file."""
        head = ("epoch", "generation", "driver", "cuda")
        lines = ["hpml-gpusim 1", *(f"{name} {getattr(self, name)}" for name in head)]
        lines += [f"lost {int(self.lost)}", *(fault.line() for fault in self.faults)]
        for gpu in self.gpus:
            lines += ["gpu", *gpu.lines()]
        return "\n".join([*lines, ""])

    @classmethod
    def parse(cls, text: str) -> State:
        """Return the state of a state file.

        Raises:
            ValueError: a line is not understood; the message has it.
        """
        head: dict[str, Any] = {}
        faults: list[Fault] = []
        gpus: list[dict[str, Any]] = []
        settings = head
        for line in text.splitlines()[1:]:
            name, _, rest = line.strip().partition(" ")
            match name:
                case "gpu":
                    settings = {}
                    gpus.append({"settings": settings, "processes": [], "events": [], "mig": []})
                case "mig":
                    settings = {}
                    gpus[-1]["mig"].append(settings)
                case "process":
                    gpus[-1]["processes"].append(Process.parse(rest))
                case "event":
                    number, kind, data = map(int, rest.split())
                    gpus[-1]["events"].append(Event(number, data, kind))
                case "fault" | "stuck":
                    function, amount, gpu = rest.split()
                    index = None if gpu == "*" else int(gpu)
                    faults.append(Fault(function, float(amount), name, index))
                case _ if name and not name.startswith("#"):
                    settings[name] = rest if name in _TEXTS else parse(rest)
        devices = [
            Device(
                each["settings"],
                tuple(each["processes"]),
                tuple(each["events"]),
                tuple(Device(mig) for mig in each["mig"]),
            )
            for each in gpus
        ]
        return cls(tuple(devices), **head, faults=tuple(faults))

    def changed(self, index: int, **settings: Any) -> State:
        """Return the state with other settings for one GPU; its counters continue from here."""
        return self.replaced(index, self.gpus[index].changed(**settings))

    def replaced(self, index: int, gpu: Device) -> State:
        """Return the state with one GPU replaced; its counters continue from here."""
        t = max(0.0, time.time() - self.epoch)
        before = self.gpus[index]
        pairs = zip(gpu.mig, before.mig, strict=False)
        mig = tuple(each.going_on(old, t) for each, old in pairs)
        gpu = gpu.changed(mig=mig or gpu.mig).going_on(before, t)
        return replace(self, gpus=(*self.gpus[:index], gpu, *self.gpus[index + 1 :]))
