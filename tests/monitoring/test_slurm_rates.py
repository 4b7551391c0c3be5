"""What Prometheus makes of the Slurm exporter's counters and histograms; Slurm is a fake."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.request import urlopen

import pytest
from hpml_exporters.app import ExporterPages
from hpml_exporters.core.sampler import CollectorSource, Sampler
from hpml_exporters.slurm.collector import SPECS, STATISTICS, SlurmCollector
from hpml_exporters.slurm.commands import ClusterNode, QueueRow, Reservation, View
from hpml_exporters.web.server import Server

from tests.monitoring.prometheus_support import BootPrometheus, Promtool, static
from tests.patience import eventually

WAITS = (30, 240)  # seconds, one job each; in the buckets (10, 60] and (60, 300]
NODE = ClusterNode(
    "n1", "n1", frozenset({"IDLE", "DRAIN"}), "fan", ("main",), 8, 0, {"a100": 4}, {}
)


class FakeSource:
    """A queue in which two more jobs have ended at every look: one failed, one completed."""

    name = "fake"

    def __init__(self) -> None:
        self.looks = 0

    def read(self) -> View:
        """Return all jobs so far."""
        self.looks += 1
        ended = [
            QueueRow(f"{look}{state}", state, "", ("main",), "normal", "ada", 1, 1000, start, 5000)
            for look in range(self.looks)
            for state, start in (("FAILED", 1000 + WAITS[0]), ("COMPLETED", 1000 + WAITS[1]))
        ]
        return View(
            ended,
            [NODE],
            statistics=dict.fromkeys(STATISTICS, 1.0),
            licenses={"matlab": (7, 3)},
            reservations=(Reservation("maint", "inactive", 1, 100, 200),),
            user_shares={("lab", "ada"): 0.25},
        )


class FastCollector(SlurmCollector):
    """Refreshes twice a second instead of twice a minute."""

    def __init__(self, source: FakeSource) -> None:
        super().__init__(source)
        self.interval = 0.5


@pytest.fixture
def address() -> Iterator[str]:
    """Where an exporter of the fake queue listens."""
    sampler = Sampler([CollectorSource("slurm", lambda: FastCollector(FakeSource()))], specs=SPECS)
    server = Server("127.0.0.1:0", "", ExporterPages(sampler))
    host, port = server.start()
    sampler.start()
    yield f"{host}:{port}"
    sampler.stop()
    server.stop()


def test_names_and_units(promtool: Promtool, address: str) -> None:
    """Promtool finds nothing wrong with any metric but those of queued jobs."""

    def page() -> bytes:
        with urlopen(f"http://{address}/metrics") as answer:
            text: bytes = answer.read()
        return text if b"hpml_slurm_job_wait_seconds_bucket" in text else b""

    text = eventually(page)
    shown = {spec.name for spec in SPECS if f"# HELP {spec.name} ".encode() in text}
    absent = {"queue_jobs", "jobs", "jobs_pending", "user_jobs"}
    assert {spec.name for spec in SPECS} - shown == {f"hpml_slurm_{name}" for name in absent}
    done = promtool("check", "metrics", text=text)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_rates_and_quantiles(prometheus: BootPrometheus, address: str) -> None:
    """Two jobs of each state end in a second; half of them waited 60 s at most."""
    server = prometheus([static("slurm", address)])
    ended = "hpml_slurm_jobs_ended_total"
    server.wait_for(f"count_over_time({ended}[1m]) >= 12", lambda found: len(found) == 2)
    for state in ("failed", "completed"):
        rate = server.value(f'rate({ended}{{state="{state}"}}[10s])')
        assert rate == pytest.approx(2.0, rel=0.15)
    buckets = "sum by (le, partition) (rate(hpml_slurm_job_wait_seconds_bucket[10s]))"
    # Linear within a bucket: 3/4 of all are at half of the second one, from 60 to 300 s.
    for quantile, seconds in ((0.25, 35.0), (0.5, 60.0), (0.75, 180.0)):
        found = server.value(f"histogram_quantile({quantile}, {buckets})")
        assert found == pytest.approx(seconds, rel=0.01)
