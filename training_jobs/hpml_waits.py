"""Measure how long a rank waits for slower ones; copy this file next to your script.

    model = DistributedDataParallel(model)
    measure_waits(model, channel)  # channel: see hpml_channel.py; before the first step, all ranks

DistributedDataParallel hides a slow rank: the backward pass takes equally long on all ranks. The
slow rank is the one that waits LEAST before gradients are averaged. In a few steps, the same on all
ranks, this synchronizes the ranks before each bucket of gradients and times that: the counter
`wait_seconds`. Then it times the averaging without the waiting: `comm_seconds`. So it detects a
rank that is slow in reading, in forward or in backward. The training's results stay bit-identical.
The sizes of the buckets let `hpml report` predict the time of the averaging.

Without DistributedDataParallel, call `step` once in each step, and `meet` when the gradients are
ready, before your program averages them:

    waits = Waits(channel, device=device)
    for inputs, labels in loader:
        waits.step()
        with waits.timed("transfer_seconds"):
            inputs, labels = inputs.to(device), labels.to(device)
        ...
        waits.meet()

It measures every tenth to every thousandth step, so that measuring costs a thousandth of the time;
the first sixty measurements come sooner, because short trainings have few steps. Until the next
measurement, each step counts the median of the last three. `measured_steps` counts measurements,
and `slowest_steps` those in which this rank waited least: of equal ranks, each is sometimes
slowest.
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
    Hook = Callable[..., Averaged]  # takes the state and a bucket of gradients

__all__ = ["Waits", "measure_waits", "settle_buckets"]

METHOD = "ddp-comm-hook, sampled"
COST = 0.001  # fraction of the time that measuring may take, excluding the hook's calls
FIRST, LEAST, MOST = 5, 10, 1000  # first measured step; least and most steps to the next
ENOUGH, PART = 60, 16  # the first sixty come after a sixteenth of the steps so far


class Waits:
    """Measures parts of a few steps, the same ones on all ranks.

    Args:
        channel: see hpml_channel.py.
        device: device that computes; timing waits for its work before and after.
        group: ranks that synchronize; default: all.
        highest: returns the maxima over all ranks; default: with torch.distributed.

    Attributes:
        is_measured: whether this step is measured.
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
        # The slowest rank determines the number of steps between measurements, with random jitter:
        # otherwise something that happens every 100 steps could happen in every measured step, or
        # in none. All ranks have the same seed, because they must measure the same steps: a
        # measuring rank waits for the others.
        self._wanted, self._random, self._jitter = float(LEAST), random.Random(1), 1.0
        self._latency = self._spent = 0.0  # of a measured step
        self._durations: deque[float] = deque(maxlen=99)  # of steps that were not measured
        self._costs: deque[float] = deque(maxlen=3)
        self._seconds: defaultdict[str, float] = defaultdict(float)  # of a measured step
        self._sizes: list[int] = []  # sizes of its buckets
        # This rank's wait in the last measured step. The ranks compare it when they meet in the
        # next one, which costs nothing.
        self._waited: float | None = None
        self._least = 0.0
        # Medians, because rare events (rank 0 writes a file) must not stand for 1,000 steps.
        self._last: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=3))

    def step(self) -> None:
        """Start a step; all ranks must call it equally often."""
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
        """Wait until all ranks are here; in a measured step, count `wait_seconds`."""
        if self.is_measured:
            waited = self._meet()
            if not self._latency:
                self._latency = self._meet()  # all are here: this is the cost of meeting
            self._seconds["wait_seconds"] += max(0.0, waited - self._latency)
            self._spent += self._latency

    @contextmanager
    def timed(self, counter: str) -> Iterator[None]:
        """Count the seconds of a `with` block in a measured step."""
        if not self.is_measured:
            yield
            return
        self._synchronize()
        began = time.perf_counter()
        yield
        self._synchronize()
        self._seconds[counter] += time.perf_counter() - began

    def average(self, hook: Hook, state: object, bucket: GradBucket) -> Averaged:
        """Average a bucket of gradients; time it in a measured step."""
        # DDP has no hook for a step; its first bucket marks a new one.
        if bucket.index() == 0:
            self.step()
        if not self.is_measured:
            return hook(state, bucket)
        self.meet()
        self._sizes.append(bucket.buffer().nbytes)
        with self.timed("comm_seconds"):
            future = hook(state, bucket)
            # Here, not in DDP later: time the whole transfer, not only its start.
            future.wait()
        if bucket.is_last():
            if hook is _average:  # other hooks may send fewer bytes
                sizes = self._sizes
                self._channel.gauge(gradient_bytes=sum(sizes), gradient_buckets=len(sizes))
            self._sizes = []
        return future

    def _meet(self) -> float:
        """Meet the other ranks and agree on the next measurement; return the seconds of waiting."""
        self._synchronize()
        began = time.perf_counter()
        # Negated, because the ranks only exchange maxima: the maximum is then the least wait.
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
        # Sooner at first: otherwise only ten of 256 short steps were measured, and the waits of
        # equal ranks differed by a third, so that reports named one of them as slow.
        soon = self._steps / PART if self._count < ENOUGH else float(self._steps)
        gap = min(steps, soon) * self._jitter
        self._due = self._steps + max(1, round(gap))

    def _finish(self, duration: float) -> None:
        for name, seconds in self._seconds.items():
            self._last[name].append(seconds)
        if self._durations:
            usual = median(self._durations)
            comm = self._seconds.get("comm_seconds", 0.0)  # otherwise it overlaps with backward
            self._costs.append(max(self._spent + self._latency + comm, duration - usual))
            wanted = median(self._costs) / (COST * usual)
            self._wanted = min(max(wanted, LEAST), MOST)
        if self._waited is not None:
            is_slowest = float(self._waited <= self._least)
            self._channel.count(measured_steps=1, slowest_steps=is_slowest)
        self._waited = None
        if "wait_seconds" in self._seconds:
            waited = self._seconds["wait_seconds"] + self._seconds.get("comm_seconds", 0.0)
            self._waited = float(torch.tensor(waited))  # rounded, as the others receive it
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
        model: a model without a communication hook.
        channel: see hpml_channel.py.
        hook: the communication hook to use, such as `bf16_compress_hook`.
        state: state of the hook.
    """
    waits = Waits(channel, device=next(model.parameters()).device, group=model.process_group)

    if hook is None:
        hook, state = _average, model.process_group
    channel.gauge(comm_method=METHOD)
    model.register_comm_hook(None, lambda _, bucket: waits.average(hook, state, bucket))
    return waits


def settle_buckets(model: DistributedDataParallel, *inputs: torch.Tensor) -> None:
    """Make DistributedDataParallel regroup gradients now, not after its first backward pass.

    Otherwise the first step after a restart adds them in another order than the same step of an
    uninterrupted run, and with more than two ranks the sums differ in the last bits. Call it
    before the first step, on all ranks; weights, gradients and statistics do not change.

    Args:
        model: returns one tensor.
        inputs: inputs of the usual shapes; their values do not matter.
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
