"""A refresh of the Slurm exporter with 100,000 jobs and 10,000 nodes: CPU time, peak memory.

    python tests/bench/bench_slurm_exporter.py [JOBS] [NODES]

The answers of squeue and sinfo are generated. Also printed: RPCs that the controller gets in a
minute from the exporter, and from one that runs squeue, sinfo and sdiag for every scrape.
"""

from __future__ import annotations

import platform
import resource
import sys
import time
from collections.abc import Mapping, Sequence

from hpml_exporters.slurm.collector import INTERVAL_MIN, SlurmCollector
from hpml_exporters.slurm.commands import Commands

from hpml_orchestrator.scheduler.command import Completed

SCRAPE_SECONDS = 15
# sinfo asks for nodes and partitions; squeue and sdiag are one RPC each.
RPCS_PER_REFRESH = 4
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


def main() -> None:
    """Measure and print."""
    jobs, nodes = (int(word) for word in (*sys.argv[1:3], "100000", "10000")[:2])
    print(f"host: {platform.platform()}, Python {platform.python_version()}")
    runner = GeneratedRunner(jobs, nodes)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    collector = SlurmCollector(Commands(runner), users=True, accounts=True)
    for refresh in range(3):
        began = time.process_time()
        list(collector.sample(refresh * INTERVAL_MIN))
        print(f"refresh {refresh + 1}: {time.process_time() - began:.2f} s CPU")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(f"{jobs} jobs, {nodes} nodes: peak {peak} MiB ({before} MiB of it the answers)")
    ours, naive = 60 / INTERVAL_MIN * RPCS_PER_REFRESH, 60 / SCRAPE_SECONDS * RPCS_PER_REFRESH
    print(f"RPCs a minute: {ours:g} whoever scrapes, naive {naive:g} for each Prometheus")


if __name__ == "__main__":
    main()
