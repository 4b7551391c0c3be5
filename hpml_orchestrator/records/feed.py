r"""Messages from a node's agent to exporters: the figures of the ranks of a training.

One message, of at most 32 KiB:

    hpml-feed 2 <part>\n
    {"pid": 4242, "binding": [7, 1] or null, "ranks": [
        {"r": 0, "age": 0.4, "t": [one number per COUNTERS],
         "b": [steps by duration, see STEP_BOUNDS_SECONDS] or null,
         "m": method of communication or null, "g": {"loss": 0.1}}, ...]}

A rank always travels in the same part, and each part is complete: only the latest one of each
matters. `binding` counts ranks that are bound as planned, and others.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TypeGuard

COUNTERS = (
    "samples",
    "steps",
    "data_wait_seconds",
    "step_seconds",
    "comm_seconds",
    "transfer_seconds",
    "wait_seconds",
    "save_seconds",
    "evaluation_seconds",
)
"""The counters of each rank; on the ranks' channel these names end in `_total`."""

GAUGES = ("loss", "accuracy", "mfu")

STEP_BOUNDS_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 60.0)
"""Upper bounds of the buckets of steps; the same as in training_jobs/hpml_channel.py."""

BUCKETS = len(STEP_BOUNDS_SECONDS) + 1
MAX_MESSAGE_BYTES = 32 * 1024
MAX_METHOD_CHARACTERS = 64
_HEAD = b"hpml-feed 2 "
_HEAD_BYTES = 24
_RANKS_PER_PART = 36  # of at most 900 bytes each
_HIGHEST = 1e18


class RankFigures(NamedTuple):
    """The figures of one rank.

    Attributes:
        rank: global rank.
        age: seconds since its last report.
        totals: its counters, in the order of `COUNTERS`.
        buckets: its steps by duration, not cumulative, the last one unbounded; None: not reported.
        method: how communication was measured; empty if it was not.
        gauges: the latest values by name.
    """

    rank: int
    age: float
    totals: tuple[float, ...]
    buckets: tuple[int, ...] | None
    method: str
    gauges: dict[str, float]


class FeedMessage(NamedTuple):
    """One message of an agent.

    Attributes:
        pid: the agent's process id, as the agent reports it.
        binding: ranks that are bound as planned, and others; None: not judged.
        ranks: the ranks of this part.
    """

    pid: int
    binding: tuple[int, int] | None
    ranks: tuple[RankFigures, ...]


def encode(pid: int, binding: tuple[int, int] | None, ranks: Sequence[RankFigures]) -> list[bytes]:
    """Return the messages about all ranks."""
    messages = []
    for part, first in enumerate(range(0, max(1, len(ranks)), _RANKS_PER_PART)):
        told = [
            {
                "r": one.rank,
                "age": round(one.age, 3),
                "t": [round(total, 6) for total in one.totals],
                "b": one.buckets,
                "m": one.method or None,
                "g": one.gauges,
            }
            for one in ranks[first : first + _RANKS_PER_PART]
        ]
        data = {"pid": pid, "binding": binding, "ranks": told}
        text = json.dumps(data, separators=(",", ":"), allow_nan=False)
        messages.append(_HEAD + f"{part}\n{text}".encode("ascii"))
    return messages


def part_of(datagram: bytes) -> int:
    """Return the number of a message's part, without parsing the rest.

    Raises:
        ValueError: not a message of a training feed, or too long.
    """
    number = datagram[len(_HEAD) : _HEAD_BYTES].partition(b"\n")[0]
    if not datagram.startswith(_HEAD) or len(datagram) > MAX_MESSAGE_BYTES:
        raise ValueError("not a message of a training feed")
    return int(number)


def decode(datagram: bytes) -> FeedMessage:
    """Return a message's content; its numbers are finite and, except for gauges, not negative.

    Raises:
        ValueError: not a message of a training feed.
    """
    part_of(datagram)
    try:
        data = json.loads(datagram.partition(b"\n")[2])
        binding = data["binding"]
        if binding is not None:
            right, wrong = map(_count, binding)
            binding = right, wrong
        return FeedMessage(_count(data["pid"]), binding, tuple(map(_rank, data["ranks"])))
    except (LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"not a message of a training feed: {error}") from error


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a parsed value is a number that a metric can have: no NaN, not infinite."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    return abs(value) < _HIGHEST


def _rank(data: Any) -> RankFigures:
    totals = tuple(map(_amount, data["t"]))
    buckets = None if data["b"] is None else tuple(map(_count, data["b"]))
    if len(totals) != len(COUNTERS) or (buckets is not None and len(buckets) != BUCKETS):
        raise ValueError("another number of counters or buckets")
    gauges = {name: data["g"][name] for name in GAUGES if name in data["g"]}
    if not all(map(is_number, gauges.values())):
        raise ValueError("a gauge is not a number")
    method = str(data["m"] or "")[:MAX_METHOD_CHARACTERS]
    return RankFigures(_count(data["r"]), _amount(data["age"]), totals, buckets, method, gauges)


def _amount(value: object) -> float:
    if not is_number(value) or value < 0:
        raise ValueError("not an amount")
    return float(value)


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value < _HIGHEST:
        raise ValueError("not a count")
    return value
