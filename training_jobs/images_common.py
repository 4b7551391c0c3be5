"""What the loops of ddp_images.py and horovod_images.py share: all but the steps themselves.

`run` has what the functions work on: options, data, model, and the position of the training.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import torch
from images_data import JobError, load_images, order_of, raise_together
from images_model import MODELS
from images_options import SETTINGS
from torch import Tensor
from torch.profiler import profile, schedule

from hpml_checkpoint import Checkpoints, StopAgreement
from hpml_waits import Waits

STOP, FAIL = 1, 2  # what a rank wishes; the highest wish of all ranks counts
PARTS = ("network", "optimizer", "scaler")  # of a checkpoint, besides the position


def device_of(choice: str, local_rank: int) -> torch.device:
    """Return where this rank computes; a GPU becomes PyTorch's current one."""
    if choice != "cpu" and torch.cuda.is_available():
        # If one GPU is in sight, the launcher gave each rank its own.
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device
    if choice == "cuda":
        raise JobError("--device cuda: PyTorch sees no GPU here")
    return torch.device("cpu")


def precision_of(choice: str, device: torch.device) -> torch.dtype | None:
    """Return the type of --amp; `auto` is the one that a GPU computes fast, and none on a CPU."""
    if choice == "auto" and device.type == "cuda":  # GPUs from Ampere on compute in bfloat16
        choice = "bf16" if torch.cuda.get_device_capability(device) >= (8, 0) else "fp16"
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(choice)


def complain(error: Exception) -> None:
    """Print what is wrong, in one line."""
    text = str(error).partition("\n")[0]
    print(f"{Path(sys.argv[0]).name}: error: {text}", file=sys.stderr, flush=True)


def to_device(run: SimpleNamespace, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return a batch on the GPU, if there is one."""
    if run.device.type != "cpu":
        with run.waits.timed("transfer_seconds"):
            images = images.to(run.device, non_blocking=True)
            labels = labels.to(run.device, non_blocking=True)
    return images, labels


def prepare(
    options: argparse.Namespace, device: torch.device, channel: Any, ranks: Any
) -> SimpleNamespace:
    """Return a `run` with the data, the model and a position at the beginning.

    Raises:
        JobError: the data cannot be used; on all ranks.
    """
    run = SimpleNamespace(options=options, device=device, channel=channel, ranks=ranks)
    run.say = partial(print, flush=True) if ranks.rank == 0 else lambda _: None
    run.data = data = load_images(options, ranks, device)
    torch.manual_seed(options.seed + ranks.rank)  # rank 0's weights go to all ranks later
    sizes = data.channels, data.classes, options.width, options.dropout
    run.network = run.model = MODELS[options.model](*sizes).to(device)
    torch.manual_seed(options.seed * 1_000_003 + ranks.rank)  # each rank has a dropout of its own
    sgd: Any = {"lr": options.lr, "momentum": 0.9, "weight_decay": 1e-4, "nesterov": True}
    run.optimizer = torch.optim.SGD(run.network.parameters(), **sgd)
    run.amp = precision_of(options.amp, device)
    run.autocast = partial(torch.autocast, device.type, run.amp, enabled=run.amp is not None)
    run.scaler = torch.amp.GradScaler(device.type, enabled=run.amp is torch.float16)
    run.waits = Waits(channel, device=device)
    run.agreement, run.problem, run.steps_done, run.saved_step = StopAgreement(ranks), "", 0, 0
    run.checkpoints = None
    if options.checkpoint is not None:
        job = {name: getattr(options, name) for name in SETTINGS}
        job |= {"world_size": ranks.world_size, "train_images": data.train_images}
        run.checkpoints = Checkpoints(options.checkpoint, job=job, channel=channel, ranks=ranks)
    names = ("train", "step", "steady", "data_wait", "evaluation", "checkpoint")
    run.position = SimpleNamespace(  # a checkpoint has all of it
        epoch=0,
        step=0,  # of the epoch
        accuracy=None,
        seconds_to_accuracy=None,
        steady_samples=0,  # of this rank, after the warm-up
        seconds=dict.fromkeys(names, 0.0),
    )
    return run


def global_step(run: SimpleNamespace) -> int:
    """Return the optimizer's steps since the training began, over all restarts."""
    return int(run.position.epoch * run.data.train_steps + run.position.step)


def is_stopped(run: SimpleNamespace, *, at_once: bool = False) -> bool:
    """Return if the ranks stop; a problem of one is raised on all. All call it equally often."""
    told = run.agreement.exchange(FAIL if run.problem else int(run.channel.stop_requested()))
    if at_once:
        told = max(told, run.agreement.finish())
    if told == FAIL:
        raise_together(run.ranks, run.problem)
    return bool(told == STOP)


def set_learning_rate(run: SimpleNamespace) -> None:
    """Set the rate of this step: from that of one rank to that of all, then a cosine to 0."""
    options, ranks, step = run.options, run.ranks.world_size, global_step(run)
    warm_up, total = (n * run.data.train_steps for n in (options.lr_warmup_epochs, options.epochs))
    part = min(1.0, (step - warm_up) / max(1, total - warm_up))
    factor = ranks * 0.5 * (1 + math.cos(math.pi * part))
    if step < warm_up:
        factor = 1 + (ranks - 1) * step / warm_up
    for group in run.optimizer.param_groups:
        group["lr"] = options.lr * factor


def begin(run: SimpleNamespace) -> bool:
    """Start the clock; return whether the ranks stop before the first step."""
    options, position = run.options, run.position
    run.last = min(options.epochs, position.epoch + (options.stop_after_epochs or options.epochs))
    run.channel.event("warm-up", steps=options.warm_up_steps)
    total = options.epochs * run.data.train_steps
    run.channel.event("training", step=global_step(run), total_steps=total)
    # One clock, over all restarts: for train_seconds and seconds_to_accuracy.
    run.started = time.perf_counter() - position.seconds["train"]
    return is_stopped(run, at_once=True)


def begin_epoch(run: SimpleNamespace) -> Iterator[Any]:
    """Return the batches from the position to the epoch's end."""
    position, data, options = run.position, run.data, run.options
    order = order_of(position.epoch, data.train_images, options.seed, run.ranks)
    data.order[:] = order[position.step * options.batch_size :]
    run.loss_sum, run.samples = torch.zeros((), device=run.device), 0
    run.before = dict(position.seconds)
    run.model.train()
    return iter(data.train_loader)


def end_step(run: SimpleNamespace, loss: Tensor, samples: int, waited: float, began: float) -> bool:
    """Count a step, and save if it is time; return whether the ranks stop.

    Args:
        run: of which `problem` may be set.
        loss: mean of the samples.
        samples: of this rank.
        waited: seconds for the batch.
        began: when the step began, on the clock of time.perf_counter.
    """
    options, position, seconds = run.options, run.position, run.position.seconds
    position.step, run.steps_done = position.step + 1, run.steps_done + 1
    run.loss_sum, run.samples = run.loss_sum + loss * samples, run.samples + samples
    is_last = position.step == run.data.train_steps
    if run.device.type == "cuda" and (is_last or run.steps_done == options.warm_up_steps):
        torch.cuda.synchronize()
    took, is_steady = time.perf_counter() - began, run.steps_done > options.warm_up_steps
    seconds["step"] += took
    seconds["data_wait"] += waited
    seconds["steady"] += took * is_steady
    position.steady_samples += samples * is_steady
    run.channel.gauge(loss=loss, epoch=position.epoch)
    run.channel.count(steps=1, samples=samples, data_wait_seconds=waited, step_seconds=took)
    run.profiler.step()
    stopped = is_stopped(run)
    is_due = options.checkpoint_steps and global_step(run) % options.checkpoint_steps == 0
    if is_due and not is_last and not stopped:
        save(run)
    return stopped or (is_last and is_stopped(run, at_once=True))


def end_epoch(run: SimpleNamespace) -> bool:
    """Evaluate and save if it is time; return whether the ranks stop.

    If they do in the evaluation, the epoch is not over: a resumed training evaluates again.
    """
    options, position, epoch = run.options, run.position, run.position.epoch + 1
    position.accuracy = None
    if (epoch == options.epochs or epoch % options.eval_every == 0) and evaluate(run, epoch):
        return True
    took, waited = (position.seconds[name] - run.before[name] for name in ("step", "data_wait"))
    figures = run.ranks.gather((float(run.loss_sum), run.samples, took, waited))
    loss, samples, took, waited = map(sum, zip(*figures))  # noqa: B905 - Python 3.9
    took = max(took, 1e-9)
    accuracy = "-" if position.accuracy is None else f"{position.accuracy:.4f}"
    run.say(
        f"epoch {epoch}/{options.epochs}: loss {loss / max(1, samples):.4f}, test accuracy "
        f"{accuracy}, {samples / took * run.ranks.world_size:.0f} samples/s, "
        f"data wait {waited / took:.0%}"
    )
    position.epoch, position.step = epoch, 0
    if is_over(run) or epoch % options.checkpoint_every == 0:
        save(run)
    return False


def is_over(run: SimpleNamespace) -> bool:
    """Return whether the last epoch or --stop-at-target was reached."""
    reached = run.options.stop_at_target and run.position.seconds_to_accuracy is not None
    return bool(reached or run.position.epoch == run.last)


def finish(run: SimpleNamespace, *, stopped: bool, **more: Any) -> None:
    """Save a training that stops, and report the final figures, with more of the script's own.

    Raises:
        JobError: result.json cannot be written; on all ranks.
    """
    position = run.position
    if not stopped and position.accuracy is None:
        stopped = evaluate(run, position.epoch)
    if stopped:
        run.say(f"stopping in epoch {position.epoch + 1} after {position.step} steps, as asked")
        if global_step(run) != run.saved_step:
            save(run)
        run.channel.event("stopping", epoch=position.epoch, step=global_step(run))
    position.seconds["train"] = time.perf_counter() - run.started
    report(run, stopped=stopped, **more)


@torch.no_grad()
def evaluate(run: SimpleNamespace, epoch: int) -> bool:
    """Measure the accuracy on the test set; return whether the ranks stop before its end."""
    began, right, stopped, position = time.perf_counter(), 0, False, run.position
    run.network.eval()  # not DDP's: some ranks have one batch less, but all agree equally often
    batches = iter(run.data.test_loader)
    for _ in range(run.data.test_steps):
        if batch := next(batches, None):
            with run.autocast():
                scores = run.network(batch[0].to(run.device, non_blocking=True))
            right += int((scores.argmax(1).cpu() == batch[1]).sum())
            run.problem = run.problem or next(filter(None, batch[2]), "")
        if stopped := is_stopped(run):
            break
    stopped = stopped or is_stopped(run, at_once=True)
    took = time.perf_counter() - began
    position.seconds["evaluation"] += took
    run.channel.count(evaluation_seconds=took)
    if stopped:
        return True
    position.accuracy = sum(run.ranks.gather(right)) / run.data.test_images
    target = run.options.target_accuracy
    if position.seconds_to_accuracy is None and target and position.accuracy >= target:
        position.seconds_to_accuracy = time.perf_counter() - run.started
    run.channel.gauge(accuracy=position.accuracy)
    run.channel.event("evaluation", seconds=took, accuracy=position.accuracy, epoch=epoch)
    return False


def save(run: SimpleNamespace) -> None:
    """Write a checkpoint, if there is a directory for them."""
    if run.checkpoints is None:
        return
    began, seconds = time.perf_counter(), run.position.seconds
    seconds["train"] = began - run.started
    seconds["data_wait"] = fmean(run.ranks.gather(seconds["data_wait"]))
    state = {name: getattr(run, name).state_dict() for name in PARTS}
    run.checkpoints.save({**state, "position": vars(run.position)}, step=global_step(run))
    run.saved_step = global_step(run)
    seconds["checkpoint"] += time.perf_counter() - began


def newest_checkpoint(run: SimpleNamespace) -> tuple[Any, bool]:
    """Return the checkpoint to begin with, if any, and whether it is this training's own."""
    other = run.options.checkpoint_from
    if found := run.checkpoints.load() if run.checkpoints else None:
        epoch, step = found.state["position"]["epoch"], found.state["position"]["step"]
        run.say(f"resumed from {found.path}: {epoch} epochs and {step} steps are done")
    elif other is not None:
        found = Checkpoints(other, ranks=run.ranks).latest()
        if found is None:
            raise JobError(f"--checkpoint-from {other}: there is no checkpoint")
        run.say(f"started from {found.path}")
        return found, False
    return found, True


def load(run: SimpleNamespace) -> None:
    """Go on from the newest checkpoint; if there is none, start with another run's model."""
    (found, is_own), problem = newest_checkpoint(run), ""
    if found is None:
        return
    try:
        for name in PARTS:
            if found.state[name]:  # only fp16 has something in its scaler
                getattr(run, name).load_state_dict(found.state[name])
    except (RuntimeError, ValueError, LookupError):
        problem = f"{found.path} has another model: --model or --width differs"
    raise_together(run.ranks, problem)
    if is_own:
        vars(run.position).update(found.state["position"])
        run.saved_step = found.step


def profiler(options: argparse.Namespace, rank: int) -> Any:
    """Return what traces five steps after the warm-up for `hpml report`, if that is asked for."""
    if options.profile is None:
        return contextlib.nullcontext(SimpleNamespace(step=lambda: None))
    trace = options.profile / f"trace-rank{rank}.json.gz"
    return profile(  # the CPU, and a GPU if there is one
        schedule=schedule(wait=options.warm_up_steps, warmup=1, active=5, repeat=1),
        on_trace_ready=lambda found: found.export_chrome_trace(str(trace)),
        acc_events=True,
    )


def report(run: SimpleNamespace, **more: Any) -> None:
    """Send, write and print the final figures: all of result.json, or nothing.

    Raises:
        JobError: the file cannot be written; on all ranks.
    """
    options, position, device, problem = run.options, run.position, run.device, ""
    seconds, ranks = position.seconds, run.ranks.world_size
    samples = position.steady_samples * ranks
    result: dict[str, Any] = {
        "test_accuracy": position.accuracy,
        "target_accuracy": options.target_accuracy,
        "seconds_to_accuracy": position.seconds_to_accuracy,
        "samples_per_second": samples / seconds["steady"] if samples else None,
        **{f"{name}_seconds": seconds[name] for name in seconds if name != "steady"},
        "data_wait_seconds": fmean(run.ranks.gather(seconds["data_wait"])),
        "epochs": position.epoch,
        "eval_every_epochs": options.eval_every,
        "world_size": ranks,
        "batch_size_per_rank": options.batch_size,
        "learning_rate": options.lr * ranks,
        "train_images": run.data.train_images,
        "test_images": run.data.test_images,
        "seed": options.seed,
        "model": options.model,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "amp": str(run.amp or "off").removeprefix("torch."),
        **more,
    }
    if run.ranks.rank == 0:
        run.channel.result(**result)
        try:
            if options.output is not None:
                aside = options.output / ".result.json.new"
                aside.write_text(json.dumps({"schema_version": 1, **result}, indent=2) + "\n")
                aside.replace(options.output / "result.json")
        except OSError as error:
            problem = f"cannot write to {options.output}: {error.strerror or error}"
    raise_together(run.ranks, problem)
    accuracy, rate = position.accuracy, result["samples_per_second"]
    text = f"done: {position.epoch} epochs in {seconds['train']:.1f} s, test accuracy "
    text += "-" if accuracy is None else f"{accuracy:.4f}"
    text += ", " + ("-" if rate is None else f"{rate:.0f}") + " samples/s"
    if options.target_accuracy is not None:
        reached = position.seconds_to_accuracy
        text += f", {options.target_accuracy:g} "
        text += "not reached" if reached is None else f"reached after {reached:.1f} s"
    run.say(f"{text}, {ranks} ranks on {result['device']}")
