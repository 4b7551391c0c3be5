"""The log of XID errors."""

from __future__ import annotations

from hpml_exporters.gpu.devices import Place
from hpml_exporters.gpu.events import XidLog
from hpml_exporters.metric import Sample

PLACE = Place("GPU-aa")


def test_counts_and_times_by_kind() -> None:
    """The second of a kind raises its count and moves its time."""
    log = XidLog()
    log.add("GPU-aa", 79, 1000.0)
    log.add("GPU-aa", 31, 1001.0)
    log.add("GPU-aa", 79, 1002.5)
    errors, last = log.families({"GPU-aa": PLACE})
    assert set(errors.samples) == {
        Sample(("GPU-aa", "79"), 2.0),
        Sample(("GPU-aa", "31"), 1.0),
    }
    assert set(last.samples) == {
        Sample(("GPU-aa", "79"), 1002.5),
        Sample(("GPU-aa", "31"), 1001.0),
    }


def test_series_of_a_mad_gpu_are_bounded() -> None:
    """A thousand kinds of errors are no thousand series, and none is lost."""
    log = XidLog()
    for xid in range(1000):
        log.add("GPU-aa", xid, float(xid))
    errors, last = log.families({"GPU-aa": PLACE})
    assert len(errors.samples) == len(last.samples) <= 25
    counts = [sample.value for sample in errors.samples]
    assert sum(one for one in counts if isinstance(one, float)) == 1000
    assert Sample(("GPU-aa", "other"), 999.0) in last.samples


def test_errors_of_gpus_that_are_not_shown_are_kept_back() -> None:
    """In a job, a neighbour's errors are the neighbour's."""
    log = XidLog()
    log.add("GPU-bb", 79, 1.0)
    assert [family.samples for family in log.families({"GPU-aa": PLACE})] == [(), ()]
