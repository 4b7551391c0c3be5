"""Methods of communication.py in which parameters differ between ranks or come from a server.

| method | what happens | reference |
|---|---|---|
| localsgd | parameters are averaged every eighth step | Stich 2019 |
| easgd | every eighth step each rank and a centre attract each other | Zhang et al. 2015 |
| gossip | parameters are averaged with one random partner in each step | Jin et al. 2016 |
| ensemble | nothing is sent; the predictions are averaged | Dietterich 2000 |
| ps | a server for each part of the parameters, on all ranks | Li et al. 2014 |
| ps-central | a server for all of them, on rank 0 | |
| ps-tree | a server, and a rank for each group that sums its gradients | Gupta et al. 2016 |
| async | a server that answers each gradient at once | Dean et al. 2012 |
| hogwild | all ranks of a node change the same memory, without locks | Niu et al. 2011 |

A rank with a server also trains.
"""

from __future__ import annotations

import math
import os
import socket
import tempfile
import threading
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from communication_methods import GRADIENTS, allreduce
from communication_wire import Memory, Method, Wire
from hpml_checkpoint import Ranks
from hpml_job import raise_together

EVERY = 8  # steps between two averages of localsgd and easgd
ELASTIC = 0.9  # fraction by which easgd's centre moves to the mean; a rank moves 1/n of it

# --- before the optimizer: from this rank's gradient to the one that it applies


def own(gradient: Tensor, _: Wire, __: Memory) -> Tensor:
    """Apply this rank's gradient."""
    return gradient


def shard(gradient: Tensor, wire: Wire, _: Memory) -> Tensor:
    """Return the average of this rank's part; all parts are equally long, the last is padded."""
    padded = nn.functional.pad(gradient, (0, -len(gradient) % wire.ranks))
    return wire.exchange(padded).reshape(wire.ranks, -1).mean(0)


def gradient_to_server(*, tree: bool) -> Method:
    """Average on rank 0; the others apply nothing, as they will receive the parameters."""

    def average(gradient: Tensor, wire: Wire, _: Memory) -> Tensor:
        for first, *others in _levels(wire, tree=tree):
            if wire.rank == first:
                received = [(rank, torch.zeros_like(gradient)) for rank in others]
                wire.send(gradient, [], received)
                for _rank, one in received:
                    gradient = gradient + one
            else:
                wire.send(gradient, [first], [])
        return gradient / wire.ranks if wire.rank == 0 else torch.zeros_like(gradient)

    return average


def _levels(wire: Wire, *, tree: bool) -> list[list[int]]:
    """Return the groups that contain this rank, from the leaves to the root."""
    every = list(range(wire.ranks))
    if not tree:
        return [every]
    # The ranks of a node form a group; on a single node, sqrt(n) groups of sqrt(n) ranks.
    on_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    size = on_node if 1 < on_node < wire.ranks else math.ceil(math.sqrt(wire.ranks))
    first = wire.rank - wire.rank % size
    levels = [every[first : first + size], every[::size]]
    return [level for level in levels if wire.rank in level]


# --- after the optimizer: from this rank's parameters to those of its next step


def keep(parameters: Tensor, _: Wire, __: Memory) -> Tensor:
    """Return the parameters unchanged."""
    return parameters


def whole(part: Tensor, wire: Wire, _: Memory) -> Tensor:
    """Return all parts, concatenated."""
    return wire.all_gather(part)


def parameters_of_server(*, tree: bool) -> Method:
    """Return the parameters of rank 0."""

    def get(parameters: Tensor, wire: Wire, _: Memory) -> Tensor:
        for first, *others in reversed(_levels(wire, tree=tree)):
            if wire.rank == first:
                wire.send(parameters, others, [])
            else:
                parameters = torch.zeros_like(parameters)
                wire.send(parameters, [], [(first, parameters)])
        return parameters

    return get


def local(parameters: Tensor, wire: Wire, memory: Memory) -> Tensor:
    """Average every few steps."""
    if memory.step % EVERY:
        return parameters
    return allreduce(parameters.clone(), wire, memory)


def elastic(parameters: Tensor, wire: Wire, memory: Memory) -> Tensor:
    """Move towards the centre every few steps, and the centre towards the mean of all ranks.

    All ranks have the same centre, which is evaluated.
    """
    centre = memory.tensors["centre"]
    if memory.step % EVERY:
        return parameters
    mean = allreduce(parameters.clone(), wire, memory)
    memory.tensors["centre"] = (1 - ELASTIC) * centre + ELASTIC * mean
    return parameters - ELASTIC / wire.ranks * (parameters - centre)


def gossip(parameters: Tensor, wire: Wire, memory: Memory) -> Tensor:
    """Average with a partner; with an odd number of ranks, one has none."""
    random = torch.Generator().manual_seed(1_000_000 * memory.seed + memory.step)
    order = torch.randperm(wire.ranks, generator=random).tolist()  # the same on all ranks
    place = order.index(wire.rank) ^ 1
    if place >= wire.ranks:
        return parameters
    return (parameters + wire.swap(parameters, order[place], len(parameters))) / 2


METHODS: dict[str, tuple[Method, Method]] = {
    **{name: (method, keep) for name, method in GRADIENTS.items()},
    "localsgd": (own, local),
    "easgd": (own, elastic),
    "gossip": (own, gossip),
    "ensemble": (own, keep),
    "ps": (shard, whole),
    "ps-central": (gradient_to_server(tree=False), parameters_of_server(tree=False)),
    "ps-tree": (gradient_to_server(tree=True), parameters_of_server(tree=True)),
}

# --- asynchronous: ranks do not take steps together


class ParameterServer:
    """Parameters on rank 0, with one thread per other rank that applies its gradients.

    A gradient is answered with the newest parameters. Its staleness is the number of updates since
    its parameters were sent; it is divided by that number plus 1 (Zhang et al. 2016).
    """

    def __init__(
        self, parameters: nn.Parameter, optimizer: Optimizer, wire: Wire, late: list[float]
    ) -> None:
        """Start the threads.

        Args:
            parameters: parameters that rank 0's optimizer updates.
            optimizer: optimizer of these parameters.
            wire: counts what is sent.
            late: number of updates, sum and maximum of their staleness; counted on rank 0.
        """
        self._parameters, self._optimizer, self._wire, self._late = (
            *(parameters, optimizer, wire, late),
        )
        self._updates, self._seen, self._lock = 0, 0, threading.Lock()
        self._group = dist.new_group(backend="gloo")  # threads send from the host
        others = range(1, wire.ranks) if wire.rank == 0 else ()
        self._threads = [
            threading.Thread(target=self._serve, args=(rank,), daemon=True) for rank in others
        ]
        for thread in self._threads:
            thread.start()

    def apply(self, gradient: Tensor) -> Tensor:
        """Apply this rank's gradient; return the newest parameters."""
        if self._wire.rank == 0:
            vector, self._seen = self._update(gradient, self._seen)
            return vector
        message = _with_number(self._seen, gradient)
        began = time.perf_counter()
        dist.send(message, 0, self._group)
        dist.recv(message, 0, self._group)
        self._wire.count(message.nbytes, 2, 2 * message.nbytes)  # message and answer
        self._wire.seconds += time.perf_counter() - began
        self._seen = int(message[:2].view(torch.int64))
        return message[2:].to(gradient.device)

    def newest(self) -> Tensor:
        """Return the server's parameters while no rank is sending."""
        vector = self._parameters.detach().clone()
        dist.broadcast(vector, 0)
        return vector

    def end(self) -> None:
        """End the threads; all ranks call it."""
        if self._wire.rank:
            dist.send(_with_number(-1, self._parameters.detach()), 0, self._group)
        for thread in self._threads:
            thread.join()

    def _serve(self, worker: int) -> None:
        message = _with_number(0, self._parameters.detach())
        while True:
            dist.recv(message, worker, self._group)
            seen = int(message[:2].view(torch.int64))
            if seen < 0:
                return
            vector, updates = self._update(message[2:].to(self._parameters.device), seen)
            dist.send(_with_number(updates, vector), worker, self._group)
            with self._lock:  # the latencies of all workers overlap
                both = 2 * message.nbytes
                self._wire.count(message.nbytes, 2 / len(self._threads), both)

    def _update(self, gradient: Tensor, seen: int) -> tuple[Tensor, int]:
        with self._lock:
            staleness = self._updates - seen
            self._late[0] += 1
            self._late[1] += staleness
            self._late[2] = max(self._late[2], staleness)
            self._parameters.grad = gradient / (1 + staleness)
            self._optimizer.step()
            self._updates += 1
            return self._parameters.detach().clone(), self._updates


def _with_number(number: int, vector: Tensor) -> Tensor:
    return torch.cat([torch.tensor([number]).view(torch.float32), vector.cpu()])


class SharedMemory:
    """Parameters in shared memory of a node, to which all ranks add their updates without a lock.

    An update may be lost if two ranks write the same number at the same time. Each rank has its
    own momentum, and its updates are 1/n of those of a single rank.
    """

    def __init__(self, parameters: nn.Parameter, optimizer: Optimizer, wire: Wire) -> None:
        """Share rank 0's parameters; raises JobError on all ranks if they are on several nodes."""
        self._parameters, self._optimizer, self._ranks = parameters, optimizer, wire.ranks
        ranks, name, problem = Ranks(), "", ""
        nodes = sorted(set(ranks.gather(socket.gethostname())))
        if len(nodes) > 1:
            problem = f"needs all ranks on one node, but they are on {', '.join(nodes)}"
        raise_together(ranks, problem and f"--method hogwild: {problem}")
        vector = parameters.detach().cpu()
        try:
            if wire.rank == 0:
                file, name = tempfile.mkstemp(prefix="hogwild-", dir="/dev/shm")
                with os.fdopen(file, "wb") as stream:
                    stream.write(vector.numpy().tobytes())
        except OSError as error:
            problem = str(error)
        raise_together(ranks, problem and f"--method hogwild: {problem}")
        name = ranks.gather(name)[0]
        try:
            self._shared = torch.from_file(name, shared=True, size=len(vector))
        except RuntimeError:
            problem = f"rank {wire.rank} does not see {name}: do ranks run in own containers?"
        ranks.gather(None)
        if wire.rank == 0:
            os.unlink(name)  # leaves nothing behind, however the ranks end
        raise_together(ranks, problem and f"--method hogwild: {problem}")

    def apply(self, gradient: Tensor) -> Tensor:
        """Add this rank's update; return the parameters, which others modify meanwhile."""
        before = self._parameters.detach().clone()
        self._parameters.grad = gradient / self._ranks
        self._optimizer.step()
        self._shared += (self._parameters.detach() - before).cpu()
        self._parameters.data.copy_(self._shared)
        return self._parameters.detach().clone()

    def newest(self) -> Tensor:
        """Return the parameters."""
        return self._shared.to(self._parameters.device, copy=True)

    def end(self) -> None:
        """Do nothing: the memory is freed when the last rank has ended."""


ASYNCHRONOUS = ("async", "hogwild")
FREE = (*ASYNCHRONOUS, "ensemble")  # ranks synchronize only at evaluations and checkpoints
