"""The exporter for a long time: memory and descriptors stay flat, and no counter goes back."""

from __future__ import annotations

import itertools
import signal
import subprocess
import time
from typing import TYPE_CHECKING

import pytest

from deploy.gpusim.gpusim import XID, Event, Process, Square, State, divided, h100
from tests.monitoring.exporter_support import OPENMETRICS
from tests.monitoring.prometheus_support import static

if TYPE_CHECKING:
    from tests.monitoring.exporter_support import Exporter, StartExporter
    from tests.monitoring.gpusim_support import Gpusim
    from tests.monitoring.prometheus_support import BootPrometheus

JOBS = 4
FIRST_JOB = 5_000_000
OURS = "5[0-9]{6}"
# What a minute of warmth may still bring, and 2 MiB an hour after it.
GROWTH_KIB = 1024
GROWTH_KIB_PER_HOUR = 2048


def node(epoch: float, *processes: Process, events: tuple[Event, ...] = ()) -> State:
    """Seven busy H100 and one that is split."""
    first = h100(0, util=Square(7, 0, 100), power=500, processes=processes, events=events)
    others = [h100(index, util=Square(5 + index, 10, 90), power=300) for index in range(1, 7)]
    return State(epoch=epoch, gpus=(first, *others, divided(h100(7), 1, 2, 3)))


class Churn:
    """Local jobs that come and go, and GPUs with errors and changing load."""

    def __init__(self, gpusim: Gpusim) -> None:
        self.gpusim = gpusim
        self.epoch = time.time()
        self.ids = itertools.count(FIRST_JOB)
        self.events: tuple[Event, ...] = ()
        self.running: list[subprocess.Popen[bytes]] = []

    def turn(self, number: int) -> None:
        """One job ends, another begins and takes a GPU; an XID error now and then."""
        environment = {"SLURM_JOB_ID": str(next(self.ids)), "SLURM_JOB_NAME": f"soak-{number}"}
        started = subprocess.Popen(["/bin/sleep", "3600"], env=environment)
        self.running.append(started)
        if len(self.running) > JOBS:
            self.end(self.running.pop(0))
        if number % 5 == 0:
            self.events = (Event(number + 1, 13, XID),)
        processes = [Process(one.pid, memory=1 << 30) for one in self.running]
        self.gpusim.write(node(self.epoch, *processes, events=self.events))

    @staticmethod
    def end(process: subprocess.Popen[bytes]) -> None:
        process.send_signal(signal.SIGKILL)
        process.wait()

    def close(self) -> None:
        for one in self.running:
            self.end(one)


def weight(exporter: Exporter) -> tuple[int, int, int]:
    """Anonymous memory in KiB, descriptors, threads."""
    return exporter.status("RssAnon"), exporter.descriptors(), exporter.status("Threads")


@pytest.mark.slow
@pytest.mark.timeout(4500)
@pytest.mark.parametrize(("seconds", "turn"), [(120, 1), (3600, 2)], ids=["2min", "1h"])
def test_nothing_grows(
    exporter: StartExporter, gpusim: Gpusim, prometheus: BootPrometheus, seconds: float, turn: float
) -> None:
    """Jobs come and go, GPUs have XID errors: the last third takes what the second took."""
    churn = Churn(gpusim)
    gpusim.write(node(churn.epoch))
    rhythm = ("--job-interval", "1", "--process-interval", "1", "--node-interval", "1")
    here = exporter(*rhythm, gpus=gpusim)
    server = prometheus([static("node", here.address)])
    server.wait_for("up == 1")
    began = time.time()
    weights: list[tuple[float, tuple[int, int, int]]] = []
    try:
        for number in itertools.count():
            churn.turn(number)
            for accept in ("", OPENMETRICS):
                assert here.scrape(accept=accept).status == 200
            weights.append((time.time() - began, weight(here)))
            if time.time() - began > seconds:
                break
            time.sleep(turn)
    finally:
        churn.close()
    early = [one for when, one in weights if seconds / 3 <= when < 2 * seconds / 3]
    late = [one for when, one in weights if when >= 2 * seconds / 3]
    assert len(early) > 3
    assert len(late) > 3
    grown = min(one[0] for one in late) - min(one[0] for one in early)
    assert grown <= GROWTH_KIB + GROWTH_KIB_PER_HOUR * seconds / 3600, weights
    # Prometheus' own connection may be open or not
    assert min(one[1] for one in late) <= min(one[1] for one in early) + 1, weights
    assert min(one[2] for one in late) <= min(one[2] for one in early), weights
    window = f"{time.time() - began:.0f}s"
    assert server.counters_that_fell(window, "node", OURS) == []
    assert not server.was_refused("node", window)
    assert server.value(f'avg_over_time(up{{job="node"}}[{window}])') > 0.5
    assert server.query("hpml_exporter_errors_total > 0") == []
    assert server.query("hpml_exporter_stuck_readings_total > 0") == []
    ours = f'{{job="node", jobid=~"|{OURS}", __name__=~"hpml_.+"}}'
    assert server.value(f"count({ours})") <= 800 + 25 * JOBS
