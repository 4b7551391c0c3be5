"""Time and memory of `hpml show --json`, as ratios to reading the same events with Python's json.

    python tests/bench/bench_summary.py [RUNS]

Two records: a week of 64 ranks on 8 nodes, written by the agents' own reader of the channel with
simulated time, and a day of 8 ranks that was not thinned, as hpml 0.1 wrote it. The peers parse
each line and keep nothing (`json.loads`), or look for the last step of each rank (`jq`). Time is
the median of RUNS (default 5), taken in turns, with warm files; memory is the largest resident set.
Goals, for the week: under 10 MB per node, 1 s and 100 MB of memory.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from hpml_orchestrator.records.feed import Event
from tests.longtraining import counters, record_training

HPML = Path(sys.executable).with_name("hpml")
NODES, RANKS = 8, 8
NODE_BYTES, SECONDS, MEMORY_BYTES = 10e6, 1.0, 100e6
PARSE = "import json, sys\nfor path in sys.argv[1:]:\n for line in open(path): json.loads(line)"
LAST = 'reduce (inputs | select(.event == "step")) as $one ({}; .["\\($one.rank)"] = $one.data)'


def measure(command: list[str]) -> tuple[float, int]:
    """Return wall-clock seconds and the largest resident set in bytes of one run of a command."""
    begin = time.perf_counter()
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise subprocess.CalledProcessError(child.returncode, command)
    return time.perf_counter() - begin, usage.ru_maxrss * 1024


def a_run(records: Path) -> Path:
    """Run a small job on this machine, and return the path of its events."""
    job = records.with_suffix(".yaml")
    job.write_text(json.dumps({"name": "bench", "command": ["true"], "launcher": "srun"}), "utf-8")
    command = [str(HPML), "--records", str(records), "run", str(job), "--backend", "local"]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    (events,) = records.glob("runs/*/attempts/0/events")
    return events


def thinned_week(events: Path) -> None:
    """Write a week of all nodes: the first as its agent would, the others after its example."""
    record_training(events / "n0.jsonl", node="n0", ranks=RANKS)
    text = (events / "n0.jsonl").read_text("utf-8")
    for node in range(1, NODES):
        own = text.replace('"node":"n0"', f'"node":"n{node}"')
        own = re.sub(r'"rank":(\d+)', lambda m: f'"rank":{int(m[1]) + RANKS * node}', own)  # noqa: B023
        (events / f"n{node}.jsonl").write_text(own, "utf-8")


def whole_day(events: Path) -> None:
    """Write every second of a day of one node."""
    with (events / "n0.jsonl").open("w", encoding="utf-8") as stream:
        for second in range(1, 86401):
            for rank in range(RANKS):
                step = Event(1.8e9 + second, "step", "n0", rank, counters(rank, second))
                stream.write(step.to_json() + "\n")


def main() -> int:
    """Measure and print; the status is 1 when a goal is missed."""
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    load = ", ".join(f"{value:.2f}" for value in os.getloadavg())
    print(f"host      {platform.node()}, {os.cpu_count()} CPUs, load {load}")
    print(f"kernel    {platform.system()} {platform.release()}")
    print(f"python    {platform.python_version()}")
    missed = False
    with tempfile.TemporaryDirectory() as directory:
        for name, write in (("week of 64 ranks", thinned_week), ("whole day of 8", whole_day)):
            records = Path(directory, write.__name__)
            events = a_run(records)
            write(events)
            files = sorted(map(str, events.glob("n*.jsonl")))
            sizes = [os.path.getsize(path) for path in files]
            commands = {
                "hpml show --json": [str(HPML), "--records", str(records), "show", "--json"],
                "hpml --version": [str(HPML), "--version"],
                "python json.loads": [sys.executable, "-c", PARSE, *files],
            }
            if shutil.which("jq"):
                commands["jq, last steps"] = ["jq", "-n", LAST, *files]
            found = {key: [measure(command)] for key, command in commands.items()}  # warms up
            for _ in range(runs):
                for key, command in commands.items():
                    found[key].append(measure(command))
            lines = sum(Path(path).read_bytes().count(b"\n") for path in files)
            print(f"\n{name}: {sum(sizes) / 1e6:.1f} MB, {lines} lines")
            peer = statistics.median(took for took, _ in found["python json.loads"][1:])
            for key, times in found.items():
                took = statistics.median(one for one, _ in times[1:])
                most = max(one for _, one in times)
                print(f"  {key:<20}{took:>8.2f} s  {took / peer:>6.2f} x json{most / 1e6:>8.0f} MB")
                if key == "hpml show --json" and write is thinned_week:
                    missed = took > SECONDS or most > MEMORY_BYTES or max(sizes) > NODE_BYTES
    print(f"\ngoals: {'MISSED' if missed else 'reached'}")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
