"""Train a GPT on text or tokens: data-parallel, sharded, tensor-parallel, pipelined, or mixed.

    python lm.py --steps 200
    torchrun --nproc-per-node=2 lm.py --parallel fsdp --data my_text.txt --output results
    torchrun --nproc-per-node=8 lm.py --parallel tp=2,pp=2 --data tokens --vocabulary 50257

Runs alone, under torchrun, and under any launcher that sets RANK, WORLD_SIZE, LOCAL_RANK,
MASTER_ADDR and MASTER_PORT, such as srun with hpml. Uses GPUs (NCCL) if there are any, otherwise
the CPU (gloo). Needs PyTorch 2.6 or newer and, next to this file, the other lm_*.py and
the hpml_*.py. Losses are in bits per byte of text, or per token of .bin files; random guessing
costs log2 of the vocabulary.
"""

from __future__ import annotations

import argparse
import math
import time
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.optim import Optimizer
from torch.profiler import record_function

import hpml_job
import lm_parallel
from hpml_channel import Channel
from hpml_checkpoint import Checkpoints, Ranks, StopAgreement
from hpml_job import JobError
from hpml_profile import trace_steps
from lm_costs import costs
from lm_data import Text, share_text, windows_of
from lm_model import GPT, flops_per_token, parameter_groups, peak_flops
from lm_parallel import Layout

NUMBERS = {  # numeric options
    "steps": (1000, 1, "length of the training"),
    "batch-size": (16, 1, "sequences per data-parallel rank"),
    "accumulate": (1, 1, "batches per step"),
    "micro-batches": (4, 1, "parts of a batch in a pipeline"),
    "sequence": (256, 1, "tokens"),
    "vocabulary": (0, 0, "of tokens; 0: 256 bytes, or what meta.pkl has"),
    "layers": (4, 1, ""),
    "heads": (4, 1, ""),
    "width": (128, 1, "of the model"),
    "lr": (1e-3, 0, "learning rate"),
    "lr-warmup-steps": (50, 0, "steps to reach it"),
    "weight-decay": (0.1, 0, "of matrices"),
    "clip": (1.0, 0, "longest gradient; 0: any"),
    "seed": (1, 0, "of weights and the order of the text"),
    "log-every": (20, 1, "steps"),
    "eval-every": (100, 1, "steps"),
    "checkpoint-every": (100, 1, "steps"),
    "warm-up-steps": (20, 0, "first steps, which tokens/s leaves out"),
    "sample": (0, 0, "tokens to write and print after the training"),
}
# Other values mean another training. The number of ranks, --batch-size and --parallel may change.
SAME = "steps sequence vocabulary layers heads width untied optimizer seed".split()
SAME += "lr lr_warmup_steps weight_decay clip".split()
Position = tuple[int, dict[int, list[float]], float]  # step; seconds, bits by step; total seconds
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)  # by parameter: stages differ
TEMPERATURE = 0.8  # for sampling


def parse(arguments: list[str] | None = None) -> Namespace:
    """Return the options of the command line; exits with 2 if they are invalid."""
    # Without the usage an error is one line.
    about = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, description=about)
    add = parser.add_argument
    add("--data", type=Path, default="/usr/share/common-licenses", metavar="FILE_OR_DIR")
    hpml_job.add_options(parser, NUMBERS)
    add("--parallel", default="ddp", metavar="HOW", help="ddp, fsdp, or sizes: dp=2,tp=2,pp=2")
    add("--optimizer", choices=[*hpml_job.OPTIMIZERS], default="adamw")
    add("--untied", action="store_true", help="give the head a matrix of its own")
    add("--recompute", action="store_true", help="recompute activations to save memory")
    add("--compile", action="store_true", help="compile each block with torch.compile")
    add("--amp", choices=("auto", "bf16", "off"), default="auto", help="auto: bf16 on GPUs with it")
    add("--target-loss", type=float, metavar="BITS", help="report the seconds to reach it")
    add("--peak-tflops", type=float, metavar="N", help="per device; default: from hpml bench")
    options = parser.parse_args(arguments)
    hpml_job.check_numbers(parser, options, NUMBERS)
    for name in ("target-loss", "peak-tflops"):
        value = getattr(options, name.replace("-", "_"))
        if value is not None and not 0 < value < math.inf:
            parser.error(f"--{name} {value} must be above 0")
    if options.width % options.heads:
        parser.error(f"--width {options.width} is not a multiple of --heads {options.heads}")
    try:
        lm_parallel.check(options)
    except JobError as error:
        parser.error(str(error))
    return options


def batch_of(text: Text, step: int, options: Namespace, layout: Layout) -> Tensor:
    """Return this rank's windows of a step, which depend on seed, step and global batch only."""
    random = torch.Generator().manual_seed(options.seed * 1_000_003 + step)
    count = options.batch_size * options.accumulate * layout.sizes.dp
    starts = len(text.parts[0]) - options.sequence
    numbers = torch.randint(starts, (count,), generator=random)
    mine = numbers[layout.place["dp"] :: layout.sizes.dp]
    return windows_of(text.parts[0], mine, options.sequence)


def train_step(layout: Layout, optimizer: Optimizer, batch: Tensor, options: Namespace) -> Tensor:
    """Take one step of the optimizer; return the loss of this rank's batch in bits per token."""
    loss = layout.backward(batch)
    if options.clip:
        layout.clip_gradients(options.clip)
    optimizer.step()
    optimizer.zero_grad()
    return loss / math.log(2)


@torch.no_grad()
def evaluate(layout: Layout, part: Tensor, options: Namespace) -> float:
    """Return the loss of a part of the text in bits per token."""
    count, sums, dp = (len(part) - 1) // options.sequence, torch.zeros(2), layout.sizes.dp
    layout.model.eval()
    for first in range(0, count, options.batch_size * dp):
        # FSDP needs equally many calls on all ranks: windows beyond the end are not counted.
        numbers = first + layout.place["dp"] + torch.arange(options.batch_size) * dp
        at = numbers.clamp(max=count - 1)
        batch = windows_of(part, at, options.sequence, options.sequence).to(layout.device)
        with torch.compiler.set_stance("force_eager"):  # otherwise the blocks are compiled again
            losses = layout.forward(batch[:, :-1], batch[:, 1:])
        bits = losses.cpu()[numbers < count] / math.log(2)
        sums += torch.tensor([bits.sum(), len(bits)])
    layout.model.train()
    dist.all_reduce(sums)
    return float(sums[0] / sums[1])


def sample(layout: Layout, text: Text, options: Namespace) -> str:
    """Return tokens that the model adds to the start of the test text; all ranks call it."""
    tokens, random = [int(text.parts[2][0]) & 0xFFFF], torch.Generator().manual_seed(options.seed)
    layout.model.eval()
    for _ in range(options.sample):
        seen = torch.tensor([tokens[-options.sequence :]], device=layout.device)
        with torch.compiler.set_stance("force_eager"):
            scores = layout.forward(seen)[0, -1].cpu() / TEMPERATURE
        chosen = torch.multinomial(scores.softmax(0), 1, generator=random)
        dist.broadcast(chosen, 0)  # scores, and so choices, may differ in their last bits
        tokens.append(int(chosen))
    return text.decode(tokens)


def save(to: Checkpoints, model: nn.Module, optimizer: Optimizer, step: int, state: object) -> None:
    """Write a checkpoint that any number of ranks can load, with any --parallel."""
    weights, momenta = get_state_dict(model, optimizer, options=FLAT)
    to.save(state, step=step, sharded={"model": weights, "optimizer": momenta})


def load(checkpoints: Checkpoints, model: nn.Module, optimizer: Optimizer) -> Position:
    """Restore the newest checkpoint, if there is one; return its position."""
    is_new = not optimizer.state
    weights, momenta = get_state_dict(model, optimizer, options=FLAT)
    found = checkpoints.load({"model": weights, "optimizer": momenta})
    if found is None:
        if is_new:
            optimizer.state.clear()  # get_state_dict took a step with a learning rate of 0
        return 0, {}, 0.0
    set_state_dict(
        model, optimizer, model_state_dict=weights, optim_state_dict=momenta, options=FLAT
    )
    return found.step, found.state["evaluations"], found.state["seconds"]


# One loop, to be read from top to bottom and changed.
def train(options: Namespace, channel: Channel, device: torch.device) -> None:  # noqa: C901, PLR0912, PLR0915
    """Train from the newest checkpoint to the last step, or until asked to stop."""
    ranks = Ranks()
    text = share_text(options, ranks)
    hpml_job.make_directories(options, ranks)
    options.vocabulary, size = text.vocabulary, len(text.parts[0])
    if len(sizes := set(ranks.gather(size))) > 1:
        raise JobError(f"--data {options.data}: ranks see different texts, of {sizes} {text.unit}s")
    layout = Layout(options, ranks, device)
    torch.manual_seed(options.seed)  # same weights on all ranks
    network = GPT(options)
    parameters = sum(one.numel() for one in network.parameters())
    flops, (peak, origin) = flops_per_token(network, options), peak_flops(device, options)
    model = layout.distribute(network, channel)
    groups = parameter_groups(model, options.weight_decay)
    is_fused = {"fused": True} if options.optimizer in ("adam", "adamw") else {}
    rates = {"lr": options.lr, "weight_decay": options.weight_decay}
    optimizer = hpml_job.make_optimizer(options.optimizer, groups, **rates, **is_fused)
    samples = options.batch_size * options.accumulate  # per data-parallel rank
    tokens = samples * options.sequence * layout.sizes.dp  # per step
    checkpoints, step, evaluations, seconds = None, 0, dict[int, list[float]](), 0.0
    if options.checkpoint is not None:
        job = {name: getattr(options, name) for name in SAME}
        job.update(tokens_per_step=tokens, train_tokens=size)
        checkpoints = Checkpoints(options.checkpoint, job=job, channel=channel, ranks=ranks)
        step, evaluations, seconds = load(checkpoints, model, optimizer)
    start, begun, saved = time.perf_counter() - seconds, step, step
    every = options.log_every, options.eval_every, options.checkpoint_every
    steady, steady_seconds, rate, mfu = step + options.warm_up_steps, 0.0, 0.0, None
    say = partial(hpml_job.say, ranks)
    say(f"{options.parallel}, {ranks.world_size} ranks, {step} of {options.steps} steps are done")
    say(f"MFU = tokens/s * (6 N + 12 L H Q T) / (devices * peak); {flops:,} FLOP, peak {origin}")
    if options.compile:
        say("the first step compiles the model: a minute on idle cores, several on busy ones")
    channel.event("warm-up", steps=options.warm_up_steps)
    channel.event("training", step=step, total_steps=options.steps)
    agreement = StopAgreement(ranks)
    # Ask at once: a request during the start must not cost a step.
    stop = agreement.exchange(channel.stop_requested()) or agreement.finish()
    with trace_steps(options.profile, ranks.rank, after=options.warm_up_steps) as tracing:
        while True:
            is_last = step == options.steps
            is_due = is_last or step % options.eval_every == 0
            if is_due and not stop and step not in evaluations:
                with channel.timed("evaluation_seconds"):
                    found = evaluate(layout, text.parts[1], options)
                evaluations[step] = [time.perf_counter() - start, found]
                channel.event("evaluation", loss=found)
                say(f"step {step}: validation loss {found:.4f} bits per {text.unit}")
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
                    windows = batch_of(text, step, options, layout).to(device)
                waited = time.perf_counter() - mark
                for group in optimizer.param_groups:
                    group["lr"] = hpml_job.learning_rate(step, options.steps, options, floor=0.1)
                with layout.measured(step - begun, optimizer.state):
                    loss = train_step(layout, optimizer, windows, options)
            step += 1
            is_due = step in {options.steps, steady} or any(step % one == 0 for one in every)
            if is_due:
                loss = loss.cpu() / ranks.world_size  # waits for the GPU
                dist.all_reduce(loss)
            took = time.perf_counter() - mark
            if step > steady:
                steady_seconds += took
            if step > steady and is_due:  # in between, the program may be ahead of the GPU
                rate = (step - steady) * tokens / steady_seconds
                mfu = rate * flops / (ranks.world_size * peak) if peak else None
                channel.gauge(mfu=mfu)
            channel.gauge(loss=loss)
            mine = samples if layout.is_counted else 0
            channel.count(steps=1, samples=mine, data_wait_seconds=waited, step_seconds=took)
            if is_due:
                speed = f"{rate:,.0f} tokens/s, MFU {'-' if mfu is None else f'{mfu:.1%}'}"
                say(f"step {step}: loss {loss:.4f}, rate {group['lr']:.2e}, {speed}")
            tracing.step()
            stop = agreement.exchange(channel.stop_requested())
    test_loss = None
    if stop:
        channel.event("stopping", step=step)
    else:  # once, at the end: the test text must not influence how long to train
        with channel.timed("evaluation_seconds"):
            test_loss = evaluate(layout, text.parts[2], options)
        say(f"test loss {test_loss:.4f} bits per {text.unit}")
        if options.sample:
            say(f"sample: {sample(layout, text, options)}")
    reached = [at for at, loss in evaluations.values() if loss <= (options.target_loss or 0)]
    spent = costs(layout, ranks, parameters)
    say(", ".join(f"{name} {value:,.6g}" for name, value in spent.items() if value is not None))
    result = {
        "parallel": options.parallel, "optimizer": options.optimizer,
        "batch_size_per_rank": options.batch_size, "steps": step, "parameters": parameters,
        "validation_loss": evaluations[max(evaluations)][1] if evaluations else None,
        "test_loss": test_loss, "target_loss": options.target_loss,
        "seconds_to_loss": min(reached, default=None),
        "train_seconds": time.perf_counter() - start,
        "tokens_per_second": rate or None,
        "samples_per_second": rate / options.sequence or None,
        "mfu": mfu, "peak": origin, "flops_per_token": flops,
        "world_size": ranks.world_size, "stopped": bool(stop), **spent,
    }  # fmt: skip
    hpml_job.report(result, channel, options, ranks, evaluations=evaluations)
    say(f"{'stopped' if stop else 'done'}: {step} steps in {result['train_seconds']:.1f} s")


def main(arguments: list[str] | None = None) -> NoReturn:
    """Join the other ranks, train, and exit with 0, or with 2 and a line with the reason."""
    hpml_job.run(train, parse(arguments))


if __name__ == "__main__":
    main()
