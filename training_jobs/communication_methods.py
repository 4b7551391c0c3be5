"""Methods of communication.py that turn a rank's gradient into the one that it applies.

| method | what is sent | reference |
|---|---|---|
| allreduce | the gradient, as float32 | |
| fp16, bf16 | the gradient in half precision | |
| powersgd | two thin factors of each matrix, with error feedback | Vogels et al. 2019 |
| int8 | the gradient in 8 bits with one scale, with error feedback | Dettmers 2016 |
| ternary | -1, 0 or 1 at random, and a scale for each layer | Wen et al. 2017 (TernGrad) |
| onebit | signs and two means for each row, with error feedback | Seide et al. 2014 |
| topk | the largest hundredth of the gradient, with error feedback | Stich et al. 2018 |
| sparse | the same entries, summed along the way | Renggli et al. 2019 (SparCML) |
| stale | the gradient; it is applied some steps later without waiting | Ho et al. 2013 |

Methods that exchange parameters are in communication_async.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from communication_wire import Memory, Method, Wire

TOP = 0.01  # fraction of the gradient that topk and sparse send
RANK_OF_FACTORS = 2  # rank of powersgd's factors
CLIP = 2.5  # ternary clips at this many standard deviations of a layer's gradient

# --- the methods: from this rank's gradient to the one that it applies


def allreduce(gradient: Tensor, wire: Wire, _: Memory) -> Tensor:
    """Average the gradient unchanged."""
    wire.all_reduce(gradient)
    return gradient / wire.ranks


def half(kind: torch.dtype) -> Method:
    """Average in half precision; divide first, so that the sum does not overflow."""

    def average(gradient: Tensor, wire: Wire, _: Memory) -> Tensor:
        small = (gradient / wire.ranks).to(kind)
        wire.all_reduce(small)
        return small.float()

    return average


def int8(gradient: Tensor, wire: Wire, memory: Memory) -> Tensor:
    """Send 8 bits per number; the rounding error is added to the next gradient.

    Stochastic rounding is correct on average: it needs no error feedback, and no memory for it.
    """
    wanted = gradient + memory.tensors.get("error", 0)
    # Never 0, or a gradient of zeros would become NaN.
    scale = (wanted.abs().max() / 127).clamp_min(1e-12).reshape(1)
    if memory.rounding == "stochastic":
        rounded = (wanted / scale + torch.rand_like(wanted)).floor().clamp(-127, 127).to(torch.int8)
    else:
        rounded = (wanted / scale).round().to(torch.int8)
        memory.tensors["error"] = wanted - rounded.float() * scale
    # Not an all-reduce: numbers with different scales cannot be added, and sums do not fit into
    # 8 bits.
    scales, numbers = wire.all_gather(scale), wire.all_gather(rounded)
    return (numbers.reshape(wire.ranks, -1).float() * scales[:, None]).mean(0)


def pack(numbers: Tensor, bits: int) -> Tensor:
    """Pack small numbers into bytes, 8 / bits per byte."""
    per_byte = 8 // bits
    padded = nn.functional.pad(numbers.to(torch.uint8), (0, -len(numbers) % per_byte))
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=numbers.device)
    return (padded.reshape(-1, per_byte) << shifts).sum(1, dtype=torch.uint8)


def unpack(packed: Tensor, bits: int, length: int) -> Tensor:
    """Return the numbers that `pack` packed."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    numbers: Tensor = (packed[:, None] >> shifts) & (2**bits - 1)
    return numbers.reshape(-1)[:length]


def onebit(gradient: Tensor, wire: Wire, memory: Memory) -> Tensor:
    """Send the signs, and for each matrix row the means of its positive and negative entries."""
    wanted = gradient + memory.tensors.get("error", 0)
    # A row holds the weights of one neuron: neurons differ too much for one mean. Biases are a row.
    lengths = [
        length
        for shape in memory.shapes
        for length in ([shape[1]] * shape[0] if len(shape) > 1 else [shape[0]])
    ]
    row = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).to(wanted.device)
    signs = wanted >= 0
    group, rows = 2 * row + signs, 2 * len(lengths)
    sums = torch.zeros(rows, device=wanted.device).index_add_(0, group, wanted)
    means = sums / group.bincount(minlength=rows).clamp_min(1)

    def values(signs: Tensor, means: Tensor) -> Tensor:
        return means[2 * row + signs]

    memory.tensors["error"] = wanted - values(signs, means)
    return _average(pack(signs, 1), 1, means, values, wire, len(gradient))


def ternary(gradient: Tensor, wire: Wire, memory: Memory) -> Tensor:
    """Send s, 0 or -s, with s the largest entry of the layer, such that the mean is right.

    Outliers are clipped first; otherwise s would be large and nearly all entries 0.
    """
    sizes = memory.sizes()
    parts = [
        part.clamp(-limit, limit)
        for part in gradient.split(sizes)
        for limit in [CLIP * float(part.std())]
    ]
    scales = torch.stack([part.abs().max() for part in parts]).clamp_min(1e-12)

    def values(numbers: Tensor, scales: Tensor) -> Tensor:
        return (numbers.float() - 1) * scales.repeat_interleave(torch.tensor(sizes))

    wanted = torch.cat(parts) / scales.repeat_interleave(torch.tensor(sizes))
    numbers = (torch.rand_like(wanted) < wanted.abs()) * wanted.sign() + 1
    return _average(pack(numbers, 2), 2, scales, values, wire, len(gradient))


def _average(
    packed: Tensor,
    bits: int,
    scales: Tensor,
    values: Callable[[Tensor, Tensor], Tensor],
    wire: Wire,
    length: int,
) -> Tensor:
    all_packed = wire.all_gather(packed).chunk(wire.ranks)
    all_scales = wire.all_gather(scales).chunk(wire.ranks)
    total = torch.zeros(length, device=packed.device)
    for one, scale in zip(all_packed, all_scales):  # noqa: B905 - Python 3.9
        total += values(unpack(one, bits, length), scale)
    return total / wire.ranks


def _choose(gradient: Tensor, memory: Memory) -> tuple[Tensor, Tensor]:
    """Return the places and values of the largest numbers, and keep the others for later."""
    wanted = gradient + memory.tensors.get("error", 0)
    places = wanted.abs().topk(max(1, int(TOP * len(wanted)))).indices
    # Error feedback: a small entry accumulates here until it is large enough to be sent. Without
    # it, its parameter would never be trained.
    memory.tensors["error"] = wanted.index_fill(0, places, 0.0)
    return places, wanted[places]


def topk(gradient: Tensor, wire: Wire, memory: Memory) -> Tensor:
    """Send the largest numbers and their places; the others are added to the next gradient."""
    places, sent = _choose(gradient, memory)
    # Ranks choose different places, so gather all of them. 32-bit places halve their cost.
    all_places, all_sent = wire.all_gather(places.int()), wire.all_gather(sent)
    total = torch.zeros_like(gradient).index_add_(0, all_places.long(), all_sent)
    return total / wire.ranks


def sparse(gradient: Tensor, wire: Wire, memory: Memory) -> Tensor:
    """Sum the largest numbers along the way: places that several ranks chose are sent once."""
    places, sent = _choose(gradient, memory)
    return sparse_sum(torch.zeros_like(gradient).index_copy_(0, places, sent), wire) / wire.ranks


def sparse_sum(total: Tensor, wire: Wire) -> Tensor:
    """Add mostly zero vectors in place: first between pairs of ranks, then pairs of pairs, ….

    Ranks above a power of two give their vector to another rank, and receive the sum from it.
    """
    power = 2 ** int(math.log2(wire.ranks))
    helper, empty = wire.rank ^ power, total[:0]
    if wire.rank >= power:
        _trade(total, helper, 0, wire)
        return total.copy_(_trade(empty, helper, len(total), wire))
    if helper < wire.ranks:
        total += _trade(empty, helper, len(total), wire)
    distance = 1
    while distance < power:
        total += _trade(total, wire.rank ^ distance, len(total), wire)
        distance *= 2
    if helper < wire.ranks:
        _trade(total, helper, 0, wire)
    return total


def _trade(part: Tensor, partner: int, length: int, wire: Wire) -> Tensor:
    """Swap parts of a vector with a partner; sent as places and values if that is shorter."""
    places = part.nonzero().squeeze(1)
    message = torch.cat([places.int(), part[places].view(torch.int32)])
    if len(message) >= len(part):
        message = part.view(torch.int32)
    got = wire.swap(message, partner)
    if len(got) == length:  # dense
        return got.view(torch.float32)
    where, values = got.tensor_split(2)
    block = torch.zeros(length, device=part.device)
    return block.index_copy_(0, where.long(), values.view(torch.float32))


def powersgd(gradient: Tensor, wire: Wire, memory: Memory) -> Tensor:
    """Approximate each matrix M by P Q^T: one power iteration, starting with the last Q."""
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
            # Average before orthonormalizing: then all ranks project onto the same basis, and the
            # second factor may be averaged as well.
            left = torch.linalg.qr(left).Q
            memory.tensors[key] = allreduce(matrix.T @ left, wire, memory)
            average = (left @ memory.tensors[key].T).reshape(-1)
        answer[place : place + shape.numel()] = average
        place += shape.numel()
    memory.tensors["error"] = wanted - answer
    return answer


def stale(gradient: Tensor, wire: Wire, memory: Memory) -> Tensor:
    """Start averaging this gradient, and apply the one from `staleness` steps ago.

    It is divided by its age (Zhang et al. 2016): with momentum, old gradients overshoot.
    """
    # The all-reduce writes into this tensor until `wait` returns.
    memory.queue.append((gradient, wire.all_reduce(gradient, wait=False)))
    if len(memory.queue) <= memory.staleness:
        return torch.zeros_like(gradient)
    averaged, work = memory.queue.popleft()
    wire.wait(work)
    return averaged / wire.ranks / (1 + memory.staleness)


GRADIENTS: dict[str, Method] = {
    "allreduce": allreduce,
    "fp16": half(torch.float16),
    "bf16": half(torch.bfloat16),
    "powersgd": powersgd,
    "int8": int8,
    "ternary": ternary,
    "onebit": onebit,
    "topk": topk,
    "sparse": sparse,
    "stale": stale,
}
