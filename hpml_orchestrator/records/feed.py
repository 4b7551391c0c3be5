"""Messages of the training channel, and the events that agents write."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from hpml_orchestrator.records.files import SCHEMA_VERSION, append_line, read_lines

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path
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


# The events of a job, in one vocabulary that staging, training, sweeps and reports share.

VOCABULARY = (
    "queued",  # handed to the scheduler
    "started",  # the script of this attempt runs
    "staging",  # a node began to bring data in
    "ready",  # a node has all of its data
    "rendezvous",  # a rank entered the process group's start
    "preparation",  # a rank is in the process group, and prepares data, model and checkpoint
    "resumed",  # a rank continues from a checkpoint
    "warm-up",  # a rank runs its first steps
    "training",  # a rank begins to train at `data.step` of `data.total_steps`
    "step",  # a rank's cumulative counters, at most once a second, and less often later
    "evaluation",  # a rank evaluates
    "checkpoint",  # a rank writes a checkpoint
    "signal",  # the script (node `batch`) or a node's steps got one that did not end the job
    "hang",  # no rank of a node gave a sign of life for too long
    "stop",  # a node was asked to stop the job; the reason is in `data.reason`
    "stopping",  # a rank stops on request
    "link",  # `data.url` of a page about the run, such as an experiment tracker's, and its `name`
    "ended",  # the attempt ended; the reason is in `data.reason`
)
"""The only names that an event may have, in the order of a job's life."""

# A line as `Event.to_json` writes it, without objects in the data.
_STEP = re.compile(
    rb'\{"schema_version":1,"time":[\d.]+,"event":"step","node":"[^"]*","rank":(\d+),'
    rb'"data":\{[^{}\x00-\x1f]*\}\}\n'
)
_STEPS_TOTAL = re.compile(rb'"steps_total":(\d+(?:\.\d+)?)[,}]')


@dataclass(frozen=True)
class Event:
    """One event.

    Attributes:
        time: seconds since the epoch on the node's clock.
        event: one of `VOCABULARY`.
        node: Slurm's name of the node, or `batch` for the script itself.
        rank: global rank; None for events of a node or the script.
        data: its figures and words, with units in the keys.
    """

    time: float
    event: str
    node: str
    rank: int | None = None
    data: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.event not in VOCABULARY:
            raise ValueError(f"{self.event!r} is not an event; one of {', '.join(VOCABULARY)}")

    def to_json(self) -> str:
        """Return the event as one line of JSON."""
        body: dict[str, object] = {
            "schema_version": SCHEMA_VERSION,
            "time": round(self.time, 6),
            "event": self.event,
            "node": self.node,
        }
        if self.rank is not None:
            body["rank"] = self.rank
        if self.data:
            body["data"] = dict(self.data)
        return json.dumps(body, separators=(",", ":"), default=str)


def append(
    path: Path,
    event: str,
    *,
    node: str,
    rank: int | None = None,
    now: float | None = None,
    **data: object,
) -> Event:
    """Append one event to a node's JSONL file and return it."""
    made = Event(time.time() if now is None else now, event, node, rank, data)
    path.parent.mkdir(parents=True, exist_ok=True)
    append_line(path, made.to_json())
    return made


def read(path: Path) -> Iterator[Event]:
    """Yield the events of one JSONL file; skip unknown events and newer schemas."""
    return filter(None, map(_event_of, read_lines(path)))


def read_all(directory: Path) -> Iterator[Event]:
    """Yield an attempt's events, file by file in the order of writing; the script's come first."""
    for path in _files(directory):
        yield from read(path)


def read_milestones(directory: Path) -> Iterator[Event]:
    """Yield an attempt's events, but of each rank's `step` only the first and last of a file.

    If a rank is restarted, its counters start again at 0: then the last step before and the first
    after the restart are yielded, too. At most one event per rank is kept in memory.
    """
    for path in _files(directory):
        counted: dict[int | None, float] = {}
        last: dict[int | None, bytes] = {}
        for line in read_lines(path):
            step, event = _STEP.fullmatch(line), None
            rank = int(step[1]) if step else None
            if step is None:
                event = _event_of(line)
                if event is None or event.event != "step":
                    yield from filter(None, (event,))
                    continue
                rank = event.rank
            # Two regular expressions instead of a JSON parser for each line: nearly all lines of a
            # long training are steps, and only the last of each rank is parsed.
            steps = _steps(line)
            if rank in counted and steps >= counted[rank]:
                last[rank] = line
            elif (event := event or _event_of(line)) is not None:
                yield from filter(None, map(_event_of, filter(None, (last.pop(rank, None),))))
                yield event
            counted[rank] = steps
        yield from filter(None, map(_event_of, last.values()))


def _steps(line: bytes) -> float:
    """Return the counted steps in a line of a `step`; 0 if it does not report them."""
    found = _STEPS_TOTAL.search(line)
    return float(found[1]) if found else 0.0


def read_recent(directory: Path, size: int = 1 << 15) -> Iterator[Event]:
    """Yield the events in the last `size` bytes of each of an attempt's files that can be read."""
    for path in _files(directory):
        with contextlib.suppress(OSError), path.open("rb") as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - size))
            # The first and the last line may be incomplete; they are skipped as not JSON.
            yield from filter(None, map(_event_of, stream.read(size).splitlines()))


def _files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.jsonl"), key=lambda path: (path.stem != "batch", path.name))


def event_fault(line: bytes) -> str:
    """Return why a line is not an event; empty if it is one, even with an unknown name."""
    if _STEP.fullmatch(line):
        return ""
    record = parse_record(line, SCHEMA_VERSION)
    if isinstance(record, str):
        return record
    if not isinstance(record.get("event"), str):
        return "it has no `event`"
    if record["event"] not in VOCABULARY:  # from a newer hpml with the same schema
        return ""
    rank, event = record.get("rank"), _event_of(line)
    if event is None or not math.isfinite(event.time) or not isinstance(rank, (int, type(None))):
        return "not an event: `time`, `node`, `rank` or `data` has a wrong value"
    return ""


def parse_record(line: bytes, newest: int) -> dict[str, object] | str:
    """Return a line's JSON object, or why it is not one of a schema up to `newest`."""
    try:
        record = json.loads(line.decode("utf-8", "surrogateescape"))
    except ValueError:
        return "not JSON"
    if not isinstance(record, dict):
        return "not a JSON object"
    version = record.get("schema_version", newest)
    if type(version) is not int or version > newest:
        return f"schema_version {version!r}; this hpml reads up to {newest}"
    return record


def _event_of(line: bytes) -> Event | None:
    try:
        parsed = json.loads(line.decode("utf-8", "surrogateescape"))
        if parsed.get("schema_version", 0) > SCHEMA_VERSION:
            return None
        return Event(
            float(parsed["time"]),
            str(parsed["event"]),
            str(parsed["node"]),
            parsed.get("rank"),
            dict(parsed.get("data") or {}),
        )
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
        return None
