"""One message of a training feed, checked: whoever wrote it, what comes out is sane.

The wire format is described in hpml_orchestrator/node/feed.py, the sending end.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, NamedTuple

__all__ = ["BUCKETS", "COUNTERS", "MAX_MESSAGE_BYTES", "Message", "Rank", "parse", "part_of"]

MAX_MESSAGE_BYTES = 32 * 1024
COUNTERS = 5  # samples, steps, data wait seconds, step seconds, communication seconds
BUCKETS = 11
MAX_RANKS = 64
MAX_PARTS = 86  # 4096 ranks, 48 in each
_HEAD = b"hpml-feed 1 "
_HEAD_BYTES = 24
_METHOD_CHARACTERS = 64
_HIGHEST = 1e18


class Rank(NamedTuple):
    """What one rank has said.

    Attributes:
        rank: its number among all.
        age: seconds since it said anything.
        totals: its counters, see COUNTERS; seconds are floats.
        buckets: its steps by duration, not cumulative; None where it does not tell.
        method: how its communication was measured; empty where it was not.
        loss: latest training loss; None where not told, so are the next two.
        accuracy: of the last evaluation, 0 to 1.
        mfu: model FLOP/s over the devices' peak, 0 to 1.
    """

    rank: int
    age: float
    totals: tuple[float, ...]
    buckets: tuple[int, ...] | None
    method: str
    loss: float | None
    accuracy: float | None
    mfu: float | None


@dataclass(frozen=True)
class Message:
    """One part of what an agent knows.

    Attributes:
        pid: the agent's, as it says itself.
        binding: ranks that run where they should, and ranks that do not; None: not judged.
        ranks: the ranks of this part.
    """

    pid: int
    binding: tuple[int, int] | None
    ranks: tuple[Rank, ...]


def part_of(datagram: bytes) -> int:
    """Return which part a datagram is, without reading the rest.

    Raises:
        ValueError: it is none of ours.
    """
    end = datagram.find(b"\n", 0, _HEAD_BYTES)
    number = datagram[len(_HEAD) : end]
    if not datagram.startswith(_HEAD) or end < 0 or not number.isdigit():
        raise ValueError("no message of a training feed")
    part = int(number)
    if part >= MAX_PARTS or len(datagram) > MAX_MESSAGE_BYTES:
        raise ValueError("too much of a training feed")
    return part


def parse(datagram: bytes) -> Message:
    """Return what a datagram says.

    Raises:
        ValueError: it is none of ours.
    """
    part_of(datagram)
    try:
        data = json.loads(datagram[datagram.index(b"\n") :])
    except RecursionError as error:
        raise ValueError("nested too deep") from error
    if not isinstance(data, dict) or not isinstance(data.get("ranks"), list):
        raise ValueError("no ranks")  # noqa: TRY004 - the sender's fault
    if len(data["ranks"]) > MAX_RANKS:
        raise ValueError("more ranks than a message holds")
    pid, binding = data.get("pid"), data.get("binding")
    if type(pid) is not int:
        raise ValueError("no process")
    if binding is not None:
        right, wrong = _whole(binding, 2)
        binding = right, wrong
    return Message(pid, binding, tuple(map(_rank, data["ranks"])))


def _rank(data: Any) -> Rank:
    if not isinstance(data, dict):
        raise ValueError("no rank")  # noqa: TRY004
    (rank,) = _whole([data.get("r")], 1)
    totals = data.get("t")
    if not isinstance(totals, list) or len(totals) != COUNTERS:
        raise ValueError("no counters")
    buckets, gauges, method = data.get("b"), data.get("g"), data.get("m")
    if not isinstance(gauges, dict):
        raise ValueError("no gauges")  # noqa: TRY004
    return Rank(
        rank,
        _amount(data.get("age")),
        tuple(map(_amount, totals)),
        None if buckets is None else _whole(buckets, BUCKETS),
        _label(method),
        _gauge(gauges.get("loss")),
        _gauge(gauges.get("accuracy")),
        _gauge(gauges.get("mfu")),
    )


def _amount(value: Any) -> float:
    if type(value) not in {int, float} or not 0 <= value < _HIGHEST:
        raise ValueError("no amount")
    return float(value)


def _gauge(value: Any) -> float | None:
    if value is None:
        return None
    if type(value) not in {int, float} or not abs(value) < _HIGHEST:
        raise ValueError("no figure")
    return float(value)


def _whole(values: Any, count: int) -> tuple[int, ...]:
    if not isinstance(values, list) or len(values) != count:
        raise ValueError("another number of numbers")
    for one in values:
        if type(one) is not int or not 0 <= one < _HIGHEST:
            raise ValueError("no count")
    return tuple(values)


def _label(value: Any) -> str:
    """Return the method's name as a label holds it: short, and of printable ASCII."""
    if not isinstance(value, str):
        return ""
    return "".join(one if " " <= one <= "~" else "?" for one in value[:_METHOD_CHARACTERS])
