"""The log of XID errors."""

from __future__ import annotations

from hpml_exporters.gpu.events import XidLog

from tests.unit.exporters.collectors.families import values

ERRORS, LAST = "hpml_gpu_xid_errors_total", "hpml_gpu_xid_last_timestamp_seconds"


def test_counts_and_times_by_kind() -> None:
    """The second of a kind raises its count and moves its time; other GPUs are not shown."""
    log = XidLog()
    log.add("GPU-aa", 79, 1000.0)
    log.add("GPU-aa", 31, 1001.0)
    log.add("GPU-bb", 31, 1001.0)
    log.add("GPU-aa", 79, 1002.5)
    assert values(log.families({"GPU-aa"})) == {
        (ERRORS, "GPU-aa", "79"): 2,
        (ERRORS, "GPU-aa", "31"): 1,
        (LAST, "GPU-aa", "79"): 1002.5,
        (LAST, "GPU-aa", "31"): 1001.0,
    }


def test_series_of_a_mad_gpu_are_bounded() -> None:
    """A thousand kinds of errors do not make a thousand series, and no error is lost."""
    log = XidLog()
    for xid in range(1000):
        log.add("GPU-aa", xid, float(xid))
    shown = values(log.families({"GPU-aa"}))
    assert len(shown) <= 2 * 25
    assert sum(number for (name, *_), number in shown.items() if name == ERRORS) == 1000
    assert shown[LAST, "GPU-aa", "other"] == 999.0
