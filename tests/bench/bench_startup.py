"""Start-up of `hpml --help` and `hpml render`, as ratios to bare Python and a bare Typer app.

    python tests/bench/bench_startup.py [RUNS]

All commands take turns in one run, so that whatever else the machine does meets all of them alike;
each figure is the median of RUNS (default 15) wall-clock times. Files are warm: one round before
does not count. Goal: `hpml --help` at most 1.3 times the bare Typer app's `--help`.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HPML = Path(sys.executable).with_name("hpml")
GOAL = 1.3
LEAST_RUNS = 10

BARE_APP = '''\
import typer

app = typer.Typer()


@app.command()
def one(name: str = "x") -> None:
    """First."""


@app.command()
def two(name: str = "x") -> None:
    """Second."""


app()
'''


def seconds(command: list[str]) -> float:
    """Return the wall-clock time of one run of a command."""
    begin = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=60)
    return time.perf_counter() - begin


def machine() -> list[str]:
    """Return what the figures depend on, one line each."""
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}"
        for name in ("hpml-orchestrator", "typer", "rich", "pydantic", "jinja2", "ruamel.yaml")
    )
    load = ", ".join(f"{value:.2f}" for value in os.getloadavg())
    return [
        f"host      {platform.node()}, {os.cpu_count()} CPUs, load {load}",
        f"kernel    {platform.system()} {platform.release()}",
        f"python    {platform.python_implementation()} {platform.python_version()}",
        f"versions  {versions}",
    ]


def main() -> int:
    """Measure and print; the status is 1 when the goal is missed."""
    runs = max(LEAST_RUNS, int(sys.argv[1]) if len(sys.argv) > 1 else 15)
    with tempfile.TemporaryDirectory() as directory:
        app = Path(directory, "bare.py")
        app.write_text(BARE_APP, "utf-8")
        job = str(ROOT / "training_jobs" / "digits.yaml")
        commands = {
            "python -c pass": [sys.executable, "-c", "pass"],
            "bare Typer app --help": [sys.executable, str(app), "--help"],
            "hpml --help": [str(HPML), "--help"],
            "hpml render JOB": [str(HPML), "render", job],
        }
        times: dict[str, list[float]] = {name: [] for name in commands}
        for number in range(runs + 1):
            for name, command in commands.items():
                took = seconds(command)
                if number:
                    times[name].append(took)
    print(*machine(), sep="\n")
    print(f"runs      {runs} of each, interleaved, warm; median (least to most), ms")
    medians = {name: statistics.median(found) for name, found in times.items()}
    bare, typer_app = medians["python -c pass"], medians["bare Typer app --help"]
    print(f"\n{'command':<24}{'ms':>8}  {'least-most':>14}  {'x python':>9}  {'x Typer':>8}")
    for name, median in medians.items():
        spread = f"{min(times[name]) * 1e3:.0f}-{max(times[name]) * 1e3:.0f}"
        print(
            f"{name:<24}{median * 1e3:>8.0f}  {spread:>14}  {median / bare:>9.1f}"
            f"  {median / typer_app:>8.2f}"
        )
    ratio = medians["hpml --help"] / typer_app
    reached = ratio <= GOAL
    print(
        f"\nhpml --help is {ratio:.2f} times the bare Typer app; goal {GOAL}: "
        f"{'reached' if reached else 'MISSED'}"
    )
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
