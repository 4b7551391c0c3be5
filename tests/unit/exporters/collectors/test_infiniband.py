"""Ports of RDMA devices, from trees as the kernel shows them.

The files' names and forms: Documentation/ABI/stable/sysfs-class-infiniband of the kernel; "N/A (no
PMA)" is what drivers/infiniband/core/sysfs.c wrote for drivers without performance counters.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hpml_exporters.core.collector import NotHereError
from hpml_exporters.node.infiniband import make

from tests.unit.exporters.collectors.reading import context, sampled, write

INFINIBAND = {
    "state": "4: ACTIVE\n",
    "rate": "200 Gb/sec (4X HDR)\n",
    "link_layer": "InfiniBand\n",
    "phys_state": "5: LinkUp\n",
    "counters/port_rcv_data": "1000000007\n",
    "counters/port_xmit_data": "500\n",
    "counters/symbol_error": "3\n",
    "counters/link_downed": "1\n",
    "counters/port_rcv_errors": "0\n",
    "counters/port_xmit_discards": "9\n",
    "counters/port_xmit_wait": "77\n",
    "counters/VL15_dropped": "0\n",
    "hw_counters/out_of_sequence": "12\n",
    "hw_counters/lifespan": "10\n",
}
ROCE = {
    "state": "1: DOWN\n",
    "rate": "2.5 Gb/sec (1X SDR)\n",
    "link_layer": "Ethernet\n",
    "counters/port_rcv_data": "N/A (no PMA)\n",
    "counters/port_xmit_data": "N/A (no PMA)\n",
    "hw_counters/np_cnp_sent": "4\n",
}


def tree(sys: Path, device: str, port: dict[str, str]) -> None:
    write(sys, {f"class/infiniband/{device}/ports/1/{name}": text for name, text in port.items()})


def test_a_port(tmp_path: Path) -> None:
    """Words of four bytes become bytes, a rate in Gb/s bytes per second; errors keep their name."""
    tree(tmp_path, "mlx5_0", INFINIBAND)
    found = sampled(make(context(sys=tmp_path)))
    port = ("mlx5_0", "1")
    assert found == {
        ("hpml_infiniband_received_bytes_total", *port): 4000000028,
        ("hpml_infiniband_transmitted_bytes_total", *port): 2000,
        ("hpml_infiniband_events_total", *port, "symbol_error"): 3,
        ("hpml_infiniband_events_total", *port, "link_downed"): 1,
        ("hpml_infiniband_events_total", *port, "port_rcv_errors"): 0,
        ("hpml_infiniband_events_total", *port, "port_xmit_discards"): 9,
        ("hpml_infiniband_events_total", *port, "port_xmit_wait"): 77,
        ("hpml_infiniband_events_total", *port, "out_of_sequence"): 12,
        ("hpml_infiniband_up", *port): 1.0,
        ("hpml_infiniband_link_speed_bytes", *port): 25e9,
        ("hpml_infiniband_info", *port, "InfiniBand", "200 Gb/sec (4X HDR)"): 1.0,
    }


def test_a_port_without_counters(tmp_path: Path) -> None:
    """What a driver does not count is no zero; the port and its other counters are shown."""
    tree(tmp_path, "rocep1s0", ROCE)
    found = sampled(make(context(sys=tmp_path)))
    port = ("rocep1s0", "1")
    assert found == {
        ("hpml_infiniband_events_total", *port, "np_cnp_sent"): 4,
        ("hpml_infiniband_up", *port): 0.0,
        ("hpml_infiniband_link_speed_bytes", *port): 312500000.0,
        ("hpml_infiniband_info", *port, "Ethernet", "2.5 Gb/sec (1X SDR)"): 1.0,
    }


def test_a_device_that_counts_bytes_elsewhere(tmp_path: Path) -> None:
    """AWS's EFA has no performance counters of InfiniBand, but counts bytes itself."""
    efa = {"hw_counters/rx_bytes": "12345\n", "hw_counters/tx_bytes": "678\n"}
    tree(tmp_path, "rdmap0s31", efa | {"state": "4: ACTIVE\n"})
    found = sampled(make(context(sys=tmp_path)))
    assert found["hpml_infiniband_received_bytes_total", "rdmap0s31", "1"] == 12345
    assert found["hpml_infiniband_transmitted_bytes_total", "rdmap0s31", "1"] == 678


def test_devices_come_and_go(tmp_path: Path) -> None:
    """A new device is seen within a minute, one whose driver was unloaded is not shown again."""
    collector = make(context(sys=tmp_path))
    with pytest.raises(NotHereError):
        collector.sample(0.0)
    tree(tmp_path, "mlx5_0", INFINIBAND)
    first = sampled(collector, 1.0)
    tree(tmp_path, "mlx5_1", INFINIBAND)
    assert {series[1] for series in sampled(collector, 30.0)} == {"mlx5_0"}
    assert {series[1] for series in sampled(collector, 62.0)} == {"mlx5_0", "mlx5_1"}
    (tmp_path / "class/infiniband/mlx5_1/ports/1/counters/port_rcv_data").unlink()
    gone = ("hpml_infiniband_received_bytes_total", "mlx5_1", "1")
    found = sampled(collector, 63.0)
    assert gone not in found
    assert first.items() <= found.items()
