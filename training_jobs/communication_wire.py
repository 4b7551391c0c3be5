"""How communication.py's methods send: collectives and messages that are counted and timed.

`Wire` counts what a rank sends, and how long it waits for it. It also predicts that time: an
all-reduce of m bytes by n ranks takes 2 L log2(n) + 2 m G (n - 1) / n seconds, with the latency
L of a message and the time G per byte; an all-gather or an exchange has half the latencies. A
message takes L + m G. A rank that sends to several ranks, or receives from them, does so one byte
after another: so a central server of n ranks takes 2 L + 2 (n - 1) m G per step.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


def synchronize() -> None:
    """Wait for the GPU, if one is in use: the program runs ahead of it."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


class Wire:
    """The collectives, with the bytes that this rank sends and the seconds that it waits.

    The formulas are those of ring algorithms on n ranks: per rank, an all-reduce of P bytes sends
    2 P (n - 1) / n, an all-gather of P bytes per rank P (n - 1), and an exchange of all with all
    P (n - 1) / n.

    Attributes:
        bytes_sent: bytes sent by this rank.
        busy_bytes: bytes that occupy its link: the larger direction of each transfer.
        latencies: sequential latencies that it waited for.
        seconds: time that it waited.
    """

    def __init__(self) -> None:
        self.ranks = dist.get_world_size() if dist.is_initialized() else 1
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.bytes_sent, self.busy_bytes, self.latencies, self.seconds = 0.0, 0.0, 0.0, 0.0

    def all_reduce(self, tensor: Tensor, *, wait: bool = True) -> dist.Work | None:
        """Sum a tensor over the ranks, in place; without `wait`, return the work to wait for."""
        self.count(2 * tensor.nbytes * (self.ranks - 1) / self.ranks, 2 * math.log2(self.ranks))
        return self._timed(lambda: dist.all_reduce(tensor, async_op=not wait), wait=wait)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return the tensors of all ranks, concatenated."""
        self.count(tensor.nbytes * (self.ranks - 1), math.log2(self.ranks))
        whole = tensor.repeat(self.ranks)
        self._timed(lambda: dist.all_gather(list(whole.chunk(self.ranks)), tensor))
        return whole

    def exchange(self, tensor: Tensor) -> Tensor:
        """Send the i-th part of a tensor to rank i; return the parts that this rank receives."""
        self.count(tensor.nbytes * (self.ranks - 1) / self.ranks, math.log2(self.ranks))
        parts = tensor.clone()
        self._timed(lambda: dist.all_to_all_single(parts, tensor))
        return parts

    def send(self, sent: Tensor, to: Sequence[int], received: Sequence[tuple[int, Tensor]]) -> None:
        """Send a tensor to some ranks, and at the same time receive tensors from others.

        Args:
            sent: the tensor for all of them.
            to: ranks.
            received: rank and tensor to fill; must have the size that the rank sends.
        """
        if not to and not received:
            return
        self.count(sent.nbytes * len(to), 1, sum(one.nbytes for _, one in received))
        # Gloo can only send from host memory.
        place = torch.device("cpu") if dist.get_backend() == "gloo" else sent.device
        message, filled = sent.to(place), [(peer, one.to(place)) for peer, one in received]
        calls = [dist.P2POp(dist.isend, message, peer) for peer in to]
        calls += [dist.P2POp(dist.irecv, one, peer) for peer, one in filled]
        self._timed(lambda: [work.wait() for work in dist.batch_isend_irecv(calls)])
        for (_, one), (_, new) in zip(received, filled):  # noqa: B905 - Python 3.9
            one.copy_(new)

    def swap(self, sent: Tensor, partner: int, length: int | None = None) -> Tensor:
        """Send a tensor to a partner that does the same; return what it sent.

        Args:
            sent: one-dimensional.
            partner: rank.
            length: length of what it sends; None if unknown: then lengths are exchanged first.
        """
        if length is None:
            mine, theirs = torch.tensor([len(sent)], dtype=torch.int32), torch.zeros(1).int()
            theirs = theirs.to(sent.device)
            self.send(mine.to(sent.device), [partner], [(partner, theirs)])
            length = int(theirs)
        answer = sent.new_zeros(length)
        self.send(sent, [partner] * bool(len(sent)), [(partner, answer)] * bool(length))
        return answer

    def meet(self) -> None:
        """Wait for all ranks."""
        self._timed(dist.barrier)

    def wait(self, work: dist.Work | None) -> None:
        """Wait for an all-reduce that was started earlier."""
        if work is not None:
            self._timed(work.wait)

    def count(self, sent: float, latencies: float, received: float = 0.0) -> None:
        """Add bytes, and sequential latencies."""
        self.bytes_sent += sent
        self.busy_bytes += max(sent, received)
        self.latencies += latencies

    def interface_bytes(self) -> int:
        """Return what this rank's own interface has sent, including headers; 0 without one."""
        if "SHAPED_MBIT" not in os.environ:
            return 0
        # Not /sys/class/net, which shows the namespace in which it was mounted.
        with open("/proc/self/net/dev", encoding="ascii") as file:
            (line,) = (line for line in file if line.lstrip().startswith("eth0:"))
        return int(line.partition(":")[2].split()[8])

    def measure_latency(self, device: torch.device) -> float:
        """Return the seconds of one latency, measured with all-reduces of a single number."""
        if self.ranks == 1:
            return 0.0
        number, times = torch.zeros(1, device=device), []
        for _ in range(25):
            synchronize()
            began = time.perf_counter()
            dist.all_reduce(number)
            synchronize()
            times.append(time.perf_counter() - began)
        return median(times[5:]) / (2 * math.log2(self.ranks))  # skip the first ones, which connect

    def predict(self, latency_seconds: float, bytes_per_second: float) -> float:
        """Return the predicted seconds of everything sent so far, by the model above."""
        return self.latencies * latency_seconds + self.busy_bytes / bytes_per_second

    def _timed(self, call: Callable[[], T], *, wait: bool = True) -> T | None:
        if not dist.is_initialized():  # a single process
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
    """State that methods keep between steps, and their settings."""

    shapes: list[torch.Size]  # shapes of the parameters
    seed: int = 1
    staleness: int = 2  # delay of `stale`'s gradients in steps
    rounding: str = "nearest"  # rounding of int8, or "stochastic"
    step: int = 0  # starts at 1
    tensors: dict[str, Tensor] = field(default_factory=dict)  # errors, and powersgd's factors
    queue: deque[tuple[Tensor, dist.Work | None]] = field(default_factory=deque)  # for stale

    def sizes(self) -> list[int]:
        """Return the numbers of weights and biases of each layer."""
        return [shape.numel() for shape in self.shapes]


Method = Callable[[Tensor, Wire, Memory], Tensor]
