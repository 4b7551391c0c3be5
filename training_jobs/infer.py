"""Serve images to a trained model: latency percentiles and throughput by batch, window and type.

    python infer.py --data digits --checkpoint-from checkpoints --rate 500 --window-ms 5
    torchrun --standalone --nproc-per-node=2 infer.py --data digits --model resnet18 --dtype int8
    python infer.py --model resnet18 --rate 0              # random images, highest throughput

Requests arrive at random times that do not depend on the server (open loop), and latency counts
from the arrival, including the wait in the queue. Each rank is a replica that serves every n-th
request. --rate 0 is a closed loop: the next batch starts when the last one ends. Needs
infer_model.py, images_files.py, images_model.py and images_nets.py.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import time
from pathlib import Path
from typing import NamedTuple, NoReturn

import numpy as np
import torch
from torch import nn
from torch.profiler import record_function

import hpml_job
from hpml_channel import Channel
from hpml_checkpoint import Ranks
from hpml_job import JobError, raise_together, say
from hpml_profile import trace_steps
from images_nets import MODELS
from infer_model import Data, converted, load_weights, make_model, read_data, scores_of

NUMBERS = {  # numeric options: default, minimum, help
    "requests": (2000, 1, "that all ranks serve together"),
    "rate": (200.0, 0.0, "requests per second of all ranks together; 0: closed loop"),
    "batch-size": (16, 1, "images of the largest batch"),
    "window-ms": (5.0, 0.0, "how long the first request of a batch waits for others"),
    "warm-up-requests": (100, 0, "first requests, which no figure has"),
    "width": (16, 1, "of the model, without --checkpoint-from"),
    "size": (32, 8, "height and width of random images"),
    "seed": (1, 0, "of arrivals, their images, and random weights"),
}
OVERLOAD = 0.95  # of the rate: with less throughput the queue keeps growing
EXTRA_BATCHES = 2  # of each size before the first request: PyTorch warms up per size


class Served(NamedTuple):
    """What a rank measured: seconds since the start, for each request and each batch."""

    arrivals: list[float]
    ends: list[float]
    batches: list[int]
    busy_seconds: list[float]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line; exits with 2 if they are invalid."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    hpml_job.add_options(parser, NUMBERS, saves=False)
    add("--data", type=Path, metavar="DIR", help="as for ddp_images.py; default: random images")
    text = "the model that ddp_images.py saved there; default: random weights"
    add("--checkpoint-from", type=Path, metavar="DIR", help=text)
    add("--model", choices=tuple(MODELS), default="cnn")
    text = "int8: static quantisation of convolutions and linear layers, on the CPU"
    add("--dtype", choices=("float32", "bf16", "int8"), default="float32", help=text)
    options = parser.parse_args(arguments)
    hpml_job.check_numbers(parser, options, NUMBERS)
    if options.checkpoint_from and not options.data:
        parser.error(f"--checkpoint-from {options.checkpoint_from}: needs --data, which it learned")
    if options.warm_up_requests >= options.requests:
        most = f"--warm-up-requests {options.warm_up_requests}"
        parser.error(f"--requests {options.requests} must be more than {most}")
    return options


def arrivals_of(options: argparse.Namespace, images: int) -> tuple[list[float], list[int]]:
    """Return when each request arrives, in seconds from the start, and its image."""
    random = np.random.default_rng(options.seed)
    gaps = random.exponential(1 / options.rate if options.rate else 0.0, options.requests)
    return gaps.cumsum().tolist(), random.integers(images, size=options.requests).tolist()


def serve(
    model: nn.Module,
    data: Data,
    options: argparse.Namespace,
    channel: Channel,
    ranks: Ranks,
) -> Served:
    """Serve this rank's requests: at the end of the first one's window, all that have arrived."""
    every, wanted = arrivals_of(options, len(data.images))
    mine = slice(ranks.rank, None, ranks.world_size)
    arrivals, wanted, size = every[mine], wanted[mine], options.batch_size
    window, is_open, done = options.window_ms / 1e3, options.rate > 0, 0
    served = Served([], [], [], [])
    for count in range(1, size + 1):
        for _ in range(EXTRA_BATCHES):
            scores_of(model, data.images[wanted[:1] * count], options)
    ranks.gather(None)  # start together
    start = time.perf_counter()
    with trace_steps(options.profile, ranks.rank, after=10) as tracer:
        while done < len(arrivals) and not channel.stop_requested():
            last = done + size - 1  # its arrival fills the batch
            full = arrivals[last] if last < len(arrivals) else math.inf
            due = min(full, arrivals[done] + window) if is_open else 0.0
            slept = time.perf_counter()
            while (wait := start + due - time.perf_counter()) > 0:
                time.sleep(wait)
            began = time.perf_counter()
            now = began - start
            count = size
            if is_open:
                count = sum(arrival <= now for arrival in arrivals[done : done + size])
            batch = slice(done, min(done + count, len(arrivals)))
            with record_function("hpml.step"):
                scores_of(model, data.images[wanted[batch]], options)
            end = time.perf_counter()
            asked = arrivals[batch] if is_open else [now] * len(arrivals[batch])
            served.arrivals.extend(asked)
            served.ends.extend([end - start] * len(asked))
            served.batches.append(len(asked))
            served.busy_seconds.append(end - began)
            done = batch.stop
            channel.count(steps=1, samples=len(asked), step_seconds=end - began)
            channel.count(idle_seconds=began - slept)
            tracer.step()
    return served


def accuracies(
    models: dict[str, nn.Module], data: Data, options: argparse.Namespace, ranks: Ranks
) -> dict[str, float | None]:
    """Return the accuracy of the served model and of float32, and how often both agree."""
    right = {"test_accuracy": 0, "float32_accuracy": 0, "agreement": 0}
    mine = slice(ranks.rank, None, ranks.world_size)
    plain = argparse.Namespace(dtype="float32")
    for numbers in torch.arange(len(data.images))[mine].split(64):
        some = data.images[numbers]
        found = scores_of(models["served"], some, options).argmax(1)
        expected = scores_of(models["float32"], some, plain).argmax(1)
        right["agreement"] += int((found == expected).sum())
        if data.labels is not None:
            right["test_accuracy"] += int((found == data.labels[numbers]).sum())
            right["float32_accuracy"] += int((expected == data.labels[numbers]).sum())
    sums = {name: sum(ranks.gather(count)) / len(data.images) for name, count in right.items()}
    is_known = data.labels is not None
    return {name: one if is_known or name == "agreement" else None for name, one in sums.items()}


def figures_of(every: list[Served], options: argparse.Namespace) -> dict[str, float]:
    """Return percentiles over all ranks' requests together, and the throughput."""
    skipped = -(-options.warm_up_requests // len(every))  # per rank
    kept = [(s.arrivals[skipped:], s.ends[skipped:]) for s in every if len(s.ends) > skipped]
    if not kept:  # stopped earlier
        return {}
    latencies = np.concatenate([1e3 * np.subtract(ends, begun) for begun, ends in kept])
    begun, ended = min(arrivals[0] for arrivals, _ in kept), max(ends[-1] for _, ends in kept)
    p50, p95, p99 = (float(np.percentile(latencies, percent)) for percent in (50, 95, 99))
    throughput = len(latencies) / (ended - begun)
    batches = [count for served in every for count in served.batches]
    busy = [seconds for served in every for seconds in served.busy_seconds]
    return {
        "latency_p50_ms": p50, "latency_p95_ms": p95, "latency_p99_ms": p99,
        "latency_max_ms": float(latencies.max()), "throughput": throughput,
        "samples_per_second": throughput, "mean_batch": sum(batches) / len(batches),
        "batch_ms": 1e3 * float(np.median(busy)), "measured_requests": len(latencies),
        "overloaded": bool(options.rate and throughput < OVERLOAD * options.rate),
    }  # fmt: skip


@torch.no_grad()
def infer(options: argparse.Namespace, channel: Channel, device: torch.device) -> None:
    """Load the model, serve all requests, and report."""
    ranks, problem = Ranks(), ""
    hpml_job.make_directories(options, ranks)
    weights = load_weights(options, ranks)
    try:
        data = read_data(options)
    except (JobError, OSError) as error:
        problem = str(error)
    raise_together(ranks, problem)
    original = make_model(options, data, weights)
    try:
        model = converted(original, data, options, device)
    except JobError as error:
        problem = str(error)
    raise_together(ranks, problem)
    packed = io.BytesIO()
    torch.save(model.state_dict(), packed)
    channel.event("training", step=0, total_steps=-(-options.requests // ranks.world_size))
    served = serve(model, data, options, channel, ranks)
    mine = range(ranks.rank, options.requests, ranks.world_size)
    stopped = any(ranks.gather(len(served.ends) < len(mine)))
    found = figures_of(ranks.gather(served), options)
    with channel.timed("evaluation_seconds"):
        quality = accuracies({"served": model, "float32": original}, data, options, ranks)
    result = {
        **found, **quality, "model_bytes": len(packed.getvalue()), "rate": options.rate,
        "batch_size": options.batch_size, "window_ms": options.window_ms, "dtype": options.dtype,
        "model": options.model, "width": options.width, "seed": options.seed, "stopped": stopped,
        "world_size": ranks.world_size, "device": hpml_job.device_name(device),
    }  # fmt: skip
    hpml_job.report(result, channel, options, ranks)
    if found.get("overloaded"):
        text = f"{found['throughput']:.0f} of {options.rate:g} requests/s were served"
        say(ranks, f"overloaded: {text}; latencies grow with --requests")
    say(ranks, f"{'stopped' if stopped else 'done'}: {json.dumps(result)}")


def main(arguments: list[str] | None = None) -> NoReturn:
    """Serve, and exit with 0, or with 2 and a line with the reason."""
    hpml_job.run(infer, parse(arguments))


if __name__ == "__main__":
    main()
