"""What it costs a training to have its waits measured by hpml_waits.py.

    python tests/bench/bench_waits.py [BLOCKS]

Two ranks train two copies of a model over gloo, one with `measure_waits` and one without, in blocks
of 50 steps that take turns, so that both meet the same load on the machine. The cost has two
parts: the hook in each step, as CPU time (wall-clock time on a shared machine cannot resolve
microseconds), and the longer duration of the few steps that are measured. Goal: 0.1 % together.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[2] / "training_jobs"))
import hpml_channel
import hpml_waits
import images_nets

GOAL_PERCENT = 0.1
RANKS, STEPS = 2, 50


def digits() -> tuple[nn.Module, torch.Tensor]:
    """Return the CNN of ddp_images.py and a batch for it: steps of some milliseconds."""
    return images_nets.cnn((1, 8, 8), 10, 16, 0.2), torch.randn(32, 1, 8, 8)


def wide() -> tuple[nn.Module, torch.Tensor]:
    """Return a network of several buckets, whose averaging is much of the step."""
    layers = [part for _ in range(6) for part in (nn.Linear(512, 512), nn.ReLU())]
    return nn.Sequential(*layers), torch.randn(64, 512)


def block(model: Any, batch: torch.Tensor, waits: Any) -> tuple[float, list[tuple[float, bool]]]:
    """Train for one block; return its CPU seconds per step, and how long each step took."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    cpu, steps = time.process_time(), []
    for _ in range(STEPS):
        began = time.perf_counter()
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        took = time.perf_counter() - began
        steps.append((took, waits is not None and waits.is_measured))
    return (time.process_time() - cpu) / STEPS, steps


def rank(number: int, store: str, blocks: int, output: str) -> None:
    """Run all blocks; rank 0 writes the figures."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=RANKS)
    figures = {}
    for make in (digits, wide):
        models, batch = [], torch.empty(0)
        for _ in range(2):
            network, batch = make()
            models.append(DistributedDataParallel(network, bucket_cap_mb=2))
        waits = hpml_waits.measure_waits(models[1], hpml_channel.Channel())
        more_cpu: list[float] = []
        steps: list[tuple[float, bool]] = []
        for turn in range(blocks + 1):
            plain, _ = block(models[0], batch, None)
            hooked, seen = block(models[1], batch, waits)
            if turn:  # the first one connects and warms up
                more_cpu.append(hooked - plain)
                steps += seen
        usual = statistics.median(took for took, measured in steps if not measured)
        long = [took - usual for took, measured in steps if measured]
        figures[make.__name__] = {
            "step_ms": usual * 1e3,
            "hook_cpu_us_per_step": statistics.median(more_cpu) * 1e6,
            "hook_percent": statistics.median(more_cpu) / usual * 100,
            "measured": f"{len(long)} of {len(steps)} steps",
            "measured_step_longer_ms": statistics.median(long) * 1e3,
            "measuring_percent": statistics.median(long) * len(long) / len(steps) / usual * 100,
        }
    if number == 0:
        Path(output).write_text(json.dumps(figures))
    dist.barrier()
    os._exit(0)


def main() -> None:
    """Run the command line."""
    blocks = int(sys.argv[1]) if len(sys.argv) > 1 else 12
    print(f"{platform.node()}: {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory() as directory:
        output = f"{directory}/figures.json"
        context = multiprocessing.get_context("spawn")
        arguments = (f"{directory}/store", blocks, output)
        ranks = [context.Process(target=rank, args=(n, *arguments)) for n in range(RANKS)]
        for one in ranks:
            one.start()
        for one in ranks:
            one.join()
        for name, figures in json.loads(Path(output).read_text()).items():
            print(name, json.dumps(figures))
            percent = figures["measuring_percent"]
            print(f"  measuring {percent:.3f} % of the time (goal: {GOAL_PERCENT} %)")


if __name__ == "__main__":
    main()
