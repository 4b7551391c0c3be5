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


def tree(root: Path, device: str, text: str) -> None:
    """Write a device with one port, from lines of file and content."""
    lines = [line.strip().split(" ", 1) for line in text.strip().split("\n")]
    write(root, {f"class/infiniband/{device}/ports/1/{file}": f"{had}\n" for file, had in lines})


INFINIBAND = """
    state 4: ACTIVE
    rate 200 Gb/sec (4X HDR)
    counters/port_rcv_data 1000000007
    counters/port_xmit_data 500
    counters/symbol_error 3
    counters/port_rcv_errors 0
    counters/port_xmit_wait 77
    counters/VL15_dropped 0
    hw_counters/out_of_sequence 12
"""
ROCE = """
    state 1: DOWN
    rate 2.5 Gb/sec (1X SDR)
    counters/port_rcv_data N/A (no PMA)
    hw_counters/np_cnp_sent 4
"""
EFA = "state 4: ACTIVE\nhw_counters/rx_bytes 12345\nhw_counters/tx_bytes 678"
CASES = {
    # Words of 4 bytes become bytes, Gb/s bytes per second; ticks are not events.
    "InfiniBand": (
        INFINIBAND,
        {
            ("received_bytes_total",): 4000000028,
            ("transmitted_bytes_total",): 2000,
            ("transmit_wait_ticks_total",): 77,
            ("events_total", "symbol_error"): 3,
            ("events_total", "port_rcv_errors"): 0,
            ("events_total", "out_of_sequence"): 12,
            ("up",): 1,
            ("link_rate_bytes_per_second",): 25e9,
        },
    ),
    # What a driver does not count is absent, not zero.
    "RoCE, down": (
        ROCE,
        {
            ("events_total", "np_cnp_sent"): 4,
            ("up",): 0,
            ("link_rate_bytes_per_second",): 312500000,
        },
    ),
    "AWS EFA": (
        EFA,
        {
            ("received_bytes_total",): 12345,
            ("transmitted_bytes_total",): 678,
            ("up",): 1,
        },
    ),
}


@pytest.mark.parametrize(("port", "expected"), CASES.values(), ids=CASES)
def test_a_port(tmp_path: Path, port: str, expected: dict[tuple[str, ...], float]) -> None:
    """Everything that is shown of it."""
    tree(tmp_path, "mlx5_0", port)
    assert sampled(make(context(sys=tmp_path))) == {
        (f"hpml_infiniband_{name}", "mlx5_0", "1", *labels): value
        for (name, *labels), value in expected.items()
    }


def test_devices_come_and_go(tmp_path: Path) -> None:
    """A new device is seen at the next reading; a machine without devices is not a failure."""
    collector = make(context(sys=tmp_path))
    with pytest.raises(NotHereError):
        collector.sample(0.0)
    tree(tmp_path, "mlx5_0", INFINIBAND)
    first = sampled(collector)
    tree(tmp_path, "mlx5_1", INFINIBAND)
    assert first.items() < sampled(collector).items()
    (tmp_path / "class/infiniband/mlx5_1/ports/1/counters/port_rcv_data").unlink()
    assert ("hpml_infiniband_received_bytes_total", "mlx5_1", "1") not in sampled(collector)
