"""Ports of RDMA devices, InfiniBand and RoCE: traffic, errors and signs of congestion.

Read are the files of /sys/class/infiniband/<device>/ports/<port>
(Documentation/ABI/stable/sysfs-class-infiniband of the kernel). `port_rcv_data` and
`port_xmit_data` count words of four bytes. A device without a counter says "N/A (no PMA)", or the
read fails: that series is not shown. AWS's EFA counts bytes in `hw_counters` instead. Of those,
which differ between drivers, a few more are read that tell of lost packets and of congestion.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from prometheus_client.core import Metric

from hpml_exporters.core.collector import NotHereError
from hpml_exporters.core.metric import MetricSpec, Row, families
from hpml_exporters.node import metrics as node
from hpml_exporters.node.files import read
from hpml_exporters.options import Context

__all__ = ["Infiniband", "make"]

_WORD_BYTES = 4
_BYTES: tuple[tuple[MetricSpec, tuple[tuple[str, int], ...]], ...] = (
    (node.IB_RECEIVED, (("counters/port_rcv_data", _WORD_BYTES), ("hw_counters/rx_bytes", 1))),
    (node.IB_TRANSMITTED, (("counters/port_xmit_data", _WORD_BYTES), ("hw_counters/tx_bytes", 1))),
)
_EVENTS = (
    ("counters", "symbol_error"),
    ("counters", "link_error_recovery"),
    ("counters", "link_downed"),
    ("counters", "port_rcv_errors"),
    ("counters", "port_xmit_discards"),
    ("counters", "port_xmit_wait"),
    ("hw_counters", "out_of_sequence"),
    ("hw_counters", "packet_seq_err"),
    ("hw_counters", "rnr_nak_retry_err"),
    ("hw_counters", "local_ack_timeout_err"),
    ("hw_counters", "np_cnp_sent"),
    ("hw_counters", "rp_cnp_handled"),
)
_MAX_PORTS = 64
_ACTIVE = "4"
_LOOK_SECONDS = 60.0


def make(context: Context) -> Infiniband:
    """Return the collector of this machine's RDMA devices."""
    return Infiniband(context)


_File = tuple[MetricSpec, tuple[str, ...], str, int]  # series, its labels, path, factor


@dataclass
class _Port:
    directory: str
    label: tuple[str, str]
    link_layer: str
    files: list[_File] = field(default_factory=list)


class Infiniband:
    """The collector `infiniband`."""

    name = "infiniband"
    specs: Sequence[MetricSpec] = (
        node.IB_RECEIVED,
        node.IB_TRANSMITTED,
        node.IB_EVENTS,
        node.IB_UP,
        node.IB_SPEED,
        node.IB_INFO,
    )

    def __init__(self, context: Context) -> None:
        self.interval = context.options.node_interval
        self._root = f"{context.options.roots.sys}/class/infiniband"
        self._ports: list[_Port] = []
        self._look_at = 0.0

    def sample(self, now: float) -> list[Metric]:
        """Return the families as they are now; see `Collector.sample`."""
        if not self._ports or now >= self._look_at:
            self._look_at = now + _LOOK_SECONDS
            self._ports = self._look()
        if not self._ports:
            raise NotHereError("no RDMA device")
        shown: dict[MetricSpec, list[Row]] = {spec: [] for spec in self.specs}
        for port in self._ports:
            self._read_port(port, shown)
        return families(shown)

    def close(self) -> None:
        """Nothing is open."""

    def _look(self) -> list[_Port]:
        """Return the ports that are there, with those of their counters that can be read."""
        found = []
        for device in _names(self._root):
            for number in _names(f"{self._root}/{device}/ports"):
                place = f"{self._root}/{device}/ports/{number}"
                label = device, number
                port = _Port(place, label, _text(f"{place}/link_layer"))
                asked: list[_File] = []
                for spec, files in _BYTES:
                    there = [one for one in files if _number(f"{place}/{one[0]}") is not None]
                    asked += [(spec, label, f"{place}/{file}", times) for file, times in there[:1]]
                for directory, name in _EVENTS:
                    event = (*label, name)
                    asked.append((node.IB_EVENTS, event, f"{place}/{directory}/{name}", 1))
                port.files = [one for one in asked if _number(one[2]) is not None]
                found.append(port)
        return found[:_MAX_PORTS]

    def _read_port(self, port: _Port, shown: dict[MetricSpec, list[Row]]) -> None:
        for spec, label, path, times in port.files:
            value = _number(path)
            if value is not None:
                shown[spec].append((label, value * times))
        state, rate = _text(f"{port.directory}/state"), _text(f"{port.directory}/rate")
        if state:
            up = state.partition(":")[0] == _ACTIVE
            shown[node.IB_UP].append((port.label, float(up)))
        speed = _bytes_per_second(rate)
        if speed is not None:
            shown[node.IB_SPEED].append((port.label, speed))
        shown[node.IB_INFO].append(((*port.label, port.link_layer, rate), 1.0))


def _names(directory: str) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []


def _text(path: str) -> str:
    try:
        return read(path, 256).decode("ascii", "replace").strip()
    except OSError:
        return ""


def _number(path: str) -> int | None:
    """Return a counter; None where the device has none."""
    try:
        return max(0, int(read(path, 256)))
    except (OSError, ValueError):
        return None


def _bytes_per_second(rate: str) -> float | None:
    """Return what a rate such as "100 Gb/sec (4X EDR)" is in bytes per second.

    >>> _bytes_per_second("100 Gb/sec (4X EDR)"), _bytes_per_second("2.5 Gb/sec (1X SDR)")
    (12500000000.0, 312500000.0)
    """
    number, _, unit = rate.partition(" ")
    try:
        return float(number) * 1e9 / 8 if unit.startswith("Gb/sec") else None
    except ValueError:
        return None
