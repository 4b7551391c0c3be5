"""How lm.py divides a model and its batches over the ranks, and what that costs.

    layout = Layout(options, ranks, device)
    layout.distribute(gpt, channel)
    with layout.measured(step):                 # counts bytes and memory, and times the pipeline
        loss = layout.backward(batch)           # in nats, the same on all ranks of a batch
        layout.clip_gradients(1.0)
    scores = layout.forward(tokens)             # without gradients

`--parallel` is a comma-separated list: `ddp` or `fsdp` for the data-parallel ranks, and sizes of
dimensions: `dp=N` ranks have different batches, `tp=N` share each matrix, `pp=N` are stages of a
pipeline. Neighbouring ranks form a tensor group, then come dp and pp.
"""

from __future__ import annotations

from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.nn.parallel import DistributedDataParallel

from hpml_channel import Channel
from hpml_checkpoint import Ranks
from hpml_job import JobError
from hpml_waits import measure_waits, settle_buckets
from lm_costs import StageClock, StepMeter, expected_bytes
from lm_model import GPT

# Each rank computes some of a block's heads and hidden units; pairs of matrices end in one sum.
TENSOR_PLAN: dict[str, Callable[[], ParallelStyle]] = {
    "qkv": ColwiseParallel, "out": RowwiseParallel, "up": ColwiseParallel, "down": RowwiseParallel
}  # fmt: skip
COUNTED, TIMED = 1, range(2, 5)  # steps since this process started: the first one sets up


class Sizes(NamedTuple):
    """Sizes from --parallel; `dp` is 0 if it follows from the number of ranks."""

    pp: int = 1
    dp: int = 0
    tp: int = 1
    fsdp: bool = False

    @classmethod
    def read(cls, text: str) -> Sizes:
        """Parse --parallel.

        Raises:
            JobError: it is not valid.
        """
        found: dict[str, int] = {}
        for word in text.split(","):
            name, equals, value = word.partition("=")
            is_size = name in ("dp", "tp", "pp") and value.isascii() and value.isdecimal()
            if name in found or not (is_size and int(value) if equals else name in ("ddp", "fsdp")):
                right = "needs ddp or fsdp, or sizes such as dp=2,tp=2,pp=2"
                raise JobError(f"--parallel {text}: {word!r} is not valid; it {right}")
            found[name] = int(value or 1)
        if "ddp" in found and "fsdp" in found:
            raise JobError(f"--parallel {text}: is either ddp or fsdp")
        if found.get("pp", 1) > 1 and "fsdp" in found:
            why = "a pipeline would gather the weights again for each micro-batch"
            raise JobError(f"--parallel {text}: fsdp works with dp and tp, not with pp: {why}")
        is_sharded = bool(found.pop("fsdp", 0))
        found.pop("ddp", 0)
        return cls(**found, fsdp=is_sharded)


def check(options: Namespace) -> Sizes:
    """Return the sizes of --parallel.

    Raises:
        JobError: they conflict with other options.
    """
    text, sizes = options.parallel, Sizes.read(options.parallel)
    parts, where = options.micro_batches, f"in --parallel {text}"
    if options.heads % sizes.tp:
        raise JobError(f"--heads {options.heads} is not a multiple of tp {where}")
    if options.layers < sizes.pp:
        raise JobError(f"--layers {options.layers} is less than pp {where}")
    if sizes.pp > 1 and options.batch_size % parts:
        raise JobError(
            f"--batch-size {options.batch_size} is not a multiple of --micro-batches {parts}"
        )
    if parts < sizes.pp:
        raise JobError(f"--micro-batches {parts} is less than pp {where}")
    if options.compile and sizes.tp * sizes.pp > 1:
        raise JobError(f"--compile works with ddp and fsdp, not with tp or pp {where}")
    return sizes


class Layout:
    """This rank's place, its part of the model, and the steps over all parts.

    Attributes:
        sizes: sizes of the dimensions.
        place: place of this rank in each dimension, such as `{"pp": 1, "dp": 0, "tp": 0}`.
        is_counted: whether its samples count; the other ranks of a batch have the same ones.
        model: after `distribute`: the model for the optimizer and checkpoints.
        expected: after `distribute`: bytes that this rank sends in a step, by formula.
        meter: meter of the counted step; None before it.
        clock: clock of this rank's pipeline stage; None without a pipeline.
    """

    def __init__(self, options: Namespace, ranks: Ranks, device: torch.device) -> None:
        sizes: Sizes = check(options)
        rest, left = divmod(ranks.world_size, sizes.tp * sizes.pp)
        if left or not rest or (sizes.dp or rest) != rest:
            need = f"{sizes.dp or 'dp'} x {sizes.tp} x {sizes.pp} ranks (dp x tp x pp) are needed"
            raise JobError(f"--parallel {options.parallel}: {need}, not {ranks.world_size}")
        self.sizes, self.options, self.device = sizes._replace(dp=rest), options, device
        used: set[str] = {name for name in ("pp", "dp", "tp") if getattr(self.sizes, name) > 1}
        used |= {"dp"} if sizes.fsdp or not used else set()
        names: list[str] = [name for name in ("pp", "dp", "tp") if name in used]
        shape = tuple(getattr(self.sizes, name) for name in names)
        self.mesh = init_device_mesh(device.type, shape, mesh_dim_names=tuple(names))
        self.groups = {name: self.mesh.get_group(name) for name in names}
        self.place = {"pp": 0, "dp": 0, "tp": 0}
        self.place.update((name, self.mesh.get_local_rank(name)) for name in names)
        self.is_counted = not self.place["tp"] + self.place["pp"]
        self.model: nn.Module = nn.Module()
        self.meter: StepMeter | None = None
        self.clock: StageClock | None = None
        self._schedule: Schedule1F1B | None = None

    def distribute(self, gpt: GPT, channel: Channel) -> nn.Module:
        """Return this rank's part of a model that is the same on all ranks."""
        options, sizes = self.options, self.sizes
        self.part = gpt
        if sizes.pp > 1:
            gpt.keep_stage(self.place["pp"], sizes.pp)
        self.model = gpt.to(self.device)
        if sizes.tp > 1:
            plan = {name: style() for name, style in TENSOR_PLAN.items()}
            for block in gpt.blocks.values():
                parallelize_module(block, self.mesh["tp"], plan)
        for block in gpt.blocks.values() if options.compile else ():
            block.compile()
        if sizes.fsdp:
            dtypes = (torch.bfloat16, torch.float32) if options.amp == "bf16" else ()
            precision = MixedPrecisionPolicy(*dtypes)  # for weights, and for sums of gradients
            # Shard the blocks before the whole, so that FSDP gathers and frees one block at a time.
            # As one unit, the whole model would be gathered, saving memory only between steps.
            for part in (*gpt.blocks.values(), gpt):
                fully_shard(part, mesh=self.mesh["dp"], mp_policy=precision)
        elif sizes.tp * sizes.pp == 1:
            self.model = model = DistributedDataParallel(gpt, gradient_as_bucket_view=True)
            tokens = torch.zeros(1, options.sequence, dtype=torch.long, device=self.device)
            settle_buckets(model, tokens, tokens)
            measure_waits(model, channel)
        if sizes.pp > 1:
            group = self.groups["pp"]
            stage = PipelineStage(gpt, self.place["pp"], sizes.pp, self.device, group=group)
            self.clock = StageClock(stage, self.device, group)
            parts = options.micro_batches * options.accumulate
            schedule = Schedule1F1B(
                stage, options.micro_batches, loss_fn=lambda losses, _: losses.mean() / parts
            )
            schedule.scale_grads = False  # loss_fn has done it, including --accumulate
            self._schedule = schedule
        self.expected = expected_bytes(self)  # now: FSDP unshards some weights in a forward
        return self.model

    def backward(self, batch: Tensor) -> Tensor:
        """Compute gradients, averaged over all batches; return the mean loss of this batch.

        Args:
            batch: windows of tokens, (--batch-size x --accumulate, --sequence + 1).
        """
        total, parts = torch.zeros((), device=self.device), self.options.accumulate
        for number, part in enumerate(torch.split(batch, self.options.batch_size), 1):
            # Average gradients over the ranks only once, in the last backward pass.
            if isinstance(self.model, DistributedDataParallel):
                self.model.require_backward_grad_sync = number == parts
            elif isinstance(self.model, FSDPModule):
                self.model.set_requires_gradient_sync(number == parts)
            tokens, targets = part[:, :-1].contiguous(), part[:, 1:].contiguous()
            if self._schedule is None:
                loss = self.model(tokens, targets).mean() / parts
                loss.backward()
                total += loss.detach()
            elif self.part.is_last:
                losses: list[Tensor] = []
                self._schedule.step(targets=targets, target=targets, losses=losses)
                total += torch.stack(losses).detach().sum()
            else:
                self._schedule.step(*[tokens][: self.part.is_first])
        if self.sizes.pp > 1:
            dist.broadcast(total, group=self.groups["pp"], group_src=self.sizes.pp - 1)
            self._add_tied_gradient()
        if self.sizes.dp > 1 and self.sizes.tp * self.sizes.pp > 1 and not self.sizes.fsdp:
            self._average_gradients()
        return total

    def clip_gradients(self, longest: float) -> None:
        """Clip the norm of the whole model's gradient, of which each rank has a part."""
        parts: dict[tuple[str, ...], list[Tensor]] = defaultdict(list)
        every: list[Tensor] = []
        for name, one in self.part.named_parameters():
            dims: tuple[str, ...] = ()
            gradient = one.grad
            if gradient is None:
                continue
            if isinstance(gradient, DTensor):
                pairs = zip(gradient.device_mesh.mesh_dim_names or (), gradient.placements)  # noqa: B905
                dims = tuple(dim for dim, placement in pairs if not placement.is_replicate())
                gradient = gradient.to_local()
            every.append(gradient)
            # A tied head's matrix counts in the first stage.
            if name != "token_embedding.weight" or self.part.is_first:
                parts[dims].append(gradient)
        square = torch.zeros((), device=self.device)
        for names, gradients in sorted(parts.items()):  # same order on all ranks
            share = nn.utils.get_total_norm(gradients).square()
            for dim in names:
                dist.all_reduce(share, group=self.groups[dim])
            square += share
        if self.sizes.pp > 1:
            dist.all_reduce(square, group=self.groups["pp"])
        shorter = (longest / (square.sqrt() + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(every, shorter)

    @torch.no_grad()
    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return each sequence's loss, or without targets the scores; on all ranks of a pipeline.

        Args:
            tokens: (sequences, tokens), the same on all ranks of a tensor group and a pipeline.
            targets: the tokens that follow.
        """
        if self.sizes.pp == 1:
            found: Tensor = self.model(tokens, targets)
            return found
        group, stage, last = self.groups["pp"], self.place["pp"], self.sizes.pp - 1
        x = tokens
        if stage:
            x = torch.empty(*tokens.shape, self.options.width, device=self.device)
            dist.recv(x, group=group, group_src=stage - 1)
        y: Tensor = self.part(x, targets if self.part.is_last else None)
        if stage < last:
            dist.send(y, group=group, group_dst=stage + 1)
            more = () if targets is not None else (tokens.shape[1], self.options.vocabulary)
            y = torch.empty(len(tokens), *more, device=self.device)
        dist.broadcast(y, group=group, group_src=last)
        return y

    @contextmanager
    def measured(self, number: int, *states: object) -> Iterator[None]:
        """In a few steps, count what a step sends and holds, or time the pipeline.

        Args:
            number: number of the step since this process started.
            states: tensors, in dicts and lists, that the rank holds between steps.
        """
        if number == COUNTED:
            # The meter cannot see into compiled code.
            with torch.compiler.set_stance("force_eager"):
                self.meter = StepMeter(self.groups, self.device, self.part.parameters(), states)
                with self.meter:
                    yield
                self.meter.finish()
            return
        with self.clock.step() if self.clock and number in TIMED else nullcontext():
            yield

    def _add_tied_gradient(self) -> None:
        """Sum the gradients of the first stage's embedding and the last stage's head, its copy."""
        part, group = self.part, self.groups["pp"]
        if self.options.untied or not (part.is_first or part.is_last):
            return
        gradient = part.token_embedding.weight.grad
        if gradient is None:
            return
        other = torch.empty_like(gradient)
        peer = dist.get_global_rank(group, self.sizes.pp - 1 if part.is_first else 0)
        pair = (dist.isend, gradient), (dist.irecv, other)
        for work in dist.batch_isend_irecv([dist.P2POp(do, x, peer, group) for do, x in pair]):
            work.wait()
        gradient += other

    def _average_gradients(self) -> None:
        """Average gradients over the dp ranks, in one message."""
        gradients = [one.grad for one in self.part.parameters() if one.grad is not None]
        local = [one.to_local() if isinstance(one, DTensor) else one for one in gradients]
        flat = torch.cat([one.flatten() for one in local]) / self.sizes.dp
        dist.all_reduce(flat, group=self.groups["dp"])
        for one, found in zip(local, flat.split([one.numel() for one in local])):  # noqa: B905
            one.copy_(found.view_as(one))
