"""What the training scripts share: options, start, device, errors, the result and the end.

    def train(options, channel, device): ...       # called on all ranks

    def main(arguments=None):
        run(train, parse(arguments))

A script that you copy needs this file and the other hpml_*.py next to it.
"""

from __future__ import annotations

import copy
import json
import math
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.optim import SGD, Adadelta, Adagrad, Adam, AdamW, Optimizer
from torch.utils.flop_counter import FlopCounterMode

from hpml_channel import Channel
from hpml_checkpoint import CheckpointError, Ranks

Numbers = Mapping[str, tuple[float, float, str]]  # option: default, minimum, help
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": partial(SGD, momentum=0.9),
    "nesterov": partial(SGD, momentum=0.9, nesterov=True),
    "adagrad": Adagrad,
    "adadelta": Adadelta,
    "adam": Adam,
    "adamw": AdamW,
}


class JobError(Exception):
    """A problem that the user can fix; the message is one line."""


def add_options(parser: ArgumentParser, numbers: Numbers, *, saves: bool = True) -> None:
    """Add numeric options, and those of all scripts; `saves`: the script writes checkpoints."""
    add, saved = parser.add_argument, os.environ.get("HPML_CHECKPOINT_DIR") or None
    for name, (default, least, text) in numbers.items():
        kind = f"{text}; " if text else ""
        shown = f"{kind}default %(default)s, at least {least}"
        add(f"--{name}", type=type(default), default=default, metavar="N", help=shown)
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    if saves:
        add("--checkpoint", type=Path, default=saved, metavar="DIR", help="save and resume there")
    add("--output", type=Path, metavar="DIR", help="write result.json there")
    traces = Path(os.environ.get("HPML_RUN_DIR", "."), "profile")
    add("--profile", type=Path, nargs="?", const=traces, metavar="DIR", help="profile ten steps")


def check_numbers(parser: ArgumentParser, options: Namespace, numbers: Numbers) -> None:
    """Exit with 2 if a number is too small, infinite or NaN."""
    for name, (_, least, _) in numbers.items():
        value = getattr(options, name.replace("-", "_"))
        if not least <= value < math.inf:
            parser.error(f"--{name} {value} must be at least {least}")


def say(ranks: Ranks, text: str) -> None:
    """Print a line, on rank 0 only."""
    if ranks.rank == 0:
        print(text, flush=True)


def raise_together(ranks: Ranks, problem: str) -> None:
    """Raise a JobError on all ranks if one has a problem; otherwise the others would wait."""
    if problems := [*filter(None, ranks.gather(problem))]:
        raise JobError(problems[0])


def make_directories(options: Namespace, ranks: Ranks) -> None:
    """Create the directories of --output and --profile; a problem on one rank is raised on all."""
    problem = ""
    try:
        for directory in filter(None, (options.output, options.profile)):
            directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = str(error)
    raise_together(ranks, problem)


def choose_device(options: Namespace) -> torch.device:
    """Return this rank's GPU or the CPU, and replace `--amp auto` by what is fast there."""
    device = torch.device("cpu")
    if options.device != "cpu" and torch.cuda.is_available():
        # If only one GPU is visible, the launcher has assigned it to this rank.
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    elif options.device == "cuda":
        raise JobError("--device cuda: PyTorch sees no GPU here")
    if getattr(options, "amp", "") == "auto":  # GPUs from Ampere on are fast in bfloat16
        is_fast = device.type == "cuda" and torch.cuda.get_device_capability() >= (8, 0)
        old = getattr(options, "amp_of_old_gpus", "off")
        options.amp = "bf16" if is_fast else old if device.type == "cuda" else "off"
    return device


def device_name(device: torch.device) -> str:
    """Return the model of a GPU, or `cpu`."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def flops_of(network: torch.nn.Module, shape: Iterable[int]) -> int:
    """Return the FLOP of a forward and a backward pass of one sample, without computing them.

    Args:
        network: takes a batch; not modified.
        shape: shape of one sample.
    """
    aside = copy.deepcopy(network).to("meta").eval()
    with FlopCounterMode(display=False) as counted:
        aside(torch.empty(1, *shape, device="meta")).sum().backward()
    return int(counted.get_total_flops())


def make_optimizer(
    name: str, parameters: Iterable[Any], *, lr: float, weight_decay: float, **more: object
) -> Optimizer:
    """Return one of OPTIMIZERS for parameters or groups of parameters."""
    return OPTIMIZERS[name](parameters, lr=lr, weight_decay=weight_decay, **more)


def learning_rate(step: int, steps: int, options: Namespace, *, floor: float = 0.0) -> float:
    """Return the rate of a step: up to --lr in --lr-warmup-steps, then a cosine decay.

    It depends only on the step, so it continues after a resume.

    Args:
        step: the next step, from 0.
        steps: number of steps of the whole training.
        options: have `lr` and `lr_warmup_steps`.
        floor: fraction of --lr that remains in the last step.
    """
    warm_up = options.lr_warmup_steps
    part = min(1.0, max(0, step - warm_up) / max(1, steps - warm_up))
    rate = options.lr * min(1.0, (step + 1) / max(1, warm_up))
    return float(rate * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * part))))


def report(
    result: Mapping[str, object],
    channel: Channel,
    options: Namespace,
    ranks: Ranks,
    **more: object,
) -> None:
    """Report the result of a training, and write it to result.json in --output; on rank 0.

    Args:
        result: figures and settings that `hpml report` and sweeps show.
        channel: channel of this rank.
        options: have `output`.
        ranks: ranks of the training.
        more: written only to the file.

    Raises:
        JobError: the file cannot be written.
    """
    if ranks.rank == 0:
        channel.result(**result)
    if ranks.rank == 0 and options.output is not None:
        # Renamed when complete, so that no reader finds a partial result.
        aside = options.output / ".result.json.new"
        try:
            aside.write_text(json.dumps({**result, **more}, indent=2) + "\n")
            aside.replace(options.output / "result.json")
        except OSError as error:
            raise JobError(f"--output {options.output}: {error.strerror}") from error


def run(train: Callable[[Namespace, Channel, torch.device], None], options: Namespace) -> NoReturn:
    """Join the other ranks, train, and exit with 0, or with 2 and a line on stderr.

    Args:
        train: called on all ranks. It may raise JobError or CheckpointError, but on all of them.
        options: have `device`; `timeout_seconds` and `backend` are optional.
    """
    channel, status, device = Channel.from_env(), 0, torch.device("cpu")
    # Before init_process_group, which waits for all ranks: if one is missing, hpml knows where the
    # others are.
    channel.event("rendezvous")
    if "RANK" not in os.environ:  # a single process
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="0")
    backend = getattr(options, "backend", None)
    try:
        device = choose_device(options)
        usual = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        patience = timedelta(seconds=getattr(options, "timeout_seconds", 600))
        dist.init_process_group(backend or usual, timeout=patience)
        channel.event("preparation")
        train(options, channel, device)
    except (JobError, CheckpointError, dist.DistNetworkError, dist.DistStoreError) as error:
        status = 2
        if not dist.is_initialized() or dist.get_rank() == 0:
            print(f"{Path(sys.argv[0]).name}: error: {error}", file=sys.stderr)
    channel.close()
    if dist.is_initialized():
        # Final synchronization of all ranks.
        dist.all_reduce(torch.zeros(1, device=device if backend == "nccl" else "cpu"))
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # at a normal exit, gloo's threads may crash (pytorch#190489)
