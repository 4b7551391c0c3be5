"""Ports of RDMA devices, InfiniBand and RoCE: traffic, errors and signs of congestion.

The collector reads the files of /sys/class/infiniband/<device>/ports/<port>
(Documentation/ABI/stable/sysfs-class-infiniband of the kernel). A missing counter reads
"N/A (no PMA)", or the read fails: that series is absent. AWS's EFA counts bytes in `hw_counters`.
These differ between drivers; a few of them are read, for lost packets and congestion.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial

from prometheus_client.core import Metric

from hpml_exporters.core.collector import MetricSpec, NotHereError, Row, families, metric
from hpml_exporters.core.procfs import text
from hpml_exporters.options import Context
from hpml_orchestrator.records.files import names_in

_SOURCE = "/sys/class/infiniband/*/ports/*"
_of_port = partial(metric, labels="device port")
_RECEIVED = _of_port(
    "hpml_infiniband_received_bytes_total",
    "Bytes that a port has received (InfiniBand, or RDMA over Ethernet).",
    source=f"{_SOURCE}/counters/port_rcv_data, in words of 4 bytes",
)
_TRANSMITTED = _of_port(
    "hpml_infiniband_transmitted_bytes_total",
    "Bytes that a port has sent (InfiniBand, or RDMA over Ethernet).",
    source=f"{_SOURCE}/counters/port_xmit_data, in words of 4 bytes",
)
_WAIT = _of_port(
    "hpml_infiniband_transmit_wait_ticks_total",
    "Ticks of the port's clock in which it had data to send but could not: congestion.",
    source=f"{_SOURCE}/counters/port_xmit_wait",
)
_EVENTS = _of_port(
    "hpml_infiniband_events_total",
    "Errors, retries and congestion notices at a port, by the kernel's name of the counter.",
    labels="device port event",
    source=f"{_SOURCE}/counters and hw_counters",
)
_UP = _of_port("hpml_infiniband_up", "Whether a port is ACTIVE.", source=f"{_SOURCE}/state")
_RATE = _of_port(
    "hpml_infiniband_link_rate_bytes_per_second",
    "What a port's link can carry in each direction.",
    source=f"{_SOURCE}/rate",
)
SPECS = (_RECEIVED, _TRANSMITTED, _WAIT, _EVENTS, _UP, _RATE)

_EVENT_FILES = (
    "counters/symbol_error counters/link_error_recovery counters/link_downed "
    "counters/port_rcv_errors counters/port_xmit_discards hw_counters/out_of_sequence "
    "hw_counters/packet_seq_err hw_counters/rnr_nak_retry_err hw_counters/local_ack_timeout_err "
    "hw_counters/np_cnp_sent hw_counters/rp_cnp_handled"
).split()
_COUNTERS: tuple[tuple[MetricSpec, tuple[str, ...], tuple[tuple[str, int], ...]], ...] = (
    # metric, labels after the port, files with their units; the first existing file counts
    (_RECEIVED, (), (("counters/port_rcv_data", 4), ("hw_counters/rx_bytes", 1))),
    (_TRANSMITTED, (), (("counters/port_xmit_data", 4), ("hw_counters/tx_bytes", 1))),
    (_WAIT, (), (("counters/port_xmit_wait", 1),)),
    *((_EVENTS, (os.path.basename(file),), ((file, 1),)) for file in _EVENT_FILES),
)
_MAX_PORTS = 64
_ACTIVE = "4:"


class Infiniband:
    """The collector `infiniband`."""

    name = "infiniband"
    specs: Sequence[MetricSpec] = SPECS

    def __init__(self, context: Context) -> None:
        self.interval = context.options.node_interval
        self._root = f"{context.options.roots.sys}/class/infiniband"

    def sample(self, now: float) -> list[Metric]:  # noqa: ARG002
        """Return the families as they are now; see `Collector.sample`."""
        ports = [
            (device, port)
            for device in names_in(self._root)
            for port in names_in(f"{self._root}/{device}/ports")
        ]
        if not ports:
            raise NotHereError("no RDMA device")
        rows: dict[MetricSpec, list[Row]] = {spec: [] for spec in SPECS}
        for device, port in ports[:_MAX_PORTS]:
            _read_port(f"{self._root}/{device}/ports/{port}", (device, port), rows)
        return families(rows)

    def close(self) -> None:
        """Do nothing: no file is open."""


make = Infiniband


def _read_port(directory: str, port: tuple[str, str], rows: dict[MetricSpec, list[Row]]) -> None:
    for spec, labels, files in _COUNTERS:
        for file, unit in files:
            count = text(f"{directory}/{file}")
            if count.isdecimal():
                rows[spec].append(((*port, *labels), int(count) * unit))
                break
    if state := text(f"{directory}/state"):
        rows[_UP].append((port, state.startswith(_ACTIVE)))
    gigabits, _, unit_text = text(f"{directory}/rate").partition(" ")
    if unit_text.startswith("Gb/sec"):  # "100 Gb/sec (4X EDR)"
        rows[_RATE].append((port, float(gigabits) * 1e9 / 8))
