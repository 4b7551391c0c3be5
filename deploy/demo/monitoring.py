"""`make demo-monitoring`: a monitored cluster on this machine, and its dashboards in a browser.

    python -m deploy.demo.monitoring            # until Ctrl-C
    python -m deploy.demo.monitoring --local    # without Slurm, as users without root get it

Slurm (or hpml's local backend), exporters, Prometheus with the rules, and jobs: one that trains
well, one that waits for data, one with a slow rank, one that leaves its GPUs idle, a sweep, and on
Slurm jobs that wait. GPUs are simulated; see stack.py.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from deploy.demo.stack import GPUS, HPML, ROOT, Stack, missing

_NODES = 2
_FATAL = ("prometheus", "gcc")


def submit_jobs(stack: Stack, nodes: int) -> dict[str, str]:
    """Submit the demo's jobs; returns their job ids by name.

    Args:
        stack: where to.
        nodes: of the cluster; 0 for the local backend, which has room for fewer jobs.
    """
    scripts = stack.directory / "jobs"
    shutil.copy(ROOT / "deploy/demo/load.py", scripts)
    for path in (ROOT / "training_jobs").glob("*.py"):
        shutil.copy(path, scripts)

    def load(*args: str, ranks: int = 1, gpus: int = 1, **more: int) -> dict[str, Any]:
        resources = {"ranks_per_node": ranks, "gpus": gpus, "cpus_per_rank": 1, "time": "2:00:00"}
        job = {"launcher": "srun", "script": "load.py", "args": list(args)}
        return {**job, "resources": {**resources, **more}}

    jobs = {
        "train-well": load("--compute=0.2", "--wait=0.02", nodes=max(1, nodes)),
        "waits-for-data": load("--compute=0.1", "--wait=0.3"),
    }
    if nodes:
        jobs["one-slow-rank"] = load("--compute=0.1", "--wait=0.1", "--slow=3", nodes=nodes)
    resources = {"gpus": 1, "time": "2:00:00"}
    jobs["forgotten"] = {"launcher": "srun", "command": ["sleep", "7200"], "resources": resources}
    ids = {name: stack.submit(name, job) for name, job in jobs.items()}
    if nodes:
        sweep = stack.write("sweep", load("--compute=0.1", "--wait=0.02"))
        grid = ["--grid", "compute=0.1,0.2", "--repeats", "1", "--detach"]
        stack.hpml("sweep", "run", sweep, *grid)
        while not _sweep_runs(stack):  # in the background; the jobs below would be ahead of it
            time.sleep(0.5)
        for name in ("needs-all-gpus", "and-another"):  # waits for resources, and for its priority
            ids[name] = stack.submit(name, load(nodes=nodes, gpus=GPUS, ranks=GPUS))
    return ids


def _sweep_runs(stack: Stack) -> bool:
    """Whether every point of the sweep has started."""
    counts = json.loads(stack.hpml("sweep", "status", "last", "--json").stdout)["counts"]
    return not counts.get("WAITING") and not counts.get("PENDING")


def main() -> int:
    """Start it all, print one address, and end it all at Ctrl-C."""
    parser = argparse.ArgumentParser(description="A monitored cluster on this machine.")
    parser.add_argument("--local", action="store_true", help="without Slurm")
    options = parser.parse_args()
    lacks = missing()
    for name, remedy in lacks.items():
        _say(f"no {name}: {remedy}")
    if any(name in lacks for name in _FATAL):
        return 1
    nodes = 0 if options.local or lacks else _NODES
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # a closed terminal, too
        signal.signal(number, signal.default_int_handler)
    directory = Path(tempfile.mkdtemp(prefix="hpml-demo-"))
    directory.chmod(0o755)
    try:
        return _show(directory, nodes)
    except KeyboardInterrupt:
        return 0
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _show(directory: Path, nodes: int) -> int:
    """Start the stack and show its dashboards; returns the status of `hpml dashboards show`."""
    where = f"Slurm with {nodes} nodes" if nodes else "this machine, without Slurm"
    _say(f"starting {where} …")
    with Stack(directory, nodes) as stack:
        submit_jobs(stack, nodes)
        _say(f"Prometheus is at {stack.prometheus}")
        _say("figures fill in within a minute; Ctrl-C ends everything")
        _say(f"in a terminal: {HPML[0]} top --all-users --prometheus {stack.prometheus}")
        show = [*HPML, "dashboards", "show", "--prometheus", stack.prometheus, "--no-open"]
        viewer = subprocess.Popen(show, stdout=subprocess.PIPE, text=True)
        try:
            address = viewer.stdout.readline() if viewer.stdout else ""
            base, _, token = address.strip().partition("/?")
            print(f"{base}/d/hpml-cluster?from=now-15m&to=now&{token}", flush=True)
            return viewer.wait()
        finally:
            viewer.terminate()
            viewer.wait()


def _say(text: str) -> None:
    print(f"demo-monitoring: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
