"""The model of ddp_images.py and horovod_images.py: weights, optimizer, rate and precision."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from functools import partial
from math import cos, pi
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hpml_job
from hpml_checkpoint import CheckpointError, Checkpoints, Ranks
from hpml_job import JobError, raise_together, say
from images_nets import MODELS

RATES = {  # usual learning rates for one rank, for --lr 0
    "sgd": 0.05,
    "nesterov": 0.05,
    "adagrad": 0.01,
    "adadelta": 1.0,
    "adam": 1e-3,
    "adamw": 1e-3,
}


def add_options(parser: ArgumentParser) -> None:
    """Add the options of the model and its optimizer that are not numbers."""
    add = parser.add_argument
    add("--model", choices=tuple(MODELS), default="cnn")
    add("--optimizer", choices=tuple(hpml_job.OPTIMIZERS), default="nesterov")
    text = "begin with the weights of a checkpoint or of a file of torch.save, but a new last layer"
    text += "; none: do not"
    add("--from", dest="transfer", metavar="FILE_OR_DIR", help=text)


def complete(options: Namespace) -> None:
    """Replace --lr 0 by the optimizer's usual rate, and `--from none` by no transfer."""
    options.lr = options.lr or RATES[options.optimizer]
    options.transfer = None if options.transfer == "none" else options.transfer


def make_model(
    options: Namespace, shape: tuple[int, ...], classes: int, device: torch.device
) -> nn.Module:
    """Return the model for the options, some of which may be missing."""
    sizes = shape, classes, options.width, options.dropout
    model = MODELS[options.model](*sizes).to(device)
    if getattr(options, "channels_last", False):
        nn.utils.convert_conv2d_weight_memory_format(model, torch.channels_last)
    if getattr(options, "compile", False):
        model.compile()
    return model


def make_optimizer(model: nn.Module, options: Namespace) -> torch.optim.Optimizer:
    """Return the optimizer for the options."""
    how = {"lr": options.lr, "weight_decay": options.weight_decay}
    return hpml_job.make_optimizer(options.optimizer, model.parameters(), **how)


def learning_rate(step: int, epoch_steps: int, world_size: int, options: Namespace) -> float:
    """Return the rate of a step: from that of one rank to that of all, then a cosine to 0.

    With --batch-schedule it stays constant after the warm-up: the batch grows instead (Smith et al.
    2018).
    """
    # The global batch grows with the ranks, and the rate with it; at first that would diverge, so
    # the warm-up starts with the rate of a single rank (Goyal et al. 2017).
    warm_up, total = options.lr_warmup_epochs * epoch_steps, options.epochs * epoch_steps
    if step < warm_up:
        return float(options.lr * (1 + (world_size - 1) * step / warm_up))
    if getattr(options, "batch_schedule", None):
        return float(options.lr * world_size)
    part = min(1.0, (step - warm_up) / max(1, total - warm_up))
    return float(options.lr * world_size * 0.5 * (1 + cos(pi * part)))


def precision_of(
    options: Namespace, device: torch.device
) -> tuple[Callable[[], torch.autocast], torch.amp.GradScaler]:
    """Return the autocast context and the gradient scaler (fp16 only)."""
    half = torch.float16 if options.amp == "fp16" else torch.bfloat16
    autocast = partial(torch.autocast, device.type, half, enabled=options.amp != "off")
    return autocast, torch.amp.GradScaler(device.type, enabled=options.amp == "fp16")


def transfer(network: nn.Module, source: str, ranks: Ranks) -> None:
    """Copy the weights of another training into a network, except those of its last layer.

    Args:
        network: has a Linear as its last layer.
        source: a directory of checkpoints, or a file with a state dict.
        ranks: ranks that call this together; each reads the file.

    Raises:
        JobError: the weights cannot be read, or belong to another model; on all ranks.
    """
    problem, own, needed = "", network.state_dict(), dict[str, Tensor]()
    weight, bias = list(own)[-2:]  # of the last layer
    try:
        there = read_weights(Path(source), ranks)
        for name in [name for name in own if name not in {weight, bias}]:
            if name not in there or there[name].shape != own[name].shape:
                shape = f"{[*there[name].shape]} there" if name in there else "missing there"
                shown = f"{name} is {shape}, {[*own[name].shape]} here"
                raise JobError(f"{shown}: --model, --width, --size or the colours differ")
            needed[name] = there.pop(name)
    except CheckpointError:
        raise  # on all ranks
    except Exception as error:  # noqa: BLE001 - unpickling raises many kinds
        reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        problem = f"--from {source}: {reason}"
    raise_together(ranks, problem)
    network.load_state_dict({**own, **needed})
    count = sum(value.numel() for value in needed.values())
    text = f"took {len(needed)} tensors, {count:,} weights; new: {weight}, {bias}"
    left = f"; not used: {', '.join(there)}" if there else ""
    say(ranks, f"from {source}: {text}{left}")


def read_weights(source: Path, ranks: Ranks) -> dict[str, Tensor]:
    """Return the state dict of a network in a file, or in the newest checkpoint of a directory."""
    if ranks.gather(source.is_dir())[0]:  # all ranks must call `latest`
        latest = Checkpoints(source, ranks=ranks).latest()
        found: Any = latest and latest.state
    else:
        found = torch.load(source, map_location="cpu", weights_only=True)
    for key in ("state", "network", "model", "state_dict"):  # usual keys
        if isinstance(found, dict) and isinstance(found.get(key), dict):
            found = found[key]
    if not found or not isinstance(found, dict):
        raise JobError("there is no checkpoint and no state dict")
    # Remove prefixes of DistributedDataParallel and torch.compile.
    return {
        str(name).removeprefix("module.").removeprefix("_orig_mod."): value
        for name, value in found.items()
        if isinstance(value, Tensor)
    }
