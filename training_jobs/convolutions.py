"""Time four algorithms of a convolution layer; split its batch to keep workspace within a limit.

    python convolutions.py --batch-size 64 --channels 16 --filters 32 --image 28
    python convolutions.py --batch-size 64 --algorithms im2col,fft,winograd --workspace-mb 8

All outputs are compared with the direct algorithm's. Workspace is what an algorithm allocates
besides its output. --workspace-mb splits the batch into micro-batches, each with its own algorithm,
to minimize the sum of the measured times (Oyama et al. 2018). Needs convolution_algorithms.py.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

import hpml_job
from convolution_algorithms import ALGORITHMS, costs, direct
from hpml_channel import Channel
from hpml_checkpoint import Ranks
from hpml_job import JobError, say
from hpml_profile import trace_steps

Row = dict[str, Any]  # a row of the table
NUMBERS = {  # numeric options: default, minimum, help
    "batch-size": (32, 1, "images of the largest batch"),
    "channels": (16, 1, "of the input"),
    "filters": (32, 1, "channels of the output"),
    "image": (28, 1, "height and width of the input"),
    "kernel": (3, 1, "height and width of a filter; Winograd's has 3"),
    "workspace-mb": (0.0, 0, "limit in MiB, and plan micro-batches; 0: no plan"),
    "repeats": (10, 1, "runs of which the median counts"),
    "warm-up-steps": (3, 0, "first runs, which are left out"),
    "seed": (1, 0, "of images and filters"),
}
TOLERANCE = 1e-4  # difference to direct, relative to the largest output
MIB = 1 << 20
Plan = list[tuple[int, str]]  # micro-batches and their algorithms


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line; exits with 2 if they are invalid."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    hpml_job.add_options(parser, NUMBERS, saves=False)
    text = f"some of {', '.join(ALGORITHMS)}, with commas; benchmark: cuDNN's, on GPUs"
    parser.add_argument("--algorithms", default="all", metavar="LIST", help=f"{text}; default: all")
    options = parser.parse_args(arguments)
    hpml_job.check_numbers(parser, options, NUMBERS)
    named = options.algorithms.split(",")
    if unknown := [one for one in named if one not in {*ALGORITHMS, "all"}]:
        parser.error(f"--algorithms {unknown[0]}: must be all or some of {', '.join(ALGORITHMS)}")
    if "winograd" in named and options.kernel != 3:  # noqa: PLR2004
        parser.error(f"--kernel {options.kernel}: --algorithms winograd needs 3")
    options.algorithms = [*ALGORITHMS] if "all" in named else [*dict.fromkeys(named)]
    if options.kernel != 3 and "winograd" in options.algorithms:  # noqa: PLR2004
        options.algorithms.remove("winograd")
    return options


def synchronize(device: torch.device) -> None:
    """Wait for the GPU, if there is one."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_bytes(call: Callable[[], Tensor], device: torch.device) -> int:
    """Return the peak memory that a call allocates, without its result."""
    size = call().nbytes  # warm up: libraries keep some buffers
    if device.type == "cuda":
        synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before - size
    # PyTorch does not count CPU memory, but its profiler records each allocation.
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        output = call()
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "trace.json")
        found.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    noted = [one for one in events if one.get("name") == "[memory]"]
    noted.sort(key=lambda one: (one["ts"], one["args"].get("Ev Idx", 0)))
    return max(accumulate(one["args"]["Bytes"] for one in noted), default=0) - output.nbytes


def milliseconds_of(
    calls: Mapping[str, Callable[[], Tensor]],
    options: argparse.Namespace,
    device: torch.device,
    traces: Path | None = None,
) -> dict[str, float]:
    """Return the median time of each call, on the slowest rank; the calls take turns."""
    ranks, took = Ranks(), {name: list[float]() for name in calls}
    with trace_steps(traces, ranks.rank, after=options.warm_up_steps) as tracer:
        for _ in range(options.warm_up_steps + options.repeats):
            with record_function("hpml.step"):
                for name, call in calls.items():
                    synchronize(device)
                    began = time.perf_counter()
                    with record_function(name):
                        call()
                        synchronize(device)
                    took[name].append(1e3 * (time.perf_counter() - began))
            tracer.step()
    medians = [median(times[options.warm_up_steps :]) for times in took.values()]
    return dict(zip(calls, ranks.highest(*medians)))  # noqa: B905 - Python 3.9


def divide(batch: int, fastest: Mapping[int, tuple[float, str]]) -> tuple[float, Plan]:
    """Return the fastest micro-batches that add up to a batch: total time, and the plan.

    Args:
        batch: number of images.
        fastest: by micro-batch size, time and name of the fastest algorithm within the limit.
    """
    best: list[tuple[float, Plan]] = [(0.0, [])]  # by number of images
    for count in range(1, batch + 1):
        before = [(best[count - size], size) for size in fastest if size <= count]
        ends = [(time + fastest[n][0], [*plan, (n, fastest[n][1])]) for (time, plan), n in before]
        best.append(min(ends))
    return best[batch]


def run_plan(plan: Plan, images: Tensor, filters: Tensor) -> Tensor:
    """Compute a batch in micro-batches: each frees its workspace for the next."""
    parts = images.split([size for size, _ in plan])
    done = [ALGORITHMS[name](part, filters) for part, (_, name) in zip(parts, plan)]  # noqa: B905
    return torch.cat(done) if len(done) > 1 else done[0]


def error_of(output: Tensor, expected: Tensor, name: str) -> float:
    """Return the largest difference relative to the largest output; raises if it is too large."""
    error = float((output - expected).abs().max() / expected.abs().max())
    if not error <= TOLERANCE:
        raise JobError(f"{name} differs from direct by {error:.1e}, more than {TOLERANCE:.0e}")
    return error


def measure_size(
    options: argparse.Namespace, images: Tensor, filters: Tensor, names: list[str]
) -> list[Row]:
    """Return error, workspace and time of each algorithm for one batch size."""
    calls = {name: partial(ALGORITHMS[name], images, filters) for name in names}
    expected, size, device = direct(images, filters), len(images), images.device
    errors = [error_of(call(), expected, name) for name, call in calls.items()]
    used = Ranks().highest(*(peak_bytes(call, device) for call in calls.values()))
    traces = options.profile if size == options.batch_size else None
    times = milliseconds_of(calls, options, device, traces).values()
    rows = []
    for name, error, workspace, took in zip(names, errors, used, times):  # noqa: B905
        work, made = costs(name, size, options)
        row = {"batch": size, "algorithm": name, "ms": took, "workspace_bytes": int(workspace)}
        rows.append({**row, "computed_bytes": made, "multiplications": work, "error": error})
    return rows


def plan_of(rows: list[Row], options: argparse.Namespace, images: Tensor, filters: Tensor) -> Row:
    """Return the fastest plan within the limit, its predicted and its measured time."""
    batch, limit = len(images), options.workspace_mb * MIB
    slowest_first = sorted(rows, key=lambda row: -float(row["ms"]))
    fits = [row for row in slowest_first if row["workspace_bytes"] <= limit]
    fastest = {row["batch"]: (row["ms"], row["algorithm"]) for row in fits}
    if 1 not in fastest:
        least = min(row["workspace_bytes"] for row in rows if row["batch"] == 1) / MIB
        reason = f"no algorithm fits; the least for one image is {least:.2f}"
        raise JobError(f"--workspace-mb {options.workspace_mb:g}: {reason}")
    predicted, plan = divide(batch, fastest)
    call = partial(run_plan, plan, images, filters)
    error = error_of(call(), direct(images, filters), "the plan")
    took = milliseconds_of({"plan": call}, options, images.device)["plan"]
    parts = (f"{plan.count(one)} x {one[0]} {one[1]}" for one in dict.fromkeys(plan))
    times = {"plan_ms": took, "plan_predicted_ms": predicted, "plan_error": error}
    return {"plan": " + ".join(parts), **times, "undivided_ms": fastest.get(batch, [None])[0]}


@torch.no_grad()
def measure(options: argparse.Namespace, channel: Channel, device: torch.device) -> None:
    """Measure each algorithm by batch size, print the table, and plan if there is a limit."""
    ranks, batch = Ranks(), options.batch_size
    hpml_job.make_directories(options, ranks)
    names = [one for one in options.algorithms if device.type == "cuda" or one != "benchmark"]
    if not names:
        raise JobError("--algorithms benchmark: is cuDNN's, which needs a GPU")
    torch.manual_seed(options.seed)
    images = torch.randn(batch, options.channels, options.image, options.image, device=device)
    shape = options.filters, options.channels, options.kernel, options.kernel
    filters = torch.randn(shape, device=device)
    # Micro-batches are powers of two or the whole batch: measuring all sizes would take too long.
    sizes = sorted({batch, *(1 << power for power in range(batch.bit_length()))})
    rows: list[Row] = []
    channel.event("training", step=0, total_steps=len(sizes))
    say(ranks, "batch  algorithm         ms  images/s  workspace MiB  computed  Mmul/image  error")
    for size in sizes:
        rows += measure_size(options, images[:size], filters, names)
        channel.count(steps=1, samples=size)
        for row in rows[-len(names) :]:
            text = (
                f"{size:5}  {row['algorithm']:9} {row['ms']:10.3f}  {1e3 * size / row['ms']:8.0f}"
            )
            text += f"  {row['workspace_bytes'] / MIB:13.2f}  {row['computed_bytes'] / MIB:8.2f}"
            say(ranks, f"{text}  {row['multiplications'] / size / 1e6:10.2f}  {row['error']:5.0e}")
    whole = rows[-len(names) :]
    best = min(whole, key=lambda row: float(row["ms"]))
    settings = {name.replace("-", "_") for name in NUMBERS}
    result = {
        "fastest": best["algorithm"], "ms": best["ms"], "us_per_image": 1e3 * best["ms"] / batch,
        "samples_per_second": 1e3 * batch / best["ms"], "workspace_bytes": best["workspace_bytes"],
        "max_error": max(row["error"] for row in rows), "world_size": ranks.world_size,
        **{f"{row['algorithm']}_ms": row["ms"] for row in whole},
        **{f"{row['algorithm']}_workspace_bytes": row["workspace_bytes"] for row in whole},
        **{name: value for name, value in vars(options).items() if name in settings},
        "device": hpml_job.device_name(device), "threads": torch.get_num_threads(),
    }  # fmt: skip
    if options.workspace_mb:
        result.update(found := plan_of(rows, options, images, filters))
        say(ranks, f"plan within {options.workspace_mb:g} MiB: {found['plan']}")
        alone = found["undivided_ms"]
        text = f"{alone:.3f} ms" if alone else "does not fit"
        times = f"predicted {found['plan_predicted_ms']:.3f} ms, measured {found['plan_ms']:.3f} ms"
        say(ranks, f"{times}; undivided: {text}")
    hpml_job.report(result, channel, options, ranks, table=rows)


def main(arguments: list[str] | None = None) -> NoReturn:
    """Measure, and exit with 0, or with 2 and a line with the reason."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or the profiler prints a line per start
    hpml_job.run(measure, parse(arguments))


if __name__ == "__main__":
    main()
