"""Train a PointNet on point clouds of trees with PyTorch DistributedDataParallel.

    python trees.py
    torchrun --standalone --nproc-per-node=2 trees.py --data trees.npz --output results

Runs alone, under torchrun, and under any launcher that sets RANK, WORLD_SIZE, LOCAL_RANK,
MASTER_ADDR and MASTER_PORT, such as srun with hpml. Uses GPUs (NCCL) if there are any, otherwise
the CPU (gloo). `hpml new trees DIR` copies it with the files that it needs.
"""

from __future__ import annotations

import argparse
import time
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function

import hpml_job
from hpml_channel import Channel
from hpml_checkpoint import Checkpoints, Ranks, StopAgreement
from hpml_job import say
from hpml_profile import trace_steps
from hpml_waits import measure_waits, settle_buckets
from trees_data import load_data
from trees_model import MODELS

NUMBERS = {  # numeric options
    "trees": (2400, 1, "to make if there is no --data"),
    "epochs": (8, 1, "length of the training"),
    "batch-size": (32, 1, "trees per rank and step"),
    "points": (128, 1, "of a tree in a training step, drawn at random; a test uses all"),
    "width": (32, 1, "of the model"),
    "lr": (0.05, 0, "learning rate"),
    "lr-warmup-steps": (20, 0, "steps to reach it"),
    "weight-decay": (1e-4, 0, ""),
    "regularizer": (0.001, 0, "weight of --feature-tnet's distance from an orthogonal matrix"),
    "clip": (1.0, 0, "longest gradient"),
    "jitter": (0.02, 0, "noise of each coordinate; a tree's size is 1"),
    "seed": (1, 0, "of weights, trees and their order"),
    "log-every": (20, 1, "steps"),
    "eval-every": (2, 1, "epochs"),
    "checkpoint-every": (100, 1, "steps"),
    "warm-up-steps": (20, 0, "first steps, which samples/s leaves out"),
}
# Other values mean another training; the number of ranks and --batch-size may change together.
SAME = "epochs points width lr lr_warmup_steps weight_decay clip jitter seed model".split()
SAME += ["feature_tnet", "regularizer"]
REPORTED = ("model", "feature_tnet", "amp", "target_accuracy")


def parse(arguments: list[str] | None = None) -> Namespace:
    """Return the options of the command line; exits with 2 if they are invalid."""
    about = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, description=about)
    add = parser.add_argument  # without the usage an error is one line
    add("--data", type=Path, metavar="FILE", help="from make_trees.py; default: generated")
    hpml_job.add_options(parser, NUMBERS)
    add("--model", choices=tuple(MODELS), default="pointnet", help="box: uses only the size")
    add("--feature-tnet", action="store_true", help="also transform the points' features")
    add("--amp", choices=("auto", "bf16", "off"), default="auto", help="auto: bf16 on GPUs with it")
    add("--target-accuracy", type=float, metavar="PART", help="report the seconds to reach it")
    options = parser.parse_args(arguments)
    hpml_job.check_numbers(parser, options, NUMBERS)
    if options.feature_tnet and options.model != "pointnet":
        parser.error(f"--feature-tnet: is a part of --model pointnet, not of {options.model}")
    if options.target_accuracy is not None and not 0 < options.target_accuracy <= 1:
        parser.error(f"--target-accuracy {options.target_accuracy} must be above 0 and at most 1")
    return options


class Run:
    """The state of a training; an error of one rank is raised on all."""

    def __init__(self, options: Namespace, channel: Channel, device: torch.device) -> None:
        self.options, self.channel, self.device, self.ranks = options, channel, device, Ranks()
        self.data = data = load_data(options, self.ranks)
        torch.manual_seed(options.seed)  # same weights on all ranks
        more = {"feature_tnet": True} if options.feature_tnet else {}
        self.network = MODELS[options.model](len(data.species), options.width, **more).to(device)
        self.model = DistributedDataParallel(self.network, gradient_as_bucket_view=True)
        settle_buckets(self.model, torch.zeros(1, options.points, 3, device=device))
        measure_waits(self.model, channel)
        how = {"lr": options.lr, "weight_decay": options.weight_decay}
        self.optimizer = hpml_job.make_optimizer("nesterov", self.network.parameters(), **how)
        is_bf16 = options.amp == "bf16"
        self.autocast = partial(torch.autocast, device.type, torch.bfloat16, enabled=is_bf16)
        # By epoch: seconds, and accuracy and loss on the validation part.
        self.evaluations: dict[int, tuple[float, float, float]] = {}
        self.started, self.checkpoints = time.perf_counter(), None
        if options.checkpoint is not None:
            job = {name: getattr(options, name) for name in SAME}
            job.update(trees=len(data.targets), batch=data.batch)
            to, ranks = options.checkpoint, self.ranks
            self.checkpoints = Checkpoints(to, job=job, channel=channel, ranks=ranks)


def train_step(run: Run, batch: tuple[Tensor, Tensor, int]) -> Tensor:
    """Take one step of the optimizer; return this rank's loss, to be averaged over the ranks."""
    clouds, targets, count = batch
    with run.autocast():
        scores = run.model(clouds.to(run.device))
    # The sum over all ranks divided by their trees: the last batch may be uneven.
    loss = nn.functional.cross_entropy(scores.float(), targets.to(run.device), reduction="sum")
    if run.options.feature_tnet:
        loss = loss + run.options.regularizer * run.network.feature_tnet.penalty
    loss = loss * (run.ranks.world_size / count)  # DDP divides by the world size
    loss.backward()
    # After backward, in which DDP has averaged: all ranks clip the same gradient.
    nn.utils.clip_grad_norm_(run.model.parameters(), run.options.clip)
    run.optimizer.step()
    run.optimizer.zero_grad()
    return loss.detach()


@torch.no_grad()
def evaluate(run: Run, part: str) -> tuple[float, float, list[list[int]]]:
    """Return accuracy and loss on the part `validation` or `test`, and the confusion matrix."""
    data, ranks, loss = run.data, run.ranks, torch.zeros(1, dtype=torch.float64)
    classes = len(data.species)
    confusion = torch.zeros(classes * classes, dtype=torch.int64)
    mine = [one[ranks.rank :: ranks.world_size] for one in data.parts[part]]
    for clouds, targets in zip(*(one.split(64) for one in mine)):  # noqa: B905 - Python 3.9
        with run.autocast():
            groups = data.groups_of(clouds.to(run.device))
            scores = run.network(groups.flatten(0, 1)).float().cpu()
        scores = scores.unflatten(0, groups.shape[:2]).mean(1)
        loss += nn.functional.cross_entropy(scores, targets, reduction="sum")
        pairs = classes * targets + scores.argmax(1)
        confusion += torch.bincount(pairs, minlength=len(confusion))
    dist.all_reduce(confusion)
    dist.all_reduce(loss)
    table, total = confusion.view(classes, classes), len(data.parts[part][1])
    return int(table.trace()) / total, float(loss) / total, table.tolist()


def save(run: Run, step: int) -> None:
    """Write a checkpoint, if there is a directory for it."""
    state = {name: getattr(run, name).state_dict() for name in ("network", "optimizer")}
    state.update(evaluations=run.evaluations, seconds=time.perf_counter() - run.started)
    if run.checkpoints:
        run.checkpoints.save(state, step=step)


def load(run: Run) -> int:
    """Restore the newest checkpoint; return its step, 0 if there is none."""
    found = run.checkpoints.load() if run.checkpoints else None
    if found is None:
        return 0
    run.network.load_state_dict(found.state["network"])
    run.optimizer.load_state_dict(found.state["optimizer"])
    run.evaluations, run.started = found.state["evaluations"], run.started - found.state["seconds"]
    return int(found.step)


# One loop, to be read from top to bottom and changed.
def train(options: Namespace, channel: Channel, device: torch.device) -> None:  # noqa: PLR0915
    """Train from the newest checkpoint to the last step, or until asked to stop."""
    run = Run(options, channel, device)
    data, ranks, steps = run.data, run.ranks, options.epochs * run.data.steps_per_epoch
    step = saved = load(run)
    steady, samples, seconds, rate = step + options.warm_up_steps, 0, 0.0, None
    validated, tested = (len(data.parts[part][1]) for part in ("validation", "test"))
    trees = f"{len(data.targets)} trees to train with, {validated} to validate, {tested} to test"
    text = f"{options.model}, {ranks.world_size} ranks, {trees}"
    say(ranks, f"{text}, {step} of {steps} steps are done")
    channel.event("warm-up", steps=options.warm_up_steps)
    channel.event("training", step=step, total_steps=steps)
    agreement = StopAgreement(ranks)
    stop = agreement.exchange(channel.stop_requested()) or agreement.finish()
    with trace_steps(options.profile, ranks.rank, after=options.warm_up_steps) as tracing:
        while step < steps and not stop:
            mark = time.perf_counter()
            with record_function("hpml.step"):
                with record_function("hpml.data"):
                    batch = data.batch_of(step)
                waited = time.perf_counter() - mark
                for group in run.optimizer.param_groups:
                    group["lr"] = hpml_job.learning_rate(step, steps, options)
                loss = train_step(run, batch)
            step += 1
            epoch, place = divmod(step, data.steps_per_epoch)
            is_due = step == steady or step % options.log_every == 0 or place == 0
            if is_due:
                loss = loss.cpu() / ranks.world_size  # waits for the GPU
                dist.all_reduce(loss)
                say(run.ranks, f"step {step}: loss {loss:.4f}")
            took = time.perf_counter() - mark
            if step > steady:
                samples, seconds = samples + batch[2], seconds + took
                rate = samples / seconds if is_due else rate  # otherwise ahead of the GPU
            channel.gauge(loss=loss, epoch=epoch)
            channel.count(
                steps=1, samples=len(batch[1]), data_wait_seconds=waited, step_seconds=took
            )
            tracing.step()
            stop = agreement.exchange(channel.stop_requested())
            if step == steps or (place == 0 and epoch % options.eval_every == 0):
                with channel.timed("evaluation_seconds"):
                    accuracy, mean, _ = evaluate(run, "validation")
                run.evaluations[epoch] = time.perf_counter() - run.started, accuracy, mean
                channel.gauge(accuracy=accuracy)
                channel.event("evaluation", accuracy=accuracy, epoch=epoch)
                text = f"validation accuracy {accuracy:.4f}, loss {mean:.4f}"
                say(ranks, f"epoch {epoch}: {text}")
            if step % options.checkpoint_every == 0:
                save(run, saved := step)
    if step > saved:
        save(run, step)
    if stop:
        channel.event("stopping", step=step)
    report_end(run, step, rate, stopped=step < steps)


def report_end(run: Run, step: int, rate: float | None, *, stopped: bool) -> None:
    """Print, write and send the final figures."""
    options, evaluated, target = run.options, run.evaluations, run.options.target_accuracy
    reached = [at for at, one, _ in evaluated.values() if target and one >= target]
    _, accuracy, loss = evaluated[max(evaluated)] if evaluated else [None] * 3
    test_accuracy = test_loss = table = None
    if not stopped:  # once, at the end: the test trees must not influence how long to train
        with run.channel.timed("evaluation_seconds"):
            test_accuracy, test_loss, table = evaluate(run, "test")
        say(run.ranks, f"test accuracy {test_accuracy:.4f}, loss {test_loss:.4f}")
    total = time.perf_counter() - run.started
    result = {
        **{name: getattr(options, name) for name in REPORTED},
        "validation_accuracy": accuracy, "validation_loss": loss,
        "test_accuracy": test_accuracy, "test_loss": test_loss,
        "seconds_to_accuracy": min(reached, default=None),
        "train_seconds": total,
        "samples_per_second": rate,
        "steps": step,
        "world_size": run.ranks.world_size, "batch_size_per_rank": options.batch_size,
        "parameters": sum(one.numel() for one in run.network.parameters()),
        "device": hpml_job.device_name(run.device),
        "stopped": stopped,
    }  # fmt: skip
    more = {"species": run.data.species, "confusion": table, "evaluations": evaluated}
    hpml_job.report(result, run.channel, options, run.ranks, **more)
    verb, speed = ("stopped" if stopped else "done"), "-" if rate is None else f"{rate:.0f}"
    say(run.ranks, f"{verb}: {step} steps in {total:.1f} s, {speed} trees/s")


def main(arguments: list[str] | None = None) -> NoReturn:
    """Join the other ranks, train, and exit with 0, or with 2 and a line with the reason."""
    hpml_job.run(train, parse(arguments))


if __name__ == "__main__":
    main()
