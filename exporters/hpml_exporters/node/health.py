"""Node health: clock, file systems, memory, links, heat, stuck processes.

A process in uninterruptible sleep waits for a disk or a file server and cannot be ended. Loaders
that read from a busy server are in that state at almost every reading, but wake up in between: only
a process without a context switch for ten minutes is stuck.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from prometheus_client.core import Metric

from hpml_exporters.core.collector import MetricSpec, NotHereError, Row, families, metric
from hpml_exporters.core.procfs import process_ids, read_or_empty, stat, text
from hpml_exporters.node.disks import local_mounts
from hpml_exporters.options import Context
from hpml_orchestrator.records.files import names_in
from hpml_orchestrator.records.mounts import parse_mounts

_SYNCHRONIZED = metric(
    "hpml_node_clock_synchronized",
    "Whether the clock is synchronised, by NTP or PTP: its error is known to be below 16 s.",
    source="adjtimex(2), maxerror or STA_UNSYNC, which chrony sets without rtcsync",
)
_CLOCK_ERROR = metric(
    "hpml_node_clock_error_seconds",
    "How far the clock may be off at most, by the kernel's own estimate; 16 s: unknown.",
    source="adjtimex(2), maxerror",
)
_STUCK = metric(
    "hpml_node_stuck_processes",
    "Processes in uninterruptible sleep without a context switch for ten minutes.",
    source="/proc/*/stat, state D, and /proc/*/status",
)
_ZOMBIES = metric(
    "hpml_node_zombies",
    "Processes that have ended and that their parents have not waited for.",
    source="/proc/*/stat, state Z",
)
_READ_ONLY = metric(
    "hpml_filesystem_read_only",
    "Whether a local file system that was mounted to be written is read-only, as after errors.",
    "mountpoint fstype",
    source="/proc/self/mountinfo",
)
_MEMORY_ERRORS = metric(
    "hpml_node_memory_errors_total",
    "Errors of the node's memory since boot.",
    "error",
    source="/sys/devices/system/edac/mc/mc*/{ce,ue}_count",
)
_TEMPERATURE = metric(
    "hpml_node_temperature_celsius",
    "Temperature of the hottest sensor of a chip, such as a CPU or a disk.",
    "chip",
    source="/sys/class/hwmon/*/temp*_input",
)
_TEMPERATURE_LIMIT = metric(
    "hpml_node_temperature_limit_celsius",
    "Temperature that the chip calls critical.",
    "chip",
    source="/sys/class/hwmon/*/temp*_crit",
)
_LINK_LOSSES = metric(
    "hpml_network_link_down_total",
    "How often a network device has lost its link since boot.",
    "device",
    source="/sys/class/net/*/carrier_down_count of devices with hardware",
)
SPECS = (
    _SYNCHRONIZED,
    _CLOCK_ERROR,
    _STUCK,
    _ZOMBIES,
    _READ_ONLY,
    _MEMORY_ERRORS,
    _TEMPERATURE,
    _TEMPERATURE_LIMIT,
    _LINK_LOSSES,
)

_LOG = logging.getLogger(__name__)
_STA_UNSYNC = 0x0040
_UNKNOWN_ERROR_SECONDS = 16.0  # the kernel's ceiling, NTP_PHASE_LIMIT
_STUCK_SECONDS = 600.0
_KTHREADD = 2
_SWITCHES = re.compile(r"^(?:non)?voluntary_ctxt_switches:\s*(\d+)", re.MULTILINE)
_MAX_CHIPS = 32
_MAX_DEVICES = 32


class _Timex(ctypes.Structure):
    """The start of `struct timex` of adjtimex(2), and room for the rest."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_char * 192),
    )


Sleeper = tuple[int, int, int]
Clock = Callable[[], tuple[int, float]]
"""Returns adjtimex(2)'s status and maxerror in seconds, or raises OSError."""


def read_clock() -> tuple[int, float]:
    """Return the kernel's state of the clock; see Clock.

    Raises:
        OSError: the kernel refuses, as under a filter of system calls without `adjtimex`.
    """
    state = _Timex()
    if ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(state)) < 0:
        raise OSError(number := ctypes.get_errno(), os.strerror(number))
    return state.status, state.maxerror / 1e6


@dataclass(frozen=True)
class Chip:
    """The hottest sensor of a chip, and its critical temperature, in degrees Celsius."""

    celsius: float
    critical: float | None = None


@dataclass(frozen=True)
class Health:
    """Results of one reading; see the metrics. Mappings are by mount point, chip or device.

    Attributes:
        clock_refused: why the clock cannot be read; empty if it can.
        sleeping: users' processes in uninterruptible sleep: id, start time and context switches.
    """

    synchronized: bool | None = None
    clock_error_seconds: float | None = None
    clock_refused: str = ""
    sleeping: frozenset[Sleeper] = frozenset()
    zombies: int = 0
    read_only: dict[tuple[str, str], bool] = field(default_factory=dict)
    corrected_errors: int | None = None
    uncorrected_errors: int | None = None
    chips: dict[str, Chip] = field(default_factory=dict)
    link_losses: dict[str, int] = field(default_factory=dict)


def read_health(proc: str = "/proc", sys: str = "/sys", clock: Clock = read_clock) -> Health:
    """Return the node's health, as far as it can be read without waiting.

    Args:
        proc: mount point of procfs.
        sys: mount point of sysfs.
        clock: asks the kernel.
    """
    synchronized, error, refused = None, None, ""
    try:
        status, error = clock()
        # chrony without `rtcsync` leaves STA_UNSYNC set, and still gives the kernel its error.
        synchronized = not status & _STA_UNSYNC or error < _UNKNOWN_ERROR_SECONDS
    except OSError as reason:
        refused = reason.strerror or str(reason)
    sleeping, zombies = _processes(proc)
    mounts = parse_mounts(os.fsdecode(read_or_empty(f"{proc}/self/mountinfo")))
    return Health(
        synchronized=synchronized,
        clock_error_seconds=error,
        clock_refused=refused,
        sleeping=frozenset(sleeping),
        zombies=zombies,
        read_only={
            # After an error the kernel makes the file system read-only, but not the mount. If
            # somebody mounts it read-only, both are.
            (mount.point, mount.kind): "ro" in mount.options and "rw" in mount.here
            for mount in local_mounts(mounts)
        },
        corrected_errors=_memory_errors(sys, "ce_count"),
        uncorrected_errors=_memory_errors(sys, "ue_count"),
        chips=_chips(f"{sys}/class/hwmon"),
        link_losses=_link_losses(f"{sys}/class/net"),
    )


class NodeHealth:
    """The collector `health`."""

    name = "health"
    specs: Sequence[MetricSpec] = SPECS

    def __init__(self, context: Context) -> None:
        self.interval = 3 * context.options.node_interval  # it reads every process of the node
        self._roots = context.options.roots
        self._asleep: dict[Sleeper, float] = {}  # since when
        self._warned = False

    def sample(self, now: float) -> list[Metric]:
        """Return the families as they are now; see `Collector.sample`."""
        if not process_ids(self._roots.proc):
            raise NotHereError(f"no processes in {self._roots.proc}")
        health = read_health(self._roots.proc, self._roots.sys)
        if health.clock_refused and not self._warned:
            self._warned = True
            _LOG.warning("collector health: the clock is not watched: %s", health.clock_refused)
        self._asleep = {one: self._asleep.get(one, now) for one in health.sleeping}
        stuck = [since for since in self._asleep.values() if now - since >= _STUCK_SECONDS]
        rows: dict[MetricSpec, list[Row]] = {
            _STUCK: [((), len(stuck))],
            _ZOMBIES: [((), health.zombies)],
            _READ_ONLY: [(labels, int(is_so)) for labels, is_so in health.read_only.items()],
            _TEMPERATURE: [((name,), chip.celsius) for name, chip in health.chips.items()],
            _TEMPERATURE_LIMIT: [
                ((name,), chip.critical)
                for name, chip in health.chips.items()
                if chip.critical is not None
            ],
            _LINK_LOSSES: [((name,), count) for name, count in health.link_losses.items()],
            _MEMORY_ERRORS: [
                ((kind,), count)
                for kind, count in (
                    ("corrected", health.corrected_errors),
                    ("uncorrected", health.uncorrected_errors),
                )
                if count is not None
            ],
        }
        if health.synchronized is not None and health.clock_error_seconds is not None:
            rows[_SYNCHRONIZED] = [((), int(health.synchronized))]
            rows[_CLOCK_ERROR] = [((), health.clock_error_seconds)]
        return families({spec: rows.get(spec, []) for spec in SPECS})

    def close(self) -> None:
        """Do nothing: no file is open."""


make = NodeHealth


def _processes(proc: str) -> tuple[list[Sleeper], int]:
    sleeping, zombies = [], 0
    for pid in process_ids(proc):
        found = stat(proc, pid)
        # Some kernel threads stay in this state for ever.
        if found is not None and found.state == "D" and found.parent != _KTHREADD:
            switches = _SWITCHES.findall(text(f"{proc}/{pid}/status"))
            sleeping.append((pid, found.start, sum(map(int, switches))))
        zombies += found is not None and found.state == "Z"
    return sleeping, zombies


def _memory_errors(sys: str, file: str) -> int | None:
    directory = f"{sys}/devices/system/edac/mc"
    counts = [text(f"{directory}/{name}/{file}") for name in names_in(directory)]
    known = [int(count) for count in counts if count.isdecimal()]
    return sum(known) if known else None


def _chips(directory: str) -> dict[str, Chip]:
    chips: dict[str, Chip] = {}
    for entry in names_in(directory)[:_MAX_CHIPS]:
        name = text(f"{directory}/{entry}/name") or entry
        for file in names_in(f"{directory}/{entry}"):
            sensor = file.removesuffix("_input")
            value = text(f"{directory}/{entry}/{file}") if file.startswith("temp") else ""
            if sensor == file or not value.removeprefix("-").isdecimal():
                continue
            celsius = int(value) / 1000
            limit = text(f"{directory}/{entry}/{sensor}_crit")
            critical = int(limit) / 1000 if limit.isdecimal() and int(limit) else None
            if name not in chips or celsius > chips[name].celsius:
                chips[name] = Chip(celsius, critical)
    return chips


def _link_losses(directory: str) -> dict[str, int]:
    """Return the counts of devices with hardware: no bridges, tunnels or jobs' namespaces."""

    def counts() -> Iterator[tuple[str, int]]:
        for device in names_in(directory):
            if os.path.exists(f"{directory}/{device}/device"):
                count = text(f"{directory}/{device}/carrier_down_count")
                if count.isdecimal():
                    yield device, int(count)

    return dict(list(counts())[:_MAX_DEVICES])
