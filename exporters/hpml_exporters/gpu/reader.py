"""One GPU or MIG instance: what it can be asked is found out once, then read at its own rhythm."""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hpml_exporters.gpu.calls import (
    FIELDS,
    REASONS,
    Call,
    Field,
    Fields,
    Memory,
    Reading,
    Reasons,
    Temperature,
    Utilization,
    Values,
    Violations,
)
from hpml_exporters.gpu.counting import Cost, Integral, Wrapping, periods
from hpml_exporters.gpu.devices import Place
from hpml_exporters.gpu.gpm import Gpm
from hpml_exporters.gpu.nvml import UNSUPPORTED, GpuLostError, Nvml, check

__all__ = ["Pace", "Reader", "Totals"]

_UNKNOWN = 999  # NVML_ERROR_UNKNOWN: what some drivers say of a GPU that is gone
_MISSES = 3
_GAP = 2.5
"""A reading stands for at most so many of its periods."""


class Pace(NamedTuple):
    """How often a GPU is read.

    Attributes:
        interval: seconds between two calls of `Reader.read`.
        budget: CPU seconds per second that the readings of one GPU may cost.
    """

    interval: float
    budget: float


_PCIE = ("pcie_transmit", "pcie_receive")
_NVLINK = ("nvlink_transmit", "nvlink_receive")


@dataclass
class Totals:
    """What has come together for one GPU; it outlives handles, readers and the driver.

    Attributes:
        integrals: by key.
        wrapping: counters that begin again, by key.
        refused: rates that GPM was asked for in vain.
        drivers: keys of totals that the driver counted, from a beginning of its own.
        ours: keys of totals that were integrated. Whichever of both a total began with it stays
            with, or it would jump.
    """

    integrals: dict[str, Integral] = field(
        default_factory=lambda: {
            key: Integral(_GAP)
            for key in (
                "busy",
                "energy",
                *_PCIE,
                *_NVLINK,
                *REASONS,
            )
        }
    )
    wrapping: dict[str, Wrapping] = field(init=False)
    refused: set[str] = field(default_factory=set)
    drivers: set[str] = field(default_factory=set)
    ours: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        """Let counters that begin again add to the totals that GPM's rates add to."""
        self.wrapping = {key: Wrapping(self.integrals[key]) for key in _PCIE}

    def pause(self) -> None:
        """Let what happens until the next reading count for nothing: nobody saw it."""
        for integral in self.integrals.values():
            integral.pause()
        for counter in self.wrapping.values():
            counter.pause()


class Reader:
    """Reads one GPU.

    Attributes:
        place: which.
        values: the latest numbers by key.
        calls: how often the driver was asked.
        unsure: whether some call failed in a way that may pass; a new reader would find out.
    """

    def __init__(
        self,
        nvml: Nvml,
        place: Place,
        totals: Totals,
        pace: Pace,
        now: float,
    ) -> None:
        """Try every kind of question and keep those that the GPU answers.

        Args:
            nvml: the library.
            place: the GPU or instance.
            totals: of its UUID.
            pace: how often, and what it may cost.
            now: seconds, monotonic.

        Raises:
            GpuLostError: it does not answer.
            DriverLostError: nothing does.
        """
        self.place = place
        self.values: Values = {}
        self.calls = 0
        self.unsure = False
        self._nvml = nvml
        self._totals = totals
        self._gpm: Gpm | None = None
        self._misses = 0
        self._tick = 0
        self._add_up_energy = False
        self._wide: set[str] = set()
        self._replaced: set[str] = set()
        self._readings: Sequence[tuple[int, int, Reading]] = ()
        self._now = now
        readings = self._instance() if place.parent else self._whole()
        self._plan(readings, pace)

    def read(self, now: float) -> None:
        """Ask what is due.

        Raises:
            GpuLostError: the GPU does not answer any more.
            DriverLostError: nothing does.
        """
        asked = unknown = 0
        for every, offset, reading in self._readings:
            if (self._tick + offset) % every and self._tick:
                continue
            asked += 1
            code = reading.read(self.values, now)
            if check(code):
                continue
            unknown += code == _UNKNOWN
            for key in reading.keys:
                self.values.pop(key, None)
        self.calls += asked
        self._tick += 1
        if self._gpm is not None and self._gpm.refused & self._replaced:
            self._totals.refused |= self._gpm.refused  # the counters in its place are asked then
            self.unsure = True
        self._misses = self._misses + 1 if asked and unknown == asked else 0
        if self._misses >= _MISSES:
            raise GpuLostError("no call says anything but NVML_ERROR_UNKNOWN")
        if self._add_up_energy and "power" in self.values:
            energy = self._totals.integrals["energy"]
            self.values["energy"] = energy.add(self.values["power"], now)

    def close(self) -> None:
        """Give back what the driver keeps for this reader."""
        if self._gpm is not None:
            self._gpm.close()

    # Which questions -------------------------------------------------------------------------

    def _instance(self) -> list[tuple[Reading, float]]:
        place, integrals = self.place, self._totals.integrals
        found = self._answered(Memory(self._nvml, place.handle))
        if place.instance >= 0:
            gpm = Gpm(self._nvml, place.parent_handle, place.instance, integrals, (), busy=True)
            found += self._with_gpm(gpm)
        return found

    def _whole(self) -> list[tuple[Reading, float]]:
        nvml, handle, integrals = self._nvml, self.place.handle, self._totals.integrals
        found = self._answered(Utilization(nvml, handle, integrals["busy"]))
        found += self._answered(Memory(nvml, handle))
        fields = self._fields()
        keys = {key for one, _ in fields for key in one.keys}
        rates = [key for key in _NVLINK if key not in keys | self._totals.drivers]
        # A counter of 32 bits holds less than a second of PCIe's traffic.
        rates += [key for key in _PCIE if key not in self._wide]
        rates = [key for key in rates if key not in self._totals.refused]
        gpm = self._with_gpm(Gpm(nvml, handle, -1, integrals, rates, busy=False))
        if gpm:
            self._replaced = keys & set(rates)
            self._totals.ours |= {*rates} & {*_NVLINK}
            for key in self._replaced:  # what GPM is going to count must not be counted again
                self._totals.wrapping[key].pause()
            fields = [one for one in fields if not set(one[0].keys) & set(rates)]
        found += gpm
        found += fields
        found += self._fallbacks(keys)
        for kind, selector in (("sm", 1), ("memory", 2)):
            call = nvml.call("nvmlDeviceGetClockInfo")
            found += self._answered(Call(call, handle, (f"clock_{kind}",), 1e6, 5, selector))
            call = nvml.call("nvmlDeviceGetMaxClockInfo")
            key = f"clock_max_{kind}"
            found += self._answered(Call(call, handle, (key,), 1e6, 300, selector))
        found += self._answered(Temperature(nvml, handle))
        limit = nvml.call("nvmlDeviceGetEnforcedPowerLimit", "nvmlDeviceGetPowerManagementLimit")
        found += self._answered(Call(limit, handle, ("power_limit",), 1e-3, 30))
        fan = nvml.call("nvmlDeviceGetFanSpeed")
        return found + self._answered(Call(fan, handle, ("fan",), 1e-2, 30))

    def _fallbacks(self, keys: set[str]) -> list[tuple[Reading, float]]:
        """What older calls and integrals can give of that for which there is no field value."""
        nvml, handle, totals = self._nvml, self.place.handle, self._totals
        found: list[tuple[Reading, float]] = []
        have = set(keys)
        if "power" not in have:
            power = nvml.call("nvmlDeviceGetPowerUsage")
            found += self._answered(Call(power, handle, ("power",), 1e-3, 1))
        if "energy" not in have:
            energy = nvml.call("nvmlDeviceGetTotalEnergyConsumption")
            call = Call(energy, handle, ("energy",), 1e-3, 1, wide=True)
            wide = [] if "energy" in totals.ours else self._answered(call)
            found += wide
            have |= {"energy"} if wide else set()
        if not totals.ours & {*Violations.keys} and not any("throttled" in key for key in have):
            violations = self._answered(Violations(nvml, handle))
            found += violations
            have |= {key for key in Violations.keys if violations and key in self.values}
        totals.drivers |= have & totals.integrals.keys() - {"busy", *_PCIE}
        self._add_up_energy = "energy" not in totals.drivers
        rest = [key for key in REASONS if key not in totals.drivers]
        reasons = self._answered(Reasons(nvml, handle, rest, totals.integrals))
        totals.ours |= {*rest} if reasons else set()
        totals.ours |= {"energy"} if self._add_up_energy and "power" in self.values else set()
        return found + reasons

    def _with_gpm(self, gpm: Gpm) -> list[tuple[Reading, float]]:
        if not check(gpm.open()):
            return []
        self._gpm = gpm
        found = self._answered(gpm)
        if not found:
            gpm.close()
        return found

    def _fields(self) -> list[tuple[Reading, float]]:
        """Field values that the GPU has, each by itself with what it costs."""
        together = Fields(self._nvml, self.place.handle, FIELDS, {})
        if not check(together.read({}, self._now)):
            return []
        found = []
        for one, code in zip(FIELDS, together.codes, strict=True):
            if code in UNSUPPORTED or one.key in self._totals.ours:
                continue
            alone = Fields(self._nvml, self.place.handle, [one], self._totals.wrapping)
            answered = self._answered(alone)
            if one.key in self.values:
                found += answered
                if alone.wide:
                    self._wide.add(one.key)
            else:
                self.unsure = True
        return found

    def _answered(self, reading: Reading) -> list[tuple[Reading, float]]:
        """Return the reading with its cost, or nothing if it is not for this GPU."""
        costs = []
        for _ in range(3):  # the first may initialise things
            wall, cpu = time.perf_counter(), time.thread_time()
            code = reading.read(self.values, self._now)
            # A call that sleeps costs no CPU time, but all others wait for it.
            spent = time.thread_time() - cpu + (time.perf_counter() - wall) / 20
            if check(code):
                costs.append(spent)
            elif code in UNSUPPORTED:
                return []
        if not costs:  # perhaps later; something else may stand in for it until then
            self.unsure = True
            return []
        return [(reading, min(costs))]

    def _plan(self, readings: Sequence[tuple[Reading, float]], pace: Pace) -> None:
        """Give each reading its rhythm; those of one rhythm are spread over its ticks."""
        costs = [  # what is wanted every second is wanted at each reading
            Cost(cost, pace.interval if reading.period <= 1 else reading.period, reading.most)
            for reading, cost in readings
        ]
        chosen = [
            (max(1, round(seconds / pace.interval)), reading)
            for seconds, (reading, _) in zip(periods(costs, pace.budget), readings, strict=True)
        ]
        for every, reading in chosen:
            for key in reading.keys:
                if key in self._totals.integrals:
                    self._totals.integrals[key].most = _GAP * every * pace.interval
        if self._add_up_energy:  # at each call of `read`, out of the latest power
            self._totals.integrals["energy"].most = _GAP * pace.interval
        phase = zlib.crc32(self.place.uuid.encode())
        self._readings = [
            (every, (index + phase) % every, reading)
            for index, (every, reading) in enumerate(self._together(chosen))
        ]

    def _together(self, chosen: Sequence[tuple[int, Reading]]) -> list[tuple[int, Reading]]:
        """Ask for all field values of one rhythm with one call."""
        fields: dict[int, list[Field]] = {}
        found: list[tuple[int, Reading]] = []
        for every, reading in chosen:
            if isinstance(reading, Fields):
                fields.setdefault(every, []).extend(reading.fields)
            else:
                found.append((every, reading))
        return found + [
            (every, Fields(self._nvml, self.place.handle, some, self._totals.wrapping))
            for every, some in fields.items()
        ]
