"""The methods that communication.py compares: from a rank's gradient to the one that it applies.

| method | what is sent | reference |
|---|---|---|
| allreduce | the gradient, as float32 | |
| fp16, bf16 | the gradient in half precision | |
| powersgd | two thin factors of each matrix, with error feedback | Vogels et al. 2019 |
| int8 | the gradient in 8 bits with one scale, with error feedback | Seide et al. 2014 |
| topk | the largest hundredth of the gradient, with error feedback | Stich et al. 2018 |
| localsgd | the parameters, every eighth step | Stich 2019 |
| stale | the gradient; a third is applied two steps later, and nobody waits | Ho et al. 2013 |
| ps | the gradient to the owners of its parts, who send the parameters | Li et al. 2014 |

`Wire` counts what a rank sends, and the time in which it waits for it. It predicts that time, too:
an all-reduce of m bytes by n ranks takes 2 L log2(n) + 2 m G (n - 1) / n seconds, with the latency
L of a message and the time G of a byte; an all-gather or an exchange has half the latencies.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

TOP = 0.01  # of the gradient that topk sends
RANK_OF_FACTORS = 2  # of powersgd
LOCAL_STEPS = 8  # of localsgd
STALENESS = 2  # steps by which a gradient may be late

T = TypeVar("T")


def synchronize() -> None:
    """Wait for the GPU, if one is in use: the program runs ahead of it."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


class Wire:
    """The collectives, with the bytes that this rank sends and the seconds in which it waits.

    The formulas are those of ring algorithms on n ranks: an all-reduce of P bytes sends
    2 P (n - 1) / n per rank, an all-gather of P bytes per rank P (n - 1), and an exchange of all
    with all P (n - 1) / n.
    """

    def __init__(self) -> None:
        self.ranks = dist.get_world_size() if dist.is_initialized() else 1
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.bytes_sent, self.latencies, self.seconds = 0.0, 0.0, 0.0

    def all_reduce(self, tensor: Tensor, *, wait: bool = True) -> dist.Work | None:
        """Sum a tensor over the ranks, in place; without `wait`, return the work to wait for."""
        self.bytes_sent += 2 * tensor.nbytes * (self.ranks - 1) / self.ranks
        self.latencies += 2 * math.log2(self.ranks)
        return self._timed(lambda: dist.all_reduce(tensor, async_op=not wait), wait=wait)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return the tensors of all ranks, concatenated."""
        self.bytes_sent += tensor.nbytes * (self.ranks - 1)
        self.latencies += math.log2(self.ranks)
        whole = tensor.repeat(self.ranks)
        self._timed(lambda: dist.all_gather(list(whole.chunk(self.ranks)), tensor))
        return whole

    def exchange(self, tensor: Tensor) -> Tensor:
        """Send the i-th part of a tensor to rank i; return the parts that this rank gets."""
        self.bytes_sent += tensor.nbytes * (self.ranks - 1) / self.ranks
        self.latencies += math.log2(self.ranks)
        parts = tensor.clone()
        self._timed(lambda: dist.all_to_all_single(parts, tensor))
        return parts

    def wait(self, work: dist.Work | None) -> None:
        """Wait for an all-reduce that was started before."""
        if work is not None:
            self._timed(work.wait)

    def interface_bytes(self) -> int:
        """Return what this rank's interface has sent, with headers; 0 without one of its own."""
        if "SHAPED_MBIT" not in os.environ:
            return 0
        # Not /sys/class/net: it shows the interfaces of the namespace in which it was mounted.
        with open("/proc/self/net/dev", encoding="ascii") as file:
            (line,) = (line for line in file if line.lstrip().startswith("eth0:"))
        return int(line.partition(":")[2].split()[8])

    def measure_latency(self, device: torch.device) -> float:
        """Return the seconds of a latency, from all-reduces of one number."""
        if self.ranks == 1:
            return 0.0
        number, times = torch.zeros(1, device=device), []
        for _ in range(25):
            synchronize()
            began = time.perf_counter()
            dist.all_reduce(number)
            synchronize()
            times.append(time.perf_counter() - began)
        return median(times[5:]) / (2 * math.log2(self.ranks))  # the first ones connect

    def predict(self, latency_seconds: float, bytes_per_second: float) -> float:
        """Return the seconds of everything that was sent so far, by the model above."""
        return self.latencies * latency_seconds + self.bytes_sent / bytes_per_second

    def _timed(self, call: Callable[[], T], *, wait: bool = True) -> T | None:
        if not dist.is_initialized():  # alone
            return None
        # What the GPU still computes is not communication.
        if wait:
            synchronize()
        began = time.perf_counter()
        answer = call()
        if wait:
            synchronize()
        self.seconds += time.perf_counter() - began
        return answer


@dataclass
class Memory:
    """What the methods keep from step to step."""

    shapes: list[torch.Size]  # of the parameters
    tensors: dict[str, Tensor] = field(default_factory=dict)  # errors, and factors of powersgd
    queue: deque[tuple[Tensor, dist.Work | None]] = field(default_factory=deque)  # of stale


Method = Callable[[Tensor, Wire, Memory], Tensor]

# --- the methods: from this rank's gradient to the one that it applies


def allreduce(gradient: Tensor, wire: Wire, _: Memory) -> Tensor:
    """Average the gradient as it is."""
    wire.all_reduce(gradient)
    return gradient / wire.ranks


def half(kind: torch.dtype) -> Method:
    """Average in half precision; divided before, so that the sum does not overflow."""

    def average(gradient: Tensor, wire: Wire, _: Memory) -> Tensor:
        small = (gradient / wire.ranks).to(kind)
        wire.all_reduce(small)
        return small.float()

    return average


def int8(gradient: Tensor, wire: Wire, memory: Memory) -> Tensor:
    """Send 8 bits of each number; the rounding error is added to the next gradient."""
    wanted = gradient + memory.tensors.get("error", 0)
    # Never 0, or a gradient of zeros would become NaN.
    scale = (wanted.abs().max() / 127).clamp_min(1e-12).reshape(1)
    rounded = (wanted / scale).round().to(torch.int8)
    memory.tensors["error"] = wanted - rounded.float() * scale
    # Not an all-reduce: numbers with different scales cannot be added, and sums do not fit into 8
    # bits.
    scales, numbers = wire.all_gather(scale), wire.all_gather(rounded)
    return (numbers.reshape(wire.ranks, -1).float() * scales[:, None]).mean(0)


def topk(gradient: Tensor, wire: Wire, memory: Memory) -> Tensor:
    """Send the largest numbers and their places; the others are added to the next gradient."""
    wanted = gradient + memory.tensors.get("error", 0)
    places = wanted.abs().topk(max(1, int(TOP * len(wanted)))).indices
    sent = wanted[places]
    # Error feedback: a small entry adds up here until it is large enough to be sent. If it were
    # dropped, its parameter would never be trained.
    memory.tensors["error"] = wanted.index_fill(0, places, 0.0)
    # Each rank has other places, so nothing can be added on the way. 32 bits for a place halve what
    # it costs.
    all_places, all_sent = wire.all_gather(places.int()), wire.all_gather(sent)
    total = torch.zeros_like(gradient).index_add_(0, all_places.long(), all_sent)
    return total / wire.ranks


def powersgd(gradient: Tensor, wire: Wire, memory: Memory) -> Tensor:
    """Approximate each matrix M by P Q^T: one step of power iteration, with the last Q."""
    wanted = gradient + memory.tensors.get("error", 0)
    answer, place = torch.empty_like(wanted), 0
    for number, shape in enumerate(memory.shapes):
        part = wanted[place : place + shape.numel()]
        if len(shape) == 1:  # biases are small
            average = allreduce(part.clone(), wire, memory)
        else:
            matrix, key = part.reshape(shape), f"q{number}"
            random = torch.Generator().manual_seed(number)  # the same on all ranks
            first = torch.randn(shape[1], RANK_OF_FACTORS, generator=random).to(part.device)
            left = allreduce(matrix @ memory.tensors.get(key, first), wire, memory)
            # Averaged before it is made orthonormal: so all ranks project on the same basis, and
            # the second factor may be averaged too.
            left = torch.linalg.qr(left).Q
            memory.tensors[key] = allreduce(matrix.T @ left, wire, memory)
            average = (left @ memory.tensors[key].T).reshape(-1)
        answer[place : place + shape.numel()] = average
        place += shape.numel()
    memory.tensors["error"] = wanted - answer
    return answer


def stale(gradient: Tensor, wire: Wire, memory: Memory) -> Tensor:
    """Start averaging this gradient, and apply the one from STALENESS steps ago.

    It is divided by its age (Zhang et al. 2016): with momentum, old gradients overshoot.
    """
    # From here on the all-reduce writes into this tensor, until `wait` returns.
    memory.queue.append((gradient, wire.all_reduce(gradient, wait=False)))
    if len(memory.queue) <= STALENESS:
        return torch.zeros_like(gradient)
    averaged, work = memory.queue.popleft()
    wire.wait(work)
    return averaged / wire.ranks / (1 + STALENESS)


def own(gradient: Tensor, _: Wire, __: Memory) -> Tensor:
    """Apply this rank's gradient: localsgd averages the parameters instead."""
    return gradient


METHODS: dict[str, Method] = {
    "allreduce": allreduce,
    "fp16": half(torch.float16),
    "bf16": half(torch.bfloat16),
    "powersgd": powersgd,
    "int8": int8,
    "topk": topk,
    "localsgd": own,
    "stale": stale,
    "ps": own,
}
