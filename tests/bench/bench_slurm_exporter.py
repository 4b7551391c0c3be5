"""Cost of the Slurm exporter: a large cluster's refresh, and a minute vs. a naive exporter.

    python tests/bench/bench_slurm_exporter.py [JOBS] [NODES]
    SLURM_CONF=... python tests/bench/bench_slurm_exporter.py --naive

The first prints CPU time and peak memory of a refresh with 100,000 jobs and 10,000 nodes, whose
answers are generated. The second takes a cluster that nobody else uses, as root: for a minute each,
our exporter and one that runs squeue, sinfo and sdiag for every scrape are scraped every 15 s.
"""

from __future__ import annotations

import os
import platform
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from urllib.request import urlopen

from hpml_exporters.slurm.collector import INTERVAL_MIN, SlurmCollector
from hpml_exporters.slurm.commands import Commands
from hpml_exporters.slurm.options import SlurmOptions

from hpml_orchestrator.scheduler.command import Completed

SCRAPE_SECONDS = 15
MINUTE_SECONDS = 60
START_SECONDS = 5
REASONS = ("Priority", "Resources", "Dependency", "QOSMaxJobsPerUserLimit")


class GeneratedRunner:
    """Answers as a large cluster would; starts no command."""

    def __init__(self, jobs: int, nodes: int) -> None:
        self._answers = {"squeue": _queue(jobs), "sinfo": _nodes(nodes)}

    def run(self, argv: Sequence[str], *, env: Mapping[str, str], timeout: float) -> Completed:
        """Answer."""
        assert env
        assert timeout > 0
        return Completed(0, self._answers.get(argv[0], ""))

    def run_detached(self, *_arguments: object, **_options: object) -> int:
        """Nothing here outlives the exporter."""
        raise NotImplementedError


def _queue(jobs: int) -> str:
    rows = []
    for job in range(jobs):
        state = "RUNNING" if job % 4 == 0 else "PENDING"
        fields = [str(job), state, REASONS[job % 4], f"part{job % 8}", "normal", f"user{job % 500}"]
        fields += [f"lab{job % 50}", "1795210742", str(1795210800 * (job % 4 == 0)), "0"]
        rows.append("\x1f".join(fields) + "\x1e\n")
    return "".join(rows)


def _nodes(nodes: int) -> str:
    rows = []
    for node in range(nodes):
        fields = [f"node{node}", f"10.0.{node // 250}.{node % 250}", "mixed", f"part{node % 8}"]
        fields += ["64/64/0/128", "512000", "1024000", "gpu:a100:8(S:0-1)"]
        rows.append("\x1f".join([*fields, "gpu:a100:4(IDX:0-3)", "none"]) + "\x1e\n")
    return "".join(rows)


def naive_scrape() -> None:
    """Do for one scrape what a naive exporter does."""
    commands = (["squeue", "--all", "-h", "-o", "%T"], ["sinfo", "--all", "-hNo", "%T"], ["sdiag"])
    for argv in commands:
        text = subprocess.run(argv, capture_output=True, check=True, text=True).stdout
        Counter(text.splitlines())


def rpcs() -> int:
    """Return how many requests the controller has had, but those of sdiag and its own nodes."""
    text = subprocess.run(["sdiag"], capture_output=True, check=True, text=True).stdout
    rows = re.findall(r"^\s*REQUEST_(\w+)\s+\(\s*\d+\)\s+count:(\d+)", text, re.MULTILINE)
    return sum(int(count) for name, count in rows if name != "STATS_INFO")


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process and of those that it has waited for."""
    fields = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def minute(pid: int, scrape: Callable[[], object]) -> tuple[float, int]:
    """Scrape for a minute; returns CPU seconds of a process and the controller's requests."""
    cpu, requests, end = cpu_seconds(pid), rpcs(), time.monotonic() + MINUTE_SECONDS
    while time.monotonic() < end:
        scrape()
        time.sleep(SCRAPE_SECONDS)
    return cpu_seconds(pid) - cpu, rpcs() - requests


def beside_naive() -> None:
    """Measure both on a real cluster, and print CPU time and requests as ratios."""
    naive_cpu, naive = minute(os.getpid(), naive_scrape)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "address"
        options = SlurmOptions("127.0.0.1:0", address_file=str(file), source="commands")
        argv = [sys.executable, "-m", "hpml_exporters.slurm", options.to_json()]
        with subprocess.Popen(argv) as exporter:
            time.sleep(START_SECONDS)  # the first refresh is over
            url = f"http://{file.read_text('utf-8').strip()}/metrics"
            ours_cpu, ours = minute(exporter.pid, lambda: urlopen(url).close())
            exporter.terminate()
    print(f"CPU of a minute: {ours_cpu:.2f} s; naive {naive_cpu:.2f} s for each Prometheus")
    print(f"ratio of CPU: {naive_cpu / ours_cpu:.1f}")
    print(f"RPCs of a minute, sdiag's apart: {ours}; naive {naive} for each Prometheus")
    print(f"ratio of RPCs: {naive / ours:.1f}")


def main() -> None:
    """Measure and print."""
    if sys.argv[1:] == ["--naive"]:
        beside_naive()
        return
    jobs, nodes = (int(word) for word in (*sys.argv[1:3], "100000", "10000")[:2])
    print(f"host: {platform.platform()}, Python {platform.python_version()}")
    runner = GeneratedRunner(jobs, nodes)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    collector = SlurmCollector(Commands(runner), users=True)
    for refresh in range(3):
        began = time.process_time()
        list(collector.sample(refresh * INTERVAL_MIN))
        print(f"refresh {refresh + 1}: {time.process_time() - began:.2f} s CPU")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(f"{jobs} jobs, {nodes} nodes: peak {peak} MiB ({before} MiB of it the answers)")


if __name__ == "__main__":
    main()
