"""Train a byte-level GPT on text with DistributedDataParallel or FSDP2 (fully_shard).

    python lm.py --steps 200
    torchrun --nproc-per-node=2 lm.py --parallel fsdp --data my_text.txt --output results

Runs alone, under torchrun, and under any launcher that sets RANK, WORLD_SIZE, LOCAL_RANK,
MASTER_ADDR and MASTER_PORT, such as srun with hpml. Uses GPUs (NCCL) if there are any, otherwise
the CPU (gloo). Needs PyTorch 2.6 or newer and, next to this file, lm_model.py, hpml_channel.py,
hpml_checkpoint.py and hpml_waits.py. Losses are in bits per byte of text: blind guessing costs 8.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.profiler import record_function

from hpml_channel import Channel
from hpml_checkpoint import CheckpointError, Checkpoints, Ranks, StopAgreement
from hpml_waits import measure_waits, trace_steps
from lm_model import GPT, flops_per_token, peak_flops

NUMBERS = {  # options that are numbers
    "steps": 1000, "batch-size": 16, "accumulate": 1,  # sequences per rank, batches per step
    "sequence": 256, "layers": 4, "heads": 4, "width": 128,  # bytes; the model
    "lr": 1e-3, "lr-warmup-steps": 50, "weight-decay": 0.1, "clip": 1.0, "seed": 1,
    "log-every": 20, "eval-every": 100, "checkpoint-every": 100,  # steps
    "warm-up-steps": 20,  # the first, which tokens/s leaves out
}  # fmt: skip
# With others it is another training. The number of ranks, --batch-size and --parallel may change.
SAME = "steps sequence layers heads width seed lr lr_warmup_steps weight_decay clip".split()
Position = tuple[int, dict[int, list[float]], float]  # step; by step: seconds, bits; seconds so far
MOST_BYTES = 1 << 16  # of the text of an evaluation, for whose end a stop waits


def parse(arguments: list[str] | None = None) -> Namespace:
    """Return the options of the command line; exits with 2 if they make no sense."""
    # Without the usage an error is one line.
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, description=__doc__)
    add = parser.add_argument
    add("--data", type=Path, default="/usr/share/common-licenses", metavar="FILE_OR_DIR")
    for name, default in NUMBERS.items():
        add(f"--{name}", type=type(default), default=default, metavar="N", help="%(default)s")
    add("--parallel", choices=("ddp", "fsdp"), default="ddp")
    add("--recompute", action="store_true", help="compute activations twice to save memory")
    add("--compile", action="store_true", help="compile each block with torch.compile")
    add("--amp", choices=("auto", "bf16", "off"), default="auto", help="auto: bf16 on GPUs with it")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--target-loss", type=float, metavar="BITS", help="report the seconds to reach it")
    add("--peak-tflops", type=float, metavar="N", help="of a device, measured by hpml bench")
    saved = os.environ.get("HPML_CHECKPOINT_DIR") or None
    add("--checkpoint", type=Path, default=saved, metavar="DIR", help="save, and resume there")
    add("--output", type=Path, metavar="DIR", help="write result.json there")
    traces = Path(os.environ.get("HPML_RUN_DIR", "."), "profile")
    add("--profile", type=Path, nargs="?", const=traces, metavar="DIR", help="trace five steps")
    options = parser.parse_args(arguments)
    for name in (*NUMBERS, "target-loss", "peak-tflops"):
        value = getattr(options, name.replace("-", "_"))
        least = 0 if name in {"warm-up-steps", "weight-decay", "seed"} else 1e-9
        if value is not None and not least <= value < math.inf:
            parser.error(f"--{name} {value} is not {'0 or ' if not least else ''}above 0")
    if options.width % options.heads:
        parser.error(f"--width {options.width} is not a multiple of --heads {options.heads}")
    return options


def read_text(data: Path, sequence: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the bytes to train, validate and test with; a single file is mapped, not read."""
    # In the order of their names. Links are left out: they would repeat a text.
    files = sorted(one for one in data.rglob("*") if one.is_file() and not one.is_symlink())
    sizes = [(str(one), False, one.stat().st_size) for one in files or [data]]
    parts = [torch.from_file(*one, dtype=torch.uint8) for one in sizes if one[2]]
    text = parts[0] if len(parts) == 1 else torch.cat([torch.empty(0, dtype=torch.uint8), *parts])
    part = min(len(text) // 10, MOST_BYTES)
    if part <= sequence:
        least = f"a tenth has to be longer than --sequence {sequence}"
        raise ValueError(f"--data {data}: {len(text)} bytes are too few, {least}")
    return text[: -2 * part], text[-2 * part : -part], text[-part:]


def distribute(gpt: GPT, options: Namespace, device: torch.device, channel: Channel) -> nn.Module:
    """Return a model whose gradients are averaged over the ranks."""
    for block in gpt.blocks if options.compile else ():
        block.compile()
    if options.parallel == "ddp":
        model = DistributedDataParallel(gpt, gradient_as_bucket_view=True)
        measure_waits(model, channel)
        return model
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    dtypes = (torch.bfloat16, torch.float32) if options.amp == "bf16" else ()
    precision = MixedPrecisionPolicy(*dtypes)  # of weights, and of sums of gradients
    # Blocks before the whole: FSDP then gathers and frees one block at a time. Sharded as one unit,
    # the model would be gathered as a whole, and memory be saved only between steps.
    for part in (*gpt.blocks, gpt):
        fully_shard(part, mesh=mesh, mp_policy=precision)
    return gpt


def learning_rate(step: int, options: Namespace) -> float:
    """Return the rate of a step: only the step decides, so it continues after a resume."""
    warm_up = options.lr_warmup_steps
    part = min(1.0, max(0, step - warm_up) / max(1, options.steps - warm_up))
    rate = options.lr * min(1.0, (step + 1) / warm_up)
    return float(rate * (0.55 + 0.45 * math.cos(math.pi * part)))


def batch_of(text: Tensor, step: int, options: Namespace, ranks: Ranks) -> Tensor:
    """Return this rank's sequences of a step, which depend on seed, step and global batch only."""
    windows = text.unfold(0, options.sequence + 1, 1)  # a view: nothing is copied
    random = torch.Generator().manual_seed(options.seed * 1_000_003 + step)
    count = options.batch_size * options.accumulate * ranks.world_size
    numbers = torch.randint(len(windows), (count,), generator=random)
    return windows[numbers[ranks.rank :: ranks.world_size]].long()


def train_step(model: nn.Module, optimizer: Optimizer, batch: Tensor, options: Namespace) -> Tensor:
    """Take one step of the optimizer; return this rank's loss in bits per byte."""
    total = torch.zeros((), device=batch.device)
    for number, part in enumerate(torch.split(batch, options.batch_size), 1):
        # Gradients are averaged over the ranks once, in the last backward pass.
        if isinstance(model, DistributedDataParallel):
            model.require_backward_grad_sync = number == options.accumulate
        elif isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(number == options.accumulate)
        loss = model(part).mean() / options.accumulate
        loss.backward()
        total += loss.detach() / math.log(2)
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm  # FSDP: of all shards
    nn.utils.clip_grads_with_norm_(model.parameters(), options.clip, norm)
    optimizer.step()
    optimizer.zero_grad()
    return total


@torch.no_grad()
def evaluate(model: nn.Module, text: Tensor, options: Namespace, ranks: Ranks) -> float:
    """Return the loss of a text in bits per byte."""
    windows, sums = text.unfold(0, options.sequence + 1, options.sequence), torch.zeros(2)
    model.eval()
    for first in range(0, len(windows), options.batch_size * ranks.world_size):
        # FSDP needs equally many calls on all ranks: what is beyond the end is not counted.
        numbers = first + ranks.rank + torch.arange(options.batch_size) * ranks.world_size
        batch = windows[numbers.clamp(max=len(windows) - 1)].long()
        with torch.compiler.set_stance("force_eager"):  # else the blocks are compiled once more
            bits = model(batch).cpu()[numbers < len(windows)] / math.log(2)
        sums += torch.tensor([bits.sum(), len(bits)])
    model.train()
    dist.all_reduce(sums)
    return float(sums[0] / sums[1])


def save(to: Checkpoints, model: nn.Module, optimizer: Optimizer, step: int, state: object) -> None:
    """Write a checkpoint, which any number of ranks can load, with DDP or FSDP."""
    weights, momenta = get_state_dict(model, optimizer)
    to.save(state, step=step, sharded={"model": weights, "optimizer": momenta})


def load(checkpoints: Checkpoints, model: nn.Module, optimizer: Optimizer) -> Position:
    """Take over the newest checkpoint, if there is one; return its position."""
    weights, momenta = get_state_dict(model, optimizer)
    found = checkpoints.load({"model": weights, "optimizer": momenta})
    if found is None:
        optimizer.state.clear()  # get_state_dict took a step, with a learning rate of 0
        return 0, {}, 0.0
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=momenta)
    return found.step, found.state["evaluations"], found.state["seconds"]


# One loop to read from top to bottom, and to change.
def train(options: Namespace, channel: Channel, device: torch.device) -> None:  # noqa: C901, PLR0912, PLR0915
    """Train from the newest checkpoint to the last step, or until asked to stop."""
    ranks, problem, size = Ranks(), "", 0
    try:
        text, validation_text, test_text = read_text(options.data, options.sequence)
        for directory in filter(None, (options.output, options.profile)):
            directory.mkdir(parents=True, exist_ok=True)
        size = len(text)
    except (ValueError, OSError, RuntimeError) as error:
        problem = str(error).partition("\n")[0]
    problems, sizes = zip(*ranks.gather((problem, size)))  # noqa: B905 - Python 3.9
    if any(problems) or len(set(sizes)) > 1:  # on any rank, so that none waits for it
        different = f"--data {options.data}: ranks see different texts, of {set(sizes)} bytes"
        raise ValueError(next(filter(None, problems), different))
    torch.manual_seed(options.seed)  # the same weights on all ranks
    network = GPT(options).to(device)
    flops, (peak, origin) = flops_per_token(network, options), peak_flops(device, options)
    model = distribute(network, options, device, channel)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=options.weight_decay)
    samples = options.batch_size * options.accumulate
    tokens = samples * options.sequence * ranks.world_size  # per step
    checkpoints, step, evaluations, seconds = None, 0, dict[int, list[float]](), 0.0
    if options.checkpoint is not None:
        job = {name: getattr(options, name) for name in SAME}
        job.update(tokens_per_step=tokens, train_bytes=size)
        checkpoints = Checkpoints(options.checkpoint, job=job, channel=channel, ranks=ranks)
        step, evaluations, seconds = load(checkpoints, model, optimizer)
    start, saved = time.perf_counter() - seconds, step
    every = options.log_every, options.eval_every, options.checkpoint_every
    steady, steady_seconds, rate, mfu = step + options.warm_up_steps, 0.0, 0.0, None
    say: Callable[[str], None] = partial(print, flush=True) if ranks.rank == 0 else lambda _: None
    say(f"{options.parallel}, {ranks.world_size} ranks, {step} of {options.steps} steps are done")
    say(f"MFU = tokens/s * (6 N + 12 L H Q T) / (devices * peak); {flops:,} FLOP, peak {origin}")
    if options.compile:
        say("the first step compiles the model: a minute on idle cores, several on busy ones")
    channel.event("warm-up", steps=options.warm_up_steps)
    channel.event("training", step=step, total_steps=options.steps)
    agreement = StopAgreement(ranks)
    # Ask at once: a request that came while the job started must not cost a step.
    stop = agreement.exchange(channel.stop_requested()) or agreement.finish()
    with trace_steps(options.profile, ranks.rank, after=options.warm_up_steps) as tracing:
        while True:
            is_last = step == options.steps
            is_due = is_last or step % options.eval_every == 0
            if is_due and not stop and step not in evaluations:
                with channel.timed("evaluation_seconds"):
                    found = evaluate(model, validation_text.to(device), options, ranks)
                evaluations[step] = [time.perf_counter() - start, found]
                channel.event("evaluation", loss=found)
                say(f"step {step}: validation loss {found:.4f} bits per byte")
            is_due = is_last or stop or step % options.checkpoint_every == 0
            if checkpoints is not None and is_due and step > saved:
                state = {"evaluations": evaluations, "seconds": time.perf_counter() - start}
                save(checkpoints, model, optimizer, step, state)
                saved = step
            if is_last or stop:
                break
            mark = time.perf_counter()
            with record_function("hpml.step"):
                with record_function("hpml.data"):
                    windows = batch_of(text, step, options, ranks).to(device)
                waited = time.perf_counter() - mark
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate(step, options)
                loss = train_step(model, optimizer, windows, options)
            step += 1
            is_due = step in {options.steps, steady} or any(step % one == 0 for one in every)
            if is_due:
                loss = loss.cpu() / ranks.world_size  # waits for the GPU
                dist.all_reduce(loss)
            took = time.perf_counter() - mark
            if step > steady:
                steady_seconds += took
            if step > steady and is_due:  # between, the program may be ahead of the GPU
                rate = (step - steady) * tokens / steady_seconds
                mfu = rate * flops / (ranks.world_size * peak) if peak else None
                channel.gauge(mfu=mfu)
            channel.gauge(loss=loss)
            channel.count(steps=1, samples=samples, data_wait_seconds=waited, step_seconds=took)
            if is_due:
                speed = f"{rate:,.0f} tokens/s, MFU {'-' if mfu is None else f'{mfu:.1%}'}"
                say(f"step {step}: loss {loss:.4f}, rate {group['lr']:.2e}, {speed}")
            tracing.step()
            stop = agreement.exchange(channel.stop_requested())
    test_loss = None
    if stop:
        channel.event("stopping", step=step)
    else:  # once, at the end: the test text must not decide how long to train
        with channel.timed("evaluation_seconds"):
            test_loss = evaluate(model, test_text.to(device), options, ranks)
        say(f"test loss {test_loss:.4f} bits per byte")
    reached = [at for at, loss in evaluations.values() if loss <= (options.target_loss or 0)]
    result = {
        "parallel": options.parallel, "batch_size_per_rank": options.batch_size, "steps": step,
        "validation_loss": evaluations[max(evaluations)][1] if evaluations else None,
        "test_loss": test_loss, "target_loss": options.target_loss,
        "seconds_to_loss": min(reached, default=None),
        "train_seconds": time.perf_counter() - start,
        "tokens_per_second": rate or None,
        "samples_per_second": rate / options.sequence or None,
        "mfu": mfu, "peak": origin, "flops_per_token": flops,
        "world_size": ranks.world_size, "stopped": bool(stop),
    }  # fmt: skip
    if ranks.rank == 0:
        channel.result(**result)
    if ranks.rank == 0 and options.output is not None:
        # Renamed when complete: no reader finds half of a result.
        aside = options.output / ".result.json.new"
        aside.write_text(json.dumps({**result, "evaluations": evaluations}, indent=1))
        aside.replace(options.output / "result.json")
    say(f"{'stopped' if stop else 'done'}: {step} steps in {result['train_seconds']:.1f} s")


def choose_device(options: Namespace) -> torch.device:
    """Return the GPU of this rank or the CPU, and replace `--amp auto` by what is fast there."""
    device = torch.device("cpu")
    if options.device != "cpu" and torch.cuda.is_available():
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    elif options.device == "cuda":
        raise ValueError("--device cuda: PyTorch sees no GPU here")
    if options.amp == "auto":
        is_fast = device.type == "cuda" and torch.cuda.get_device_capability() >= (8, 0)
        options.amp = "bf16" if is_fast else "off"
    return device


def main(arguments: list[str] | None = None) -> NoReturn:
    """Join the other ranks, train, and end with 0, or with 2 and a line with the reason."""
    options, channel, status = parse(arguments), Channel.from_env(), 0
    channel.event("rendezvous")
    if "RANK" not in os.environ:  # alone
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="0")
    try:
        device = choose_device(options)
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
        channel.event("preparation")
        train(options, channel, device)
    except (CheckpointError, ValueError) as error:
        status = 2
        if not dist.is_initialized() or dist.get_rank() == 0:
            print(f"{Path(sys.argv[0]).name}: error: {error}", file=sys.stderr, flush=True)
    channel.close()
    if dist.is_initialized():
        dist.all_reduce(torch.zeros(1))  # the ranks meet a last time
        dist.destroy_process_group()
    os._exit(status)  # at Python's own end threads of gloo may crash it (pytorch#190489)


if __name__ == "__main__":
    main()
