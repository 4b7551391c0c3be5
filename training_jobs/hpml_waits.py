"""Measure how long a rank waits for slower ones; copy this file next to your script.

    model = DistributedDataParallel(model)
    measure_waits(model, channel)  # of hpml_channel.py; before the first step, on all ranks

DistributedDataParallel hides a slow rank: the backward pass takes all ranks equally long. The slow
one is the rank that waits LEAST before gradients are averaged. On few steps, the same on all ranks,
this has them meet before each bucket of gradients, and times that: the counter `wait_seconds`. Then
it times the averaging: `comm_seconds`, without the waiting. So it sees a rank that is slow in
reading, in forward or in backward. The training's results stay the same to the bit. The sizes of
the buckets let `hpml report` predict their averaging.

Without DistributedDataParallel call `step` once in each step, and `meet` where the gradients are
ready, before your program averages them:

    waits = Waits(channel, device=device)
    for inputs, labels in loader:
        waits.step()
        with waits.timed("transfer_seconds"):
            inputs, labels = inputs.to(device), labels.to(device)
        ...
        waits.meet()

It measures every tenth to every thousandth step, by what that costs: a thousandth of the time; the
first sixty come sooner, since short trainings have few steps. Each step until the next measurement
counts the median of the last three. `measured_steps` counts them, and `slowest_steps` those where
this rank waited least: of equal ranks each is the slowest now and then.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket

    from hpml_channel import Channel

    Averaged = torch.futures.Future[torch.Tensor]
    Hook = Callable[..., Averaged]  # gets the state and a bucket of gradients

__all__ = ["Waits", "measure_waits", "settle_buckets"]

METHOD = "ddp-comm-hook, sampled"
COST = 0.001  # the part of the time that measuring may take, without the calls of the hook
FIRST, LEAST, MOST = 5, 10, 1000  # the first step to measure; how many steps from one to the next
ENOUGH, PART = 60, 16  # the first sixty: to the next is a sixteenth of the steps so far


class Waits:
    """Measures parts of a few steps, the same ones on all ranks.

    Args:
        channel: of hpml_channel.py.
        device: that computes; its work is waited for before and after what is timed.
        group: the ranks that meet; default: all.
        highest: returns the highest of all ranks' values; default: with torch.distributed.

    Attributes:
        is_measured: whether this step is.
    """

    def __init__(
        self,
        channel: Channel,
        *,
        device: torch.device | str = "cpu",
        group: dist.ProcessGroup | None = None,
        highest: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self.is_measured = False
        self._channel, self._device, self._group = channel, torch.device(device), group
        self._highest = highest or self._highest_of_group
        self._steps, self._count, self._due, self._began = 0, 0, FIRST, 0.0
        # Between measured steps are as many others as the slowest rank wants, more or less: else
        # something that happens every 100 steps could happen in each measured one, or in none.
        # Seeded alike on all ranks: they must measure the same steps, since a rank that measures
        # waits for the others to meet it.
        self._wanted, self._random, self._jitter = float(LEAST), random.Random(1), 1.0
        self._latency = self._spent = 0.0  # of a measured step
        self._durations: deque[float] = deque(maxlen=99)  # of steps that were not measured
        self._costs: deque[float] = deque(maxlen=3)
        self._seconds: defaultdict[str, float] = defaultdict(float)  # of a measured step
        self._sizes: list[int] = []  # of its buckets
        # What this rank waited in the last measured step, and the least of all ranks: they compare
        # it when they meet in the next one, which costs nothing.
        self._waited: float | None = None
        self._least = 0.0
        # Medians, because what is rare (rank 0 writes a file) must not stand for 1,000 steps.
        self._last: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=3))

    def step(self) -> None:
        """Begin a step; all ranks call it equally often."""
        now, began = time.perf_counter(), self._began
        if self.is_measured:
            self._finish(now - began)
        elif began:
            self._durations.append(now - began)
        if self._last:
            self._channel.count(**{name: median(last) for name, last in self._last.items()})
        self._steps, self._began = self._steps + 1, now
        self.is_measured = self._steps >= self._due
        if self.is_measured:
            self._count += 1
            self._jitter = self._random.uniform(0.5, 1.5)
            self._measure_next_after(self._wanted)

    def meet(self) -> None:
        """Wait until all ranks are here and, in a step that is measured, count `wait_seconds`."""
        if self.is_measured:
            waited = self._meet()
            if not self._latency:
                self._latency = self._meet()  # all are here: this is what a meeting itself takes
            self._seconds["wait_seconds"] += max(0.0, waited - self._latency)
            self._spent += self._latency

    @contextmanager
    def timed(self, counter: str) -> Iterator[None]:
        """Count the seconds of a `with` block, in a step that is measured."""
        if not self.is_measured:
            yield
            return
        self._synchronize()
        began = time.perf_counter()
        yield
        self._synchronize()
        self._seconds[counter] += time.perf_counter() - began

    def average(self, hook: Hook, state: object, bucket: GradBucket) -> Averaged:
        """Average a bucket of gradients, and measure it if this step is measured."""
        # DDP has no hook for a step; its first bucket is the sign of one.
        if bucket.index() == 0:
            self.step()
        if not self.is_measured:
            return hook(state, bucket)
        self.meet()
        self._sizes.append(bucket.buffer().nbytes)
        with self.timed("comm_seconds"):
            future = hook(state, bucket)
            # Here, not in DDP later: the time is to be that of the transfer, not of its start.
            future.wait()
        if bucket.is_last():
            if hook is _average:  # another one may send fewer bytes
                sizes = self._sizes
                self._channel.gauge(gradient_bytes=sum(sizes), gradient_buckets=len(sizes))
            self._sizes = []
        return future

    def _meet(self) -> float:
        """Meet the other ranks, and agree when to do so again; return the seconds of waiting."""
        self._synchronize()
        began = time.perf_counter()
        # Negated, as the ranks exchange maxima only: the highest of these is the least wait.
        said = [self._wanted, -(self._waited or 0.0)]
        wanted, least = self._highest(torch.tensor(said, device=self._device)).tolist()
        self._least = -least
        self._measure_next_after(wanted)
        return time.perf_counter() - began

    def _highest_of_group(self, value: torch.Tensor) -> torch.Tensor:
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(value, dist.ReduceOp.MAX, group=self._group)
        return value

    def _measure_next_after(self, steps: float) -> None:
        # Sooner at first: otherwise ten of 256 short steps were measured, and the waits of equal
        # ranks differed by a third, so that reports named one of them as slow.
        soon = self._steps / PART if self._count < ENOUGH else float(self._steps)
        gap = min(steps, soon) * self._jitter
        self._due = self._steps + max(1, round(gap))

    def _finish(self, duration: float) -> None:
        for name, seconds in self._seconds.items():
            self._last[name].append(seconds)
        if self._durations:
            usual = median(self._durations)
            comm = self._seconds.get("comm_seconds", 0.0)  # else it is hidden behind backward
            self._costs.append(max(self._spent + self._latency + comm, duration - usual))
            wanted = median(self._costs) / (COST * usual)
            self._wanted = min(max(wanted, LEAST), MOST)
        if self._waited is not None:
            is_slowest = float(self._waited <= self._least)
            self._channel.count(measured_steps=1, slowest_steps=is_slowest)
        self._waited = None
        if "wait_seconds" in self._seconds:
            waited = self._seconds["wait_seconds"] + self._seconds.get("comm_seconds", 0.0)
            self._waited = float(torch.tensor(waited))  # rounded, as the others get it
        self._seconds.clear()
        self._latency = self._spent = 0.0

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def measure_waits(
    model: DistributedDataParallel,
    channel: Channel,
    *,
    hook: Hook | None = None,
    state: object = None,
) -> Waits:
    """Measure how long this rank waits for others whenever gradients are averaged.

    Args:
        model: to which no communication hook was added.
        channel: of hpml_channel.py.
        hook: the communication hook to use, such as `bf16_compress_hook`, and its state.
        state: of the hook.
    """
    waits = Waits(channel, device=next(model.parameters()).device, group=model.process_group)

    if hook is None:
        hook, state = _average, model.process_group
    channel.gauge(comm_method=METHOD)
    model.register_comm_hook(None, lambda _, bucket: waits.average(hook, state, bucket))
    return waits


def settle_buckets(model: DistributedDataParallel, *inputs: torch.Tensor) -> None:
    """Have DistributedDataParallel group gradients now as it would after its first backward pass.

    Else the first step after a restart adds them in another order than the same step of a run that
    was never interrupted, and with more than two ranks their sums differ in the last bits. Call it
    before the first step, on all ranks; weights, gradients and statistics stay.

    Args:
        model: returns one tensor.
        inputs: of its usual shapes; their values do not matter.
    """
    was_training = model.training
    model.eval()
    model(*inputs).sum().backward()
    model.zero_grad()
    model.train(was_training)


def _average(group: dist.ProcessGroup, bucket: GradBucket) -> Averaged:
    gradients = bucket.buffer().mul_(1 / group.size())
    work = dist.all_reduce(gradients, group=group, async_op=True)
    averaged: Averaged = work.get_future().then(lambda future: future.value()[0])
    return averaged
