"""Train a network on folders of images with PyTorch DistributedDataParallel.

    python ddp_images.py --data digits
    torchrun --standalone --nproc-per-node=2 ddp_images.py --data digits --target-accuracy 0.95

Runs alone or under a launcher that sets torchrun's variables, on GPUs (NCCL) if there are any, else
on the CPU (gloo). It needs the four images_*.py and the hpml_*.py next to it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function

import hpml_job
import images_data
import images_model
from hpml_channel import Channel
from hpml_checkpoint import Checkpoints, Ranks, StopAgreement
from hpml_job import JobError, raise_together, say
from hpml_profile import trace_steps
from hpml_waits import measure_waits, settle_buckets
from images_data import ImageData, Position, checkpoints_of

NUMBERS = {  # numeric options: default, minimum, help
    "width": (16, 1, "channels of the model's first layer"),
    "size": (0, 0, "resize and crop images to N x N pixels; 0: all have that of the first one"),
    "train-images": (0, 0, "train with N images only, equally many of each class; 0: with all"),
    "dropout": (0.2, 0, "part of the features that the last layer does not get"),
    "epochs": (12, 1, "length of the training"),
    "batch-size": (32, 1, "images per rank and step"),
    "accumulate": (1, 1, "compute each batch in N parts, to save memory"),
    "max-batch": (0, 0, "compute larger batches in parts of at most N images; 0: do not"),
    "lr": (0.0, 0, "learning rate of one rank; times the ranks; 0: that usual for --optimizer"),
    "weight-decay": (1e-4, 0, "of all weights"),
    "lr-warmup-epochs": (2, 0, "epochs to reach the rate of all ranks"),
    "seed": (1, 0, "of weights, dropout and the order of the images"),
    "workers": (1, 0, "processes per rank that read images; 0: none"),
    "bucket-mb": (25.0, 0, "size of DDP's buckets of gradients"),
    "eval-every": (1, 1, "epochs from one evaluation to the next"),
    "checkpoint-every": (1, 1, "epochs from one checkpoint to the next"),
    "checkpoint-steps": (0, 0, "save every N steps, too; 0: do not"),
    "stop-after-epochs": (0, 0, "end early; the schedule stays; 0: do not"),
    "warm-up-steps": (20, 0, "first steps, which samples/s leaves out"),
    "timeout-seconds": (600, 1, "how long a rank waits for others"),
}
PARTS = ["network", "optimizer", "scaler"]  # saved in a checkpoint, like the position
SHOWN = "model width optimizer augment seed amp target_accuracy".split()  # in the result
STOP, FAIL = 1, 2  # requests of a rank; the highest one counts


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Return the options of the command line; exits with 2 if they are invalid."""
    parser = argparse.ArgumentParser(description="Train on folders of images with DDP.")
    add = parser.add_argument
    hpml_job.add_options(parser, NUMBERS)
    parser.set_defaults(amp_of_old_gpus="fp16")
    images_data.add_options(parser)
    images_model.add_options(parser)
    add("--amp", choices=("auto", "bf16", "fp16", "off"), default="auto", help="mixed precision")
    add("--channels-last", action="store_true", help="use tensor cores' preferred memory format")
    add("--cudnn-benchmark", action="store_true", help="use the fastest of cuDNN's algorithms")
    add("--compile", action="store_true", help="use torch.compile")
    add("--target-accuracy", type=float, metavar="PART", help="report the seconds to reach it")
    add("--stop-at-target", action="store_true", help="stop after reaching the target")
    add("--checkpoint-from", type=Path, metavar="DIR", help="start from another run's full state")
    options = parser.parse_args(arguments)
    hpml_job.check_numbers(parser, options, NUMBERS)
    if not 0 < (options.target_accuracy or 1 - options.stop_at_target) <= 1:
        parser.error("--target-accuracy must be above 0 and at most 1; --stop-at-target needs it")
    if options.batch_schedule and options.batch_schedule[-1][0] > options.epochs:
        late = f"epoch {options.batch_schedule[-1][0]} is after --epochs {options.epochs}"
        parser.error(f"--batch-schedule: {late}")
    images_model.complete(options)
    if options.transfer and options.checkpoint_from:
        parser.error("--from takes weights only, --checkpoint-from a whole state: give one of them")
    return options


class Run:
    """The state of a training."""

    def __init__(self, options: argparse.Namespace, device: torch.device, channel: Channel) -> None:
        self.options, self.device, self.channel = options, device, channel
        self.ranks = ranks = Ranks()
        self.agreement, self.data = StopAgreement(ranks), ImageData(options, ranks, device)
        self.checkpoints = checkpoints_of(options, self.data, channel, ranks)
        self.at, self.steps_done, self.saved, self.started = Position(), 0, (0, 0), 0.0
        self.loss_sum, self.sums = torch.zeros(()), torch.zeros(3)  # sums of an epoch
        torch.manual_seed(options.seed)
        torch.backends.cudnn.benchmark = options.cudnn_benchmark
        sizes = self.data.shape, self.data.classes
        self.network = images_model.make_model(options, *sizes, device)
        torch.manual_seed(options.seed * 1_000_003 + ranks.rank)  # each rank has its own dropout
        self.model = DistributedDataParallel(
            self.network, bucket_cap_mb=options.bucket_mb, gradient_as_bucket_view=True
        )
        settle_buckets(self.model, torch.zeros(1, *self.data.shape, device=device))
        self.waits = measure_waits(self.model, channel)  # finds the rank that the others wait for
        self.optimizer = images_model.make_optimizer(self.network, options)
        self.autocast, self.scaler = images_model.precision_of(options, device)


def is_stopped(run: Run, *, at_once: bool = False) -> bool:
    """Return whether the ranks stop; raise one's problem on all. All must call it equally often."""
    wish = run.agreement.exchange(FAIL if run.data.problem else run.channel.stop_requested())
    wish = max(wish, run.agreement.finish()) if at_once else wish
    if wish == FAIL:
        raise_together(run.ranks, run.data.problem)
    return bool(wish == STOP)


def train_step(run: Run, images: Tensor, labels: Tensor) -> Tensor:
    """Take one step of the optimizer; return this rank's loss."""
    total, most = torch.zeros((), device=run.device), run.options.max_batch or len(labels)
    parts = max(run.options.accumulate, -(-len(labels) // most))
    if run.device.type == "cuda":
        with run.waits.timed("transfer_seconds"):
            images, labels = (one.to(run.device, non_blocking=True) for one in (images, labels))
    batches = [*zip(images.chunk(parts), labels.chunk(parts))]  # noqa: B905 - Python 3.9
    for number, (some, targets) in enumerate(batches, 1):
        run.model.require_backward_grad_sync = number == len(batches)  # average once, at the end
        with run.autocast():
            loss = nn.functional.cross_entropy(run.model(some), targets)
        # The last part may be smaller: the weighted parts add up to the mean of the whole batch.
        loss = loss * (len(targets) / len(labels))
        run.scaler.scale(loss).backward()
        total += loss.detach()
    sizes = run.data.train_steps, run.ranks.world_size
    rate = images_model.learning_rate(run.at.step, *sizes, run.options)
    run.optimizer.param_groups[0]["lr"] = rate
    run.scaler.step(run.optimizer)
    run.scaler.update()
    run.optimizer.zero_grad()
    return total


def train_epoch(run: Run, end_step: Callable[[], None]) -> bool:
    """Train from the position to the epoch's end; return whether the ranks stop before it."""
    options, at, data, stopped = run.options, run.at, run.data, False
    run.loss_sum, run.sums = torch.zeros((), device=run.device), torch.tensor([0, 1e-9, 0])
    end, batches = data.starts[at.epochs + 1], data.train_batches(at.step)
    run.model.train()
    while at.step < end and not stopped:
        began = time.perf_counter()
        with record_function("hpml.step"):
            with record_function("hpml.data"):
                images, labels = next(batches)
            waited, count = time.perf_counter() - began, len(labels)
            loss = train_step(run, images, labels)
        at.step, run.steps_done = at.step + 1, run.steps_done + 1
        is_steady = run.steps_done > options.warm_up_steps
        if run.device.type == "cuda" and (at.step == end or not is_steady):
            torch.cuda.synchronize()
        took = time.perf_counter() - began
        run.loss_sum += loss * count
        run.sums += torch.tensor([count, took, waited])
        at.steady_samples += count * is_steady
        at.steady_seconds += took * is_steady
        run.channel.gauge(loss=loss, epoch=at.epochs)
        run.channel.count(steps=1, samples=count, data_wait_seconds=waited, step_seconds=took)
        end_step()
        stopped = is_stopped(run)
        if at.step % (options.checkpoint_steps or end) == 0 and at.step < end and not stopped:
            save(run)
    return stopped or is_stopped(run, at_once=True)


def evaluate(run: Run, part: str = "validation") -> bool:
    """Measure the accuracy on a part of the data; return whether the ranks stop before its end."""
    began, right, at = time.perf_counter(), 0, run.at
    run.model.eval()
    for images, labels in run.data.evaluation_batches(part):
        with torch.no_grad(), run.autocast():
            scores = run.network(images.to(run.device, non_blocking=True))
        right += int((scores.argmax(1).cpu() == labels).sum())
        if is_stopped(run):
            return True
    if is_stopped(run, at_once=True):
        return True
    accuracy = sum(run.ranks.gather(right)) / run.data.images[part]
    setattr(at, f"{part}_accuracy", accuracy)
    at.evaluation_seconds += (took := time.perf_counter() - began)
    run.channel.count(evaluation_seconds=took)
    if part == "test":  # once, at the end: it must not influence how long to train
        return False
    if at.seconds_to_accuracy is None and accuracy >= (run.options.target_accuracy or 2):
        at.seconds_to_accuracy = time.perf_counter() - run.started
        say(run.ranks, f"the target was reached after {at.seconds_to_accuracy:.1f} s")
    run.channel.gauge(accuracy=accuracy)
    run.channel.event("evaluation", accuracy=accuracy, epoch=at.epochs + 1)
    return False


def save(run: Run) -> None:
    """Write a checkpoint if there is a directory for it and this position is not saved yet."""
    began, at = time.perf_counter(), run.at
    if run.checkpoints is not None and run.saved != (at.epochs, at.step):
        at.train_seconds, run.saved = began - run.started, (at.epochs, at.step)
        state = {name: getattr(run, name).state_dict() for name in PARTS}
        run.checkpoints.save({**state, "position": vars(at)}, step=at.step)
        at.checkpoint_seconds += time.perf_counter() - began


def load(run: Run) -> None:
    """Continue from the newest checkpoint; without one, start as the options say."""
    other, at = run.options.checkpoint_from, run.at
    found = run.checkpoints.load() if run.checkpoints else None
    if found:
        vars(at).update(found.state["position"])
        run.saved, steps = (at.epochs, at.step), at.step - run.data.starts[at.epochs]
        say(run.ranks, f"resumed from {found.path}: {at.epochs} epochs and {steps} steps are done")
    elif other is None:
        if run.options.transfer:
            images_model.transfer(run.network, run.options.transfer, run.ranks)
        return
    elif found := Checkpoints(other, ranks=run.ranks).latest():
        say(run.ranks, f"started from {found.path}")
    else:
        raise JobError(f"--checkpoint-from {other}: there is no checkpoint")
    try:
        for name in PARTS:
            if found.state[name]:  # the scaler's state is empty except for fp16
                getattr(run, name).load_state_dict(found.state[name])
    except (RuntimeError, ValueError, LookupError) as error:
        raise JobError(f"{found.path} has another model: --model or --width differs") from error


def train(options: argparse.Namespace, channel: Channel, device: torch.device) -> None:
    """Train from the newest checkpoint to the last epoch, the target or a stop request."""
    run = Run(options, device, channel)
    at, data, ranks, size = run.at, run.data, run.ranks, run.ranks.world_size
    load(run)
    last = min(options.epochs, at.epochs + (options.stop_after_epochs or options.epochs))
    channel.event("warm-up", steps=options.warm_up_steps)
    channel.event("training", step=at.step, total_steps=data.starts[-1])
    run.started = time.perf_counter() - at.train_seconds  # one clock across all restarts
    stopped = is_stopped(run, at_once=True)
    with trace_steps(options.profile, ranks.rank, after=options.warm_up_steps) as tracing:
        while not (stopped or at.epochs == last):
            if options.stop_at_target and at.seconds_to_accuracy:
                break
            is_due = (at.epochs + 1) % options.eval_every == 0 or at.epochs + 1 == last
            if stopped := train_epoch(run, tracing.step) or (is_due and evaluate(run)):
                break
            at.epochs += 1
            sums = zip(*ranks.gather((float(run.loss_sum), *run.sums.tolist())))  # noqa: B905
            loss, samples, took, waited = map(sum, sums)
            text = f"validation accuracy {at.validation_accuracy:.4f}" if is_due else "not measured"
            if samples:  # otherwise an earlier attempt trained this epoch, but did not evaluate it
                speed = f"{size * samples / took:.0f} samples/s, data wait {waited / took:.0%}"
                text = f"loss {loss / samples:.4f}, {text}, {speed}"
            say(run.ranks, f"epoch {at.epochs}/{options.epochs}: {text}")
            if at.epochs % options.checkpoint_every == 0:
                save(run)
    save(run)
    stopped = stopped or evaluate(run, "test")
    if stopped:
        say(run.ranks, f"stopping in epoch {at.epochs + 1} at step {at.step}, as asked")
        channel.event("stopping", step=at.step)
    at.train_seconds = time.perf_counter() - run.started
    rate = size * at.steady_samples / (at.steady_seconds or 1)
    name = hpml_job.device_name(device)
    result = {
        **vars(at), "samples_per_second": rate or None, "stopped": stopped,
        "world_size": size, "batch_size_per_rank": options.batch_size,
        **{f"{part}_images": count for part, count in data.images.items()}, "device": name,
        "flops_per_sample": hpml_job.flops_of(run.network, run.data.shape),
        "learning_rate": options.lr * size, "eval_every_epochs": options.eval_every,
        **{name: getattr(options, name) for name in SHOWN},
        "weights": sum(weights.numel() for weights in run.network.parameters()),
    }  # fmt: skip
    hpml_job.report(result, channel, options, ranks)
    text, speed = f"{at.epochs} epochs in {at.train_seconds:.1f} s", f"{rate:.0f}" if rate else "-"
    text = f"stopped: {text}" if stopped else f"done: {text}, test accuracy {at.test_accuracy:.4f}"
    say(run.ranks, f"{text}, {speed} samples/s, {size} ranks on {name}")


def main(arguments: list[str] | None = None) -> NoReturn:
    """Join the other ranks, train, and exit with 0, or with 2 and a line on stderr."""
    hpml_job.run(train, parse(arguments))


if __name__ == "__main__":
    main()
