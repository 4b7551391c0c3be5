"""Train a CNN or a ResNet-18 on folders of PNG files with PyTorch DistributedDataParallel.

    python ddp_images.py --data digits
    torchrun --standalone --nproc-per-node=2 ddp_images.py --data digits --target-accuracy 0.95

Here are the loop and what DDP needs. Beside this file: images_options.py (options), images_data.py
(what a rank reads), images_model.py, and images_common.py (evaluate, save, load, the figures).
docs/images.md describes what to type, what you see and what to change.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import sys
import time
from datetime import timedelta
from typing import Any, NoReturn

import images_common as common
import images_options
import torch
import torch.distributed as dist
from images_data import JobError
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function

from hpml_channel import Channel
from hpml_checkpoint import CheckpointError, Ranks
from hpml_waits import measure_waits


def parse(arguments: list[str] | None) -> Any:
    """Return the options of the command line."""
    parser = images_options.options_of("Train on folders of images with DDP.")
    add = parser.add_argument
    add("--accumulate", type=int, default=1, metavar="N", help="compute each batch in N parts")
    add("--channels-last", action="store_true", help="the memory format that tensor cores prefer")
    add("--compile", action="store_true", help="use torch.compile")
    add("--bucket-mb", type=float, default=25, help="size of DDP's buckets of gradients")
    return images_options.parse(parser, arguments)


def prepare(options: argparse.Namespace, device: torch.device, channel: Channel) -> Any:
    """Return the data, the model, and how far the training is."""
    run = common.prepare(options, device, channel, Ranks())
    if options.channels_last:
        run.network.to(memory_format=torch.channels_last)
    if options.compile:
        run.network.compile()
    if dist.is_initialized():
        run.model = DistributedDataParallel(
            run.network, bucket_cap_mb=options.bucket_mb, gradient_as_bucket_view=True
        )
        run.waits = measure_waits(run.model, channel)  # finds the rank that the others wait for
    return run


def train_step(run: Any, images: Tensor, labels: Tensor) -> Tensor:
    """Make one step of the optimizer with a batch; return the loss."""
    is_distributed = run.model is not run.network
    if not is_distributed:  # with DDP, its first bucket of gradients begins a step
        run.waits.step()
    images, labels = common.to_device(run, images, labels)
    total, parts = torch.zeros((), device=run.device), run.options.accumulate
    batches = [*zip(images.chunk(parts), labels.chunk(parts))]  # noqa: B905 - Python 3.9
    for number, (some, targets) in enumerate(batches, 1):
        waits = is_distributed and number < len(batches)  # gradients travel after the last part
        with run.model.no_sync() if waits else contextlib.nullcontext():
            with run.autocast():
                loss = nn.functional.cross_entropy(run.model(some), targets)
            loss = loss * (len(targets) / len(labels))
            run.scaler.scale(loss).backward()
        total += loss.detach()
    common.set_learning_rate(run)
    run.scaler.step(run.optimizer)
    run.scaler.update()
    run.optimizer.zero_grad()
    return total


def train_epoch(run: Any) -> bool:
    """Train from the position to the epoch's end; return whether the ranks stop before it."""
    batches, stopped = common.begin_epoch(run), False
    while run.position.step < run.data.train_steps and not stopped:
        began = time.perf_counter()
        with record_function("hpml.step"):
            with record_function("hpml.data"):
                images, labels, problems = next(batches)
            waited = time.perf_counter() - began
            loss = train_step(run, images, labels)
        run.problem = run.problem or next(filter(None, problems), "")  # of a file
        stopped = common.end_step(run, loss, len(labels), waited, began)
    return stopped


def train(options: argparse.Namespace, device: torch.device, channel: Channel) -> None:
    """Train from the newest checkpoint to the last epoch, the target or a stop request."""
    run = prepare(options, device, channel)
    common.load(run)
    stopped = common.begin(run)
    with common.profiler(options, run.ranks.rank) as run.profiler:
        while not stopped and not common.is_over(run):
            stopped = train_epoch(run) or common.end_epoch(run)  # evaluates and saves
    common.finish(run, stopped=stopped)


def leave(status: int) -> NoReturn:
    """End this process, after all ranks came here.

    With gloo a correct training may die at the interpreter's exit (pytorch#190489): threads of the
    DDP model or the group are still there when C++ tears down. So nothing refers to the model any
    more, all ranks meet, the group is destroyed, and the tear-down is left out.
    """
    gc.collect()
    if dist.is_initialized():
        with contextlib.suppress(RuntimeError):  # a rank that died already cannot come
            dist.all_reduce(torch.zeros(1))  # a barrier that touches no GPU
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def main(arguments: list[str] | None = None) -> NoReturn:
    """Train and end the process: with 0, or with 2 and one line that says why."""
    options, channel, status = parse(arguments), Channel.from_env(), 0
    channel.event("rendezvous")
    try:
        device = common.device_of(options.device, int(os.environ.get("LOCAL_RANK", "0")))
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(backend, timeout=timedelta(seconds=options.timeout_seconds))
    except (JobError, RuntimeError, ValueError) as error:
        common.complain(error)
        os._exit(2)
    try:
        train(options, device, channel)
    except (JobError, CheckpointError) as error:
        status = 2
        if not dist.is_initialized() or dist.get_rank() == 0:
            common.complain(error)
    channel.close()
    leave(status)


if __name__ == "__main__":
    main()
