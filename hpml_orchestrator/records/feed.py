"""Events of a job, and the messages with counters of ranks from agents to exporters."""

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
"""Counters of each rank; in the ranks' own messages these names end in `_total`."""

GAUGES = ("loss", "accuracy", "mfu")

STEP_BOUNDS_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 60.0)
"""Upper bounds of the buckets of step durations, as in training_jobs/hpml_channel.py."""

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
        buckets: numbers of steps by duration, not cumulative, the last bucket unbounded; None if
            not reported.
        method: how communication was measured; empty if not measured.
        gauges: latest values by name.
    """

    rank: int
    age: float
    totals: tuple[float, ...]
    buckets: tuple[int, ...] | None
    method: str
    gauges: dict[str, float]


class FeedMessage(NamedTuple):
    """One message from an agent.

    Attributes:
        pid: the agent's process id, as the agent reports it.
        binding: numbers of ranks bound as planned and of other ranks; None if not verified.
        ranks: ranks in this part of the message.
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
    """Return the part number of a message without parsing the rest.

    Raises:
        ValueError: not a training feed message, or too long.
    """
    number = datagram[len(_HEAD) : _HEAD_BYTES].partition(b"\n")[0]
    if not datagram.startswith(_HEAD) or len(datagram) > MAX_MESSAGE_BYTES:
        raise ValueError("not a message of a training feed")
    return int(number)


def decode(datagram: bytes) -> FeedMessage:
    """Return the content of a message: numbers are finite and, except for gauges, not negative.

    Raises:
        ValueError: not a training feed message.
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
    """Return whether a parsed value is a finite number, as metrics need."""
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


# Events of a job: staging, training, sweeps and reports share one vocabulary.

VOCABULARY = (
    "queued",  # handed to the scheduler
    "started",  # the script of this attempt runs
    "staging",  # a node started to copy data
    "ready",  # a node has all of its data
    "rendezvous",  # a rank starts to join the process group
    "preparation",  # a rank has joined the process group and prepares data, model and checkpoint
    "resumed",  # a rank continues from a checkpoint
    "warm-up",  # a rank runs its first steps
    "training",  # a rank starts to train at `data.step` of `data.total_steps`
    "step",  # a rank's cumulative counters, at most once per second, later less often
    "evaluation",  # a rank evaluates
    "checkpoint",  # a rank writes a checkpoint
    "signal",  # the script (node `batch`) or a node's steps got a signal that did not end the job
    "hang",  # no rank of a node sent anything for too long
    "stop",  # a node was asked to stop the job; the reason is in `data.reason`
    "stopping",  # a rank stops on request
    "link",  # `data.url` and `data.name` of a page about the run, such as an experiment tracker's
    "ended",  # the attempt ended; the reason is in `data.reason`
)
"""All event names, in the order of a job's life."""

# A line from `Event.to_json` whose data contain no objects.
_STEP = re.compile(
    rb'\{"schema_version":1,"time":[\d.]+,"event":"step","node":"[^"]*","rank":(\d+),'
    rb'"data":\{[^{}\x00-\x1f]*\}\}\n'
)
_STEPS_TOTAL = re.compile(rb'"steps_total":(\d+(?:\.\d+)?)[,}]')


@dataclass(frozen=True)
class Event:
    """One event.

    Attributes:
        time: seconds since the epoch, by the node's clock.
        event: one of `VOCABULARY`.
        node: Slurm's name of the node, or `batch` for the script itself.
        rank: global rank; None for events of nodes and the script.
        data: details; keys contain the unit.
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
    """Yield an attempt's events file by file in order of writing, the script's first."""
    for path in _files(directory):
        yield from read(path)


def read_milestones(directory: Path) -> Iterator[Event]:
    """Yield an attempt's events, but only the first and last `step` of each rank in a file.

    The counters of a restarted rank begin at 0 again, so the last step before and the first step
    after a restart are included. Keeps at most one event per rank in memory.
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
            # Regular expressions are faster than parsing JSON: in a long training nearly all lines
            # are steps, and only the last one of each rank is parsed.
            steps = _steps(line)
            if rank in counted and steps >= counted[rank]:
                last[rank] = line
            elif (event := event or _event_of(line)) is not None:
                yield from filter(None, map(_event_of, filter(None, (last.pop(rank, None),))))
                yield event
            counted[rank] = steps
        yield from filter(None, map(_event_of, last.values()))


def _steps(line: bytes) -> float:
    """Return the number of steps in the line of a `step`; 0 if it has none."""
    found = _STEPS_TOTAL.search(line)
    return float(found[1]) if found else 0.0


def read_recent(directory: Path, size: int = 1 << 15) -> Iterator[Event]:
    """Yield the events in the last `size` bytes of each readable file of an attempt."""
    for path in _files(directory):
        with contextlib.suppress(OSError), path.open("rb") as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - size))
            # Incomplete first and last lines are not JSON and therefore skipped.
            yield from filter(None, map(_event_of, stream.read(size).splitlines()))


def _files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.jsonl"), key=lambda path: (path.stem != "batch", path.name))


def event_fault(line: bytes) -> str:
    """Return why a line is not an event; empty for any event, even with an unknown name."""
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
