"""What a layout of lm.py costs in bytes sent and memory, measured in one step and by formula."""

from __future__ import annotations

import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from statistics import median
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage

    from hpml_checkpoint import Ranks
    from lm_parallel import Layout, Sizes

T = TypeVar("T")

COPIES = {"sgd": 1, "nesterov": 1, "adagrad": 1, "adadelta": 2, "adam": 2, "adamw": 2}


class StepMeter(TorchDispatchMode):
    """Counts what PyTorch's operators send and hold while it is entered.

    With S bytes in total and n ranks, a rank sends 2 (n-1)/n S in an all-reduce, (n-1)/n S in an
    all-gather or a reduce-scatter, as in rings. Calls are counted, not packets.

    Attributes:
        sent: bytes, by dimension.
        peak: peak bytes held; on a GPU by PyTorch's allocator; on a CPU parameters, states and
            tensors
            created by the step's operators, without workspaces inside operators.
    """

    def __init__(
        self,
        groups: Mapping[str, dist.ProcessGroup],
        device: torch.device,
        parameters: Iterable[Tensor],
        states: object,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sent: dict[str, float] = defaultdict(float)
        self._dims: dict[str, tuple[str, int]] = {
            group.group_name: (dim, group.size()) for dim, group in groups.items()
        }
        self._device, self._storages, self.peak = device, WeakIdKeyDictionary(), 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self._hold([*parameters, *tree_leaves(states)])

    def finish(self) -> None:
        """Take the allocator's peak on a GPU; forget the tensors."""
        if self._device.type == "cuda":
            self.peak = torch.cuda.max_memory_allocated()
        self._storages.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an operator, and count it."""
        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented  # DTensor then calls operators on its parts
        found = func(*args, **(kwargs or {}))
        if getattr(func, "namespace", "") in ("c10d", "_c10d_functional"):
            self._count(func.__name__.partition(".")[0], tree_leaves((args, kwargs)))
        if self._device.type == "cpu":
            self._hold(tree_leaves(found))
        return found

    def _count(self, name: str, parts: list[object]) -> None:
        sizes = [one.nbytes for one in parts if isinstance(one, Tensor)]
        names = [one if isinstance(one, str) else _group_name(one) for one in parts]
        dim, ranks = next((self._dims[one] for one in names if one in self._dims), ("other", 1))
        part = (ranks - 1) / ranks
        if "reduce_scatter" in name:
            self.sent[dim] += part * max(sizes)
        elif "all_gather" in name or "allgather" in name:  # c10d's takes the whole as an argument
            self.sent[dim] += part * (max(sizes) if len(sizes) > 1 else sizes[0] * ranks)
        elif "all_reduce" in name or "allreduce" in name:
            self.sent[dim] += 2 * part * sum(sizes)
        elif name == "send":
            self.sent[dim] += sum(sizes)

    def _hold(self, tensors: Iterable[object]) -> None:
        is_new = False
        for one in tensors:
            if isinstance(one, Tensor):
                storage = (one.to_local() if isinstance(one, DTensor) else one).untyped_storage()
                if storage not in self._storages:
                    self._storages[storage], is_new = None, True
        if is_new:  # reread sizes: FSDP empties the storages of gathered weights
            self.peak = max(self.peak, sum(one.nbytes() for one in self._storages))


class StageClock:
    """Times the computation of a pipeline stage, in steps that start together.

    Attributes:
        idle_share: the fraction of a step in which this stage does not compute: the median.
    """

    def __init__(
        self, stage: PipelineStage, device: torch.device, group: dist.ProcessGroup
    ) -> None:
        self.idle_share: float | None = None
        self._device, self._group, self._is_on, self._busy = device, group, False, 0.0
        self._shares: list[float] = []
        for name in ("forward_one_chunk", "backward_one_chunk"):
            setattr(stage, name, self._timed(getattr(stage, name)))

    @contextmanager
    def step(self) -> Iterator[None]:
        """Time a step, from the common start until the last stage has finished."""
        dist.barrier(self._group)
        self._is_on, self._busy, began = True, 0.0, self._now()
        yield
        took = torch.tensor(self._now() - began)
        self._is_on = False
        dist.all_reduce(took, dist.ReduceOp.MAX, group=self._group)
        self._shares.append(1 - self._busy / float(took))
        self.idle_share = median(self._shares)

    def _timed(self, compute: Callable[..., T]) -> Callable[..., T]:
        @wraps(compute)
        def timed(*args: object, **more: object) -> T:
            began = self._now() if self._is_on else 0.0
            found = compute(*args, **more)
            self._busy += self._now() - began if self._is_on else 0.0
            return found

        return timed

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def _group_name(one: object) -> str:
    try:
        return str(dist.ProcessGroup.unbox(one).group_name)  # type: ignore[arg-type]
    except (RuntimeError, TypeError, AttributeError):
        return ""


def model_state_bytes(parameters: float, optimizer: str) -> tuple[float, float, float]:
    """Return the bytes of weights, gradients and optimizer states in float32."""
    return 4 * parameters, 4 * parameters, 4 * COPIES[optimizer] * parameters


def activation_bytes(options: Namespace) -> tuple[float, float, float]:
    """Return the bytes of one sequence: kept by a layer, of its input, and of the scores.

    Korthikanti et al. 2022, equation 2, without attention scores; Wijmans et al. 2024.
    """
    element, tokens = 2 if options.amp == "bf16" else 4, options.sequence
    layer = tokens * options.width * (14 * element + 2 * 4 + 2)
    scores = tokens * options.vocabulary * (element + 3 * 4)
    return layer, tokens * options.width * 4, scores


def expected_memory(options: Namespace, sizes: Sizes, parameters: int) -> float:
    """Return the peak bytes that a rank needs, by the formulas of `hpml advise`.

    Tensor ranks and stages divide everything; a pipeline keeps as many micro-batches as stages.

    Args:
        options: options of lm.py.
        sizes: sizes of the dimensions: `pp`, `dp`, `tp`, `fsdp`.
        parameters: number of parameters of the whole model.
    """
    weights, gradients, states = model_state_bytes(parameters, options.optimizer)
    weights *= 1.5 if options.amp == "bf16" else 1  # autocast's 16-bit copies
    layer, inputs, scores = activation_bytes(options)
    kept = options.layers * layer
    kept *= min(1.0, inputs / layer + 1 / options.layers) if options.recompute else 1
    parts = options.micro_batches if sizes.pp > 1 else 1
    need = (kept + scores) * options.batch_size / sizes.tp / parts
    if sizes.fsdp:
        need += weights / options.layers / sizes.tp
    shards: int = sizes.tp * sizes.pp * (sizes.dp if sizes.fsdp else 1)
    need += (weights + gradients + states) / shards
    return float(need)


def expected_bytes(layout: Layout) -> dict[str, float]:
    """Return the bytes that a rank sends in a step by formula, by dimension."""
    options, sizes, part = layout.options, layout.sizes, layout.part
    half = options.amp == "bf16"
    held: dict[bool, float] = defaultdict(float)  # bytes of weights, by whether in blocks
    for name, one in part.named_parameters():
        own = one.to_local() if isinstance(one, DTensor) else one
        held[name.startswith("blocks")] += 4 * own.numel()
    ring = {name: (size - 1) / size for name, size in zip(("pp", "dp", "tp"), sizes)}  # noqa: B905
    hidden = 4 * options.batch_size * options.accumulate * options.sequence * options.width
    if sizes.fsdp:
        # Per batch, blocks are gathered in both passes, other weights only in the forward pass;
        # gradients are reduced once.
        gathered = options.accumulate * (2 * held[True] + held[False]) / (2 if half else 1)
        data = ring["dp"] * sizes.dp * (gathered + sum(held.values()))
    else:
        data = 2 * ring["dp"] * sum(held.values())
    # Per layer, two sums in the forward pass and two in the backward pass.
    tensor = len(part.blocks) * 2 * ring["tp"] * hidden * (3 if half else 4)
    stages = hidden * ((not part.is_last) + (not part.is_first)) if sizes.pp > 1 else 0
    if sizes.pp > 1 and not options.untied and (part.is_first or part.is_last):
        stages += 4 * options.vocabulary * options.width  # gradient of the tied matrix
    return {"dp": data, "tp": tensor, "pp": float(stages)}


def costs(layout: Layout, ranks: Ranks, parameters: int) -> dict[str, float | None]:
    """Return figures for the result, each the maximum over all ranks; all ranks call it.

    Args:
        layout: the layout after the training.
        ranks: ranks of the training.
        parameters: number of parameters of the whole model.
    """
    sizes, meter = layout.sizes, layout.meter
    idle = layout.clock.idle_share if layout.clock else None
    mine = (dict(meter.sent), meter.peak) if meter else ({}, None)
    every = ranks.gather((*mine, layout.expected, idle))
    peaks = [peak for _, peak, _, _ in every if peak is not None]
    found: dict[str, float | None] = {}
    for dim in ("dp", "tp", "pp"):
        if getattr(sizes, dim) > 1:
            sent = max(one.get(dim, 0.0) for one, _, _, _ in every)
            found[f"sent_bytes_{dim}"] = sent if peaks else None
            found[f"sent_bytes_{dim}_formula"] = max(one[dim] for _, _, one, _ in every)
    found["memory_bytes"] = max(peaks, default=None)
    found["memory_bytes_formula"] = expected_memory(layout.options, sizes, parameters)
    if sizes.pp > 1:
        shares = [share for *_, share in every if share is not None]
        stages = layout.options.micro_batches + sizes.pp - 1
        found["bubble"] = sum(shares) / len(shares) if shares else None
        found["bubble_formula"] = (sizes.pp - 1) / stages
    return found
