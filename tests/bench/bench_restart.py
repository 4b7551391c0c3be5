"""What a restart costs: from the request to the first new step, compared with a script.

    python tests/bench/bench_restart.py [RUNS] [--no-slurm]

A training of two ranks (tests/lifetraining.py: steps of some 6 ms, checkpoints of 4 MB every 100
steps) is stopped RUNS times (default 5) by `hpml requeue`, on the local backend, and as root on a
development Slurm of two nodes. The script by hand is what people submit without hpml: torchrun in
srun, and `scontrol requeue`, after which Slurm ends the ranks unwarned. Both are the same training,
in turn on the same cluster; Slurm itself lets a requeued job wait for some 6 s there.

    saved       from the request to the end of the save that it causes
    first step  from the request to the first step of the next attempt
    again       steps that were made and had to be made again

Goal: fewer steps made again than by hand, none of them more than one.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import shutil
import statistics
import sys
import time
from pathlib import Path

# The tests' helpers are not installed; a benchmark is called from the repository.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.cluster.conftest import SlurmCluster, booted
from tests.cluster.hpml_on_slurm import PYTHON, Desk, eventually
from tests.cluster.stops import SAVE_EVERY, Life, Stop
from tests.cluster.user import Directories, install

EVERY_STEPS = 4 * SAVE_EVERY  # between two stops
BY_HAND = """\
#!/bin/bash
export HPML_ATTEMPT_DIR=/attempts/${{SLURM_RESTART_COUNT:-0}} OMP_NUM_THREADS=1
export MASTER_ADDR=$SLURMD_NODENAME MASTER_PORT=29555
srun --ntasks-per-node=1 bash -c 'PET_NODE_RANK=$SLURM_NODEID exec "$@"' torchrun \\
  {python} -m torch.distributed.run --nnodes=2 --nproc-per-node=1 \\
  --master-addr=$MASTER_ADDR --master-port=$MASTER_PORT {script} {options}
"""
Cost = tuple[float | None, float, int]  # saved, first step, again


def by_hpml(desk: Desk, runs: int, *, local: bool) -> list[Cost]:
    """Stop a training by `hpml requeue`."""
    numbers = random.Random(1)
    with Life(desk, "hpml", {"resources": {}}, steps=steps_of(runs), local=local) as life:
        for step in places(runs):
            life.suffer(Stop("hpml requeue", "training", step), numbers)
        life.end()
    return [(f.saved, first_step(life, f.attempt, f.acted), f.lost_steps) for f in life.figures]


def by_hand(desk: Desk, runs: int) -> list[Cost]:
    """Stop a training of a script by `scontrol requeue`."""
    life = Life(desk, "hand", {}, steps=steps_of(runs))
    options = life.prepare()
    script = desk.directory / "hand.sh"
    script.write_text(
        BY_HAND.format(
            python=PYTHON,
            script=desk.directory / "lifetraining.py",
            options=" ".join([*options, f"--checkpoints={desk.directory}/by-hand"]),
        )
    )
    sbatch = (
        "sbatch",
        "--parsable",
        "--nodes=2",
        "--requeue",
        f"--output={desk.directory}/hand.log",
    )
    job = desk.call(*sbatch, script).stdout.strip()
    costs: list[Cost] = []
    for attempt, step in enumerate(places(runs)):
        life.set_pace(step)
        eventually(lambda: life.made(attempt) >= step, what=f"step {step}")  # noqa: B023
        asked = time.time()
        desk.call("scontrol", "requeue", job)
        eventually(lambda: life.notes(attempt + 1, "first-step"), what="a first step")  # noqa: B023
        (resumed,) = life.notes(attempt + 1, "resumed")
        again = life.made(attempt) - resumed["step"]
        costs.append((None, first_step(life, attempt, asked), again))
    desk.call("scancel", job)
    return costs


def places(runs: int) -> list[int]:
    """Return the steps at which a training is stopped: spread over the time between two saves."""
    return [(run + 1) * EVERY_STEPS + (run * 37 + 13) % SAVE_EVERY for run in range(runs)]


def steps_of(runs: int) -> int:
    """Return the steps of a training long enough for this number of stops."""
    return (runs + 2) * EVERY_STEPS


def first_step(life: Life, attempt: int, asked: float) -> float:
    """Return the seconds from a request to the first step of the next attempt."""
    (first,) = life.notes(attempt + 1, "first-step")
    return float(first["time"] - asked)


def spread(values: list[float]) -> str:
    """Return median, least and most."""
    return f"{statistics.median(values):6.2f} ({min(values):.2f}-{max(values):.2f})"


def report(name: str, costs: list[Cost]) -> None:
    """Print a row."""
    saved = [value for value, _, _ in costs if value is not None]
    again = [float(steps) for _, _, steps in costs]
    print(
        f"{name:<22}{spread(saved) if saved else '-':>22}{spread([c[1] for c in costs]):>22}"
        f"{spread(again):>24}"
    )


def on_slurm(cluster: SlurmCluster, place: Path, runs: int) -> tuple[list[Cost], list[Cost]]:
    """Measure both ways on Slurm."""
    desk = Desk(cluster, place)
    return by_hpml(desk, runs, local=False), by_hand(desk, runs)


def main() -> int:
    """Measure and print; the status is 1 when the goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("runs", type=int, nargs="?", default=5)
    parser.add_argument("--no-slurm", action="store_true", help="only the local backend")
    arguments = parser.parse_args()
    runs = arguments.runs
    load = ", ".join(f"{value:.2f}" for value in os.getloadavg())
    print(f"host      {platform.node()}, {os.cpu_count()} CPUs, load {load}")
    print(f"kernel    {platform.system()} {platform.release()}, Python {platform.python_version()}")
    print(f"runs      {runs} stops of each; seconds and steps, median (least-most)\n")
    print(f"{'':<22}{'saved':>22}{'first step':>22}{'again':>24}")
    directories = Directories(install() / "bench")
    place = directories.mktemp("local")
    nowhere = SlurmCluster(place, place / "no-slurm.conf", (), (), {})
    local = by_hpml(Desk(nowhere, place), runs, local=True)
    report("hpml, this machine", local)
    reached = max(cost[2] for cost in local) <= 1
    if not arguments.no_slurm:
        with booted("--nodes", "2") as cluster:
            ours, hand = on_slurm(cluster, directories.mktemp("slurm"), runs)
        report("hpml, Slurm", ours)
        report("script, Slurm", hand)
        ratio = statistics.median(c[1] for c in ours) / statistics.median(c[1] for c in hand)
        print(f"\nfirst step: hpml takes {ratio:.2f} times as long as the script, saving included")
        again = [sum(cost[2] for cost in costs) for costs in (ours, hand)]
        reached = reached and max(cost[2] for cost in ours) <= 1 and again[0] < again[1]
    shutil.rmtree(install() / "bench", ignore_errors=True)
    print(f"goal: {'reached' if reached else 'MISSED'}")
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
