"""The exporter of a node against nvitop-exporter, on the same simulated GPUs in the same minutes.

    python tests/bench/bench_exporter.py [--quick] [--seconds N] [--scrapes N] [--epochs N]
                                         [--gpus N] [--jobs N] [--processes N] [--without NAMES]

Both run side by side on one node of 8 simulated GPUs, 20 jobs and 500 processes
(exporter_load.py), and read the GPUs at 1 Hz. Each is scraped every 10 s for N seconds, on a
connection that stays open, as Prometheus does; meanwhile its CPU time is taken from the kernel's
clock of the process. Then come timed scrapes, half a second apart. nvitop-exporter exports GPUs and
their processes only, ours everything: `--without
processes,shm,disks,infiniband,nfs,lustre,health,training` leaves what both show.

Then a small training runs while our exporter is stopped (SIGSTOP) in every other epoch, and
epochs are compared with their neighbours. Nothing is pinned: the exporter competes with
the training for CPU time, as on a full node.

On a busy machine a scrape waits for a CPU; its CPU time is then a better measure than its
duration. A missed goal is marked; the exit status is still 0, since a busy machine may miss it.
It is 1 if an exporter does not show the jobs and GPUs of the node: its figures mean nothing then.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import platform
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.bench.exporter_load import Load, loaded

ROOT = Path(__file__).parents[2]
PERIOD = 10.0  # seconds between two scrapes
WARM_UP = 12.0  # all collectors have read twice by then
GOALS = {"cpu": 0.5, "memory": 40.0, "p99": 10.0, "share": 0.2, "scrape": 0.5}


@dataclass
class Exporter:
    """A running exporter and what was measured of it."""

    name: str
    process: subprocess.Popen[bytes]
    port: int
    seconds: float = 0.0
    cpu: float = 0.0
    scrapes: list[float] = field(default_factory=list)
    scrape_cpu: float = 0.0  # milliseconds of CPU time that one more scrape costs
    text: str = ""
    connection: http.client.HTTPConnection | None = None

    def scrape(self) -> float:
        """Asks for the metrics once; returns the milliseconds."""
        if self.connection is None:
            self.connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
            self.connection.connect()
        begun = time.perf_counter()
        try:
            self.connection.request("GET", "/metrics", headers={"Accept-Encoding": "gzip"})
            answer = self.connection.getresponse()
            answer.read()
        except (http.client.HTTPException, OSError):
            self.connection = None
            raise
        return (time.perf_counter() - begun) * 1000

    def read(self) -> str:
        """Returns the metrics as text."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
        connection.close()
        return text

    def cpu_seconds(self) -> float:
        """CPU time of the process so far, ended threads with it; see clock_getcpuclockid(3)."""
        return time.clock_gettime((~self.process.pid << 3) | 2)

    def memory(self, field_name: str) -> float:
        """A line of /proc/PID/status or smaps_rollup in MiB."""
        for name in ("status", "smaps_rollup"):
            text = Path(f"/proc/{self.process.pid}/{name}").read_text()
            found = re.search(rf"^{field_name}:\s+(\d+) kB", text, re.MULTILINE)
            if found is not None:
                return int(found[1]) / 1024
        return float("nan")

    @property
    def series(self) -> int:
        """How many series it has."""
        return sum(bool(line) and not line.startswith("#") for line in self.text.splitlines())

    def percent(self) -> float:
        """CPU time as a share of one core."""
        return 100 * self.cpu / self.seconds

    def quantile(self, part: float) -> float:
        """A quantile of the timed scrapes, in milliseconds."""
        ordered = sorted(self.scrapes)
        return ordered[min(len(ordered) - 1, round(part * len(ordered)))]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@contextlib.contextmanager
def running(
    name: str, words: list[str], environment: dict[str, str], port: int
) -> Iterator[Exporter]:
    """Starts an exporter and waits until it answers."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(words, env=environment, stdout=log, stderr=log)
        exporter = Exporter(name, process, port)
        try:
            end = time.monotonic() + 60
            while True:
                try:
                    exporter.scrape()
                except (http.client.HTTPException, OSError):
                    if process.poll() is not None or time.monotonic() > end:
                        log.seek(0)
                        print(log.read().decode(errors="replace"), file=sys.stderr)
                        raise
                    time.sleep(0.1)
                else:
                    break
            yield exporter
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def ours(load: Load, without: Sequence[str] = ()) -> contextlib.AbstractContextManager[Exporter]:
    """Our exporter, as `hpml export node` starts it."""
    port = free_port()
    run = load.scratch / "run"
    run.mkdir(mode=0o755, exist_ok=True)
    options = {
        "listen": f"127.0.0.1:{port}",
        "without": list(without),
        "roots": {"cgroup": str(load.cgroup), "run": str(run)},
    }
    words = [sys.executable, "-P", "-m", "hpml_exporters", json.dumps(options)]
    return running("hpml", words, load.environment | {"MALLOC_ARENA_MAX": "2"}, port)


def peer(load: Load) -> contextlib.AbstractContextManager[Exporter]:
    """nvitop-exporter with its defaults."""
    port = free_port()
    words = [sys.executable, "-m", "nvitop_exporter", "--hostname", "bench", "--port", str(port)]
    return running("nvitop-exporter", words, load.environment, port)


def measure(exporters: list[Exporter], seconds: float, scrapes: int) -> None:
    """Takes CPU time under scrapes every 10 s, then the times of many scrapes."""
    time.sleep(WARM_UP)
    begun = {each.name: (time.monotonic(), each.cpu_seconds()) for each in exporters}
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(PERIOD, left))
        for each in exporters:
            each.scrape()
    for each in exporters:
        at, cpu = begun[each.name]
        each.cpu = each.cpu_seconds() - cpu
        each.seconds = time.monotonic() - at
    begun = {each.name: (time.monotonic(), each.cpu_seconds()) for each in exporters}
    for _ in range(scrapes):
        time.sleep(0.5)
        for each in exporters:
            each.scrapes.append(each.scrape())
    for each in exporters:
        at, cpu = begun[each.name]
        usual = each.percent() / 100 * (time.monotonic() - at)
        each.scrape_cpu = 1000 * (each.cpu_seconds() - cpu - usual) / scrapes
        each.text = each.read()


def seen(text: str, name: str) -> int:
    """How many series a metric has."""
    return sum(line.startswith(f"{name}{{") for line in text.splitlines())


def faults(load: Load, mine: Exporter, other: Exporter) -> list[str]:
    """What an exporter does not show although it is there."""
    checks = [
        ("hpml_gpu_info", mine, load.gpus),
        ("hpml_job_info", mine, load.jobs),
        ("hpml_job_gpus_used", mine, load.jobs),
        ("hpml_gpu_sm_active_ratio", mine, load.gpus),
        ("gpu_utilization_Percentage", other, load.gpus),
        ("process_gpu_memory_MiB", other, load.jobs),
    ]
    return [
        f"{each.name} has {seen(each.text, name)} series of {name}, not {number}"
        for name, each, number in checks
        if seen(each.text, name) != number
    ]


def report(load: Load, mine: Exporter, other: Exporter) -> None:
    """Prints the table."""
    rows = [
        ("CPU, % of a core", Exporter.percent, f"< {GOALS['cpu']}", GOALS["cpu"]),
        ("RSS, MiB", lambda e: e.memory("VmRSS"), f"< {GOALS['memory']:g}", GOALS["memory"]),
        ("of it its own (PSS), MiB", lambda e: e.memory("Pss"), "", None),
        ("scrape p50, ms", lambda e: e.quantile(0.5), "", None),
        ("scrape p99, ms", lambda e: e.quantile(0.99), f"< {GOALS['p99']:g}", GOALS["p99"]),
        ("CPU time of a scrape, ms", lambda e: e.scrape_cpu, "", None),
        ("series", lambda e: float(e.series), "", None),
    ]
    print(
        f"{load.gpus} simulated GPUs at 1 Hz, {load.jobs} jobs, {load.processes} processes, "
        f"control groups: {load.kind}; {mine.seconds:.0f} s with a scrape every {PERIOD:g} s, "
        f"{len(mine.scrapes)} timed scrapes; Python {platform.python_version()}, "
        f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}",
    )
    print(f"\n| | {mine.name} | {other.name} | ratio | goal |\n|---|---|---|---|---|")
    for name, figure, goal, most in rows:
        one, two = figure(mine), figure(other)
        missed = " MISSED" if most is not None and one >= most else ""
        print(f"| {name} | {one:.2f} | {two:.2f} | {one / two:.3f} | {goal}{missed} |")
    for what, ratio, limit in (
        ("CPU", mine.percent() / other.percent(), GOALS["share"]),
        ("scrape p99", mine.quantile(0.99) / other.quantile(0.99), GOALS["scrape"]),
    ):
        missed = " MISSED" if ratio >= limit else ""
        print(f"\n{what} against nvitop-exporter: {ratio:.3f} (goal: < {limit}{missed})")
    budget = 800 + 25 * load.jobs
    print(f"series: {mine.series} (goal: <= {budget}{' MISSED' if mine.series > budget else ''})")


def epochs_of(words: list[str], exporter: Exporter) -> tuple[list[float], list[float]]:
    """Seconds of a training's epochs without and with the exporter, which is stopped in turns."""
    times: tuple[list[float], list[float]] = ([], [])
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        begun, number = 0.0, 0
        for line in child.stdout:
            if not line.startswith("epoch "):
                continue
            now = time.monotonic()
            if number:  # the first one has the warm-up
                times[number % 2].append(now - begun)
            number += 1
            # on SIGCONT it catches up at once on missed readings: none is saved
            exporter.process.send_signal(signal.SIGCONT if number % 2 else signal.SIGSTOP)
            begun = time.monotonic()
    exporter.process.send_signal(signal.SIGCONT)
    if child.returncode != 0:
        raise subprocess.CalledProcessError(child.returncode, words)
    return times


def slowdown(load: Load, epochs: int) -> None:
    """Trains while our exporter is stopped in every other epoch; compares neighbouring epochs."""
    data = load.scratch / "digits"
    jobs = ROOT / "training_jobs"
    make = [sys.executable, str(jobs / "make_digits.py"), str(data)]
    subprocess.run(make, check=True, stdout=subprocess.DEVNULL)
    words = [sys.executable, "-u", str(jobs / "ddp_images.py"), "--data", str(data)]
    with ours(load) as exporter:
        words += ["--epochs", str(epochs)]
        without, beside = epochs_of(words, exporter)
    # epochs are in turns, so that what else the machine does falls on both kinds alike
    changes = sorted(100 * (two / one - 1) for one, two in zip(without, beside, strict=False))
    low, high = (changes[round(part * (len(changes) - 1))] for part in (0.25, 0.75))
    print(
        f"\ntraining, {len(changes)} pairs of epochs: median {statistics.median(without):.2f} s "
        f"without, {statistics.median(beside):.2f} s with our exporter; "
        f"difference of a pair: median {statistics.median(changes):+.2f} % "
        f"(half of them between {low:+.1f} % and {high:+.1f} %)",
    )


def main() -> int:
    """Measures and prints."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # 500 processes have to be ended
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="20 s, 20 scrapes, 9 epochs")
    parser.add_argument("--seconds", type=float, help="with scrapes every 10 s (default: 120)")
    parser.add_argument("--scrapes", type=int, help="that are timed (default: 200)")
    parser.add_argument("--epochs", type=int, help="of the training (default: 61; 0: none)")
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--jobs", type=int, default=20)
    parser.add_argument("--processes", type=int, default=500)
    parser.add_argument("--without", default="", help="collectors of ours that are off")
    options = parser.parse_args()
    usual = (20.0, 20, 9) if options.quick else (120.0, 200, 61)
    given = (options.seconds, options.scrapes, options.epochs)
    seconds, scrapes, epochs = (
        one if one is not None else other for one, other in zip(given, usual, strict=True)
    )
    with tempfile.TemporaryDirectory(prefix="hpml-bench-") as scratch:
        load = Load(options.gpus, options.jobs, options.processes, Path(scratch))
        with loaded(load):
            without = [name for name in options.without.split(",") if name]
            with ours(load, without) as mine, peer(load) as other:
                measure([mine, other], seconds, int(scrapes))
                report(load, mine, other)
                wrong = faults(load, mine, other)
            if epochs:
                slowdown(load, int(epochs))
    for fault in wrong:
        print(f"NOT VALID: {fault}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
