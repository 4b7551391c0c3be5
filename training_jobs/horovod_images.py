"""Train a network on folders of images with Horovod; see docs/horovod.md."""

from __future__ import annotations

import argparse
import os
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import horovod.torch as hvd
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import images_data
import images_model
from hpml_channel import Channel
from hpml_checkpoint import CheckpointError, Ranks, StopAgreement
from hpml_job import (
    JobError,
    add_options,
    check_numbers,
    choose_device,
    raise_together,
    report,
    say,
)
from hpml_profile import trace_steps
from hpml_waits import Waits
from images_data import ImageData, checkpoints_of
from images_model import learning_rate, make_model, make_optimizer

NUMBERS = {  # numeric options; images and learning rate are per rank
    "width": (16, 1, ""), "dropout": (0.2, 0, ""), "epochs": (12, 1, ""), "batch-size": (32, 1, ""),
    "lr": (0.0, 0, "0: usual"), "lr-warmup-epochs": (2, 0, ""), "weight-decay": (1e-4, 0, ""),
    "seed": (1, 0, ""), "workers": (1, 0, ""), "size": (0, 0, ""), "train-images": (0, 0, ""),
    "warm-up-steps": (20, 0, ""), "stop-after-epochs": (0, 0, ""), "timeout-seconds": (600, 1, ""),
}  # fmt: skip
TUNING = {"fusion-threshold-mb": 0.0, "cycle-time-ms": 0.01, "groups": 1}  # minimum values
SHOWN = "model optimizer seed target_accuracy compression groups".split()
SHOWN += ["fusion_threshold_mb", "cycle_time_ms"]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Return the options of the command line; exits with 2 if they are invalid."""
    parser = argparse.ArgumentParser(description="Train on folders of images with Horovod.")
    add = parser.add_argument
    add_options(parser, NUMBERS)
    for name, least in TUNING.items():
        add(f"--{name}", type=type(least), metavar="N", help="default: Horovod's own")
    add("--compression", choices=("none", "fp16"), default="none", help="gradient compression")
    images_data.add_options(parser)
    images_model.add_options(parser)
    add("--target-accuracy", type=float, metavar="PART", help="report the seconds to reach it")
    options = parser.parse_args(arguments)
    check_numbers(parser, options, NUMBERS)
    for name, least in TUNING.items():
        if (value := getattr(options, name.replace("-", "_"))) is not None and value < least:
            parser.error(f"--{name} must be at least {least}")
    images_model.complete(options)
    return options


@torch.no_grad()
def evaluate(
    part: str, network: nn.Module, data: ImageData, device: torch.device, ranks: Ranks
) -> float:
    """Return the accuracy on the part `validation` or `test` of the data."""
    right = 0
    network.eval()
    for images, labels in data.evaluation_batches(part):
        right += int((network(images.to(device)).argmax(1).cpu() == labels).sum())
    raise_together(ranks, data.problem)  # an unreadable file
    return sum(ranks.gather(right)) / data.images[part]


def train(options: argparse.Namespace, device: torch.device, channel: Channel) -> None:  # noqa: PLR0915
    """Train from the newest checkpoint to the last epoch or a stop request."""
    rank, size, highest = hvd.rank(), hvd.size(), partial(hvd.allreduce, op=hvd.Max)
    ranks: Any = SimpleNamespace(rank=rank, world_size=size, group=None)  # for hpml_checkpoint.py
    ranks.gather = partial(hvd.allgather_object, name="gather")
    ranks.highest = lambda *values: highest(torch.tensor(values, dtype=torch.float64)).tolist()
    data, target = ImageData(options, ranks, device), options.target_accuracy or 2
    torch.manual_seed(options.seed + rank)  # rank 0's weights are broadcast below
    network = make_model(options, data.shape, data.classes, device)
    torch.manual_seed(options.seed * 1_000_003 + rank)  # each rank has its own dropout
    how = {"compression": getattr(hvd.Compression, options.compression), "groups": options.groups}
    optimizer, names = make_optimizer(network, options), network.named_parameters()
    optimizer = hvd.DistributedOptimizer(optimizer, names, op=hvd.Average, **how)
    at = SimpleNamespace(epochs=0, step=0, train_seconds=0.0, samples_per_second=None)
    at.validation_accuracy = at.test_accuracy = at.seconds_to_accuracy = None
    checkpoints = checkpoints_of(options, data, channel, ranks)
    if checkpoints and (found := checkpoints.load()):
        network.load_state_dict(found.state["network"])
        optimizer.load_state_dict(found.state["optimizer"])
        vars(at).update(found.state["position"])
        say(ranks, f"resumed from {found.path}: {at.epochs} epochs, {at.step} steps are done")
    elif options.transfer:
        images_model.transfer(network, options.transfer, ranks)
    # Not broadcast_optimizer_state: its step with zero gradients changes weights by weight decay.
    optimizer.load_state_dict(hvd.broadcast_object(optimizer.state_dict(), 0, name="optimizer"))
    hvd.broadcast_parameters(network.state_dict(), 0)
    last = min(options.epochs, at.epochs + (options.stop_after_epochs or options.epochs))
    channel.event("warm-up", steps=options.warm_up_steps)
    channel.event("training", step=at.step, total_steps=data.starts[-1])
    started, stop, steps = time.perf_counter() - at.train_seconds, 0, data.train_steps
    agreement, waits = StopAgreement(ranks), Waits(channel, device=device, highest=highest)
    with trace_steps(options.profile, rank, after=options.warm_up_steps) as tracing:
        while at.epochs < last and not stop:
            batches, sums = data.train_batches(at.step), torch.tensor([0, 0, 1e-9])
            network.train()
            while at.step < data.starts[at.epochs + 1] and not stop:
                began = time.perf_counter()
                images, labels = next(batches)
                waited, count = time.perf_counter() - began, len(labels)
                waits.step()
                loss = cross_entropy(network(images.to(device)), labels.to(device))
                loss.backward()
                waits.meet()
                optimizer.param_groups[0]["lr"] = learning_rate(at.step, steps, size, options)
                optimizer.step()  # averages the gradients
                optimizer.zero_grad()
                at.step, took = at.step + 1, time.perf_counter() - began
                sums += torch.tensor([loss.item() * count, count, took])
                channel.gauge(loss=loss.item(), epoch=at.epochs)
                tracing.step()
                channel.count(steps=1, samples=count, data_wait_seconds=waited, step_seconds=took)
                stop = agreement.exchange(channel.stop_requested())
            if not (stop := stop or agreement.finish()):
                with channel.timed("evaluation_seconds"):
                    accuracy = evaluate("validation", network, data, device, ranks)
                at.validation_accuracy, at.epochs = accuracy, at.epochs + 1
                channel.event("evaluation", accuracy=accuracy, epoch=at.epochs)
                if accuracy >= target and not at.seconds_to_accuracy:
                    at.seconds_to_accuracy = time.perf_counter() - started
                total, samples, took = hvd.allreduce(sums, op=hvd.Sum).tolist()
                text = f"validation accuracy {accuracy:.4f}"
                if samples:  # otherwise an earlier attempt trained this epoch
                    at.samples_per_second = rate = size * samples / took
                    text = f"loss {total / samples:.4f}, {text}, {rate:.0f} samples/s"
                say(ranks, f"epoch {at.epochs}/{options.epochs}: {text}")
            at.train_seconds = time.perf_counter() - started
            if checkpoints:
                state = {"network": network.state_dict(), "optimizer": optimizer.state_dict()}
                checkpoints.save({**state, "position": vars(at)}, step=at.step)
    if stop:
        channel.event("stopping", step=at.step)
    else:
        with channel.timed("evaluation_seconds"):
            at.test_accuracy = evaluate("test", network, data, device, ranks)
    result = {
        **vars(at), **{name: getattr(options, name) for name in SHOWN}, "stopped": bool(stop),
        "world_size": size, "batch_size_per_rank": options.batch_size, "device": device.type,
        "learning_rate": options.lr * size, "controller": "mpi" if hvd.mpi_enabled() else "gloo",
        **{f"{part}_images": count for part, count in data.images.items()},
    }  # fmt: skip
    report(result, channel, options, ranks)
    end = "stopped" if stop else "done"
    text = f"{end}: {at.epochs} epochs in {at.train_seconds:.1f} s"
    say(ranks, f"{text}, {size} ranks on {device.type}")


def main(arguments: list[str] | None = None) -> NoReturn:
    """Join the other ranks, train, and exit with 0, or with 2 and a line on stderr."""
    options, variables, status = parse(arguments), os.environ, 0
    if options.fusion_threshold_mb is not None:
        variables["HOROVOD_FUSION_THRESHOLD"] = str(round(options.fusion_threshold_mb * 2**20))
    if options.cycle_time_ms is not None:
        variables["HOROVOD_CYCLE_TIME"] = str(options.cycle_time_ms)
    # Otherwise Horovod only warns, and the ranks wait for a dead one until the time limit.
    variables["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"] = str(options.timeout_seconds)
    channel = Channel.from_env()
    channel.event("rendezvous")
    hvd.init()
    channel.event("preparation")
    variables["LOCAL_RANK"] = str(hvd.local_rank())
    try:
        if (size := int(variables.get("WORLD_SIZE", hvd.size()))) != hvd.size():
            raise JobError(f"WORLD_SIZE is {size}, but Horovod sees {hvd.size()} ranks: use mpirun")
        train(options, choose_device(options), channel)
    except (JobError, CheckpointError) as error:
        status = 2
        if hvd.rank() == 0:
            print(f"{Path(sys.argv[0]).name}: error: {error}", file=sys.stderr)
    channel.close()
    hvd.allreduce(torch.zeros(1), op=hvd.Sum)  # final synchronization of all ranks
    hvd.shutdown()  # calls MPI_Finalize: otherwise mpirun reports a crash
    os._exit(status)


if __name__ == "__main__":
    main()
