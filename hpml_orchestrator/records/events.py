"""What happens in a job, in one vocabulary that staging, training, sweeps and reports share."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hpml_orchestrator.records.files import SCHEMA_VERSION, append_line, read_lines

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

__all__ = ["VOCABULARY", "Event", "append", "read", "read_all", "read_milestones", "read_recent"]

VOCABULARY = (
    "queued",  # handed to the scheduler
    "started",  # the script of this attempt runs
    "staging",  # a node began to bring data in
    "ready",  # a node has all of its data
    "rendezvous",  # a rank entered the process group's start
    "resumed",  # a rank continues from a checkpoint
    "warm-up",  # a rank runs its first steps
    "training",  # a rank begins to train; `data.step` says where, `data.total_steps` how far
    "step",  # a rank's cumulative counters, at most once a second, and less often later
    "evaluation",  # a rank evaluates
    "checkpoint",  # a rank writes a checkpoint
    "signal",  # one that did not end the job reached its script (node `batch`) or a node's steps
    "hang",  # no rank of a node gave a sign of life for too long
    "stop",  # a node learned that the job is to be stopped; `data.reason` says why
    "stopping",  # a rank stops as it was asked
    "ended",  # over; `data.reason` says how
)
"""The only names that an event may have, in the order of a job's life."""

# A line as `Event.to_json` writes it, without objects in the data.
_STEP = re.compile(
    rb'\{"schema_version":1,"time":[\d.]+,"event":"step","node":"[^"]*","rank":(\d+),'
    rb'"data":\{[^{}]*\}\}\n'
)


@dataclass(frozen=True)
class Event:
    """One thing that happened.

    Attributes:
        time: seconds since the epoch on the node's clock.
        event: one of `VOCABULARY`.
        node: Slurm's name of the node, or `batch` for the script itself.
        rank: global rank, None for what is not a rank's doing.
        data: figures and words that belong to it; units stand in the keys.
    """

    time: float
    event: str
    node: str
    rank: int | None = None
    data: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.event not in VOCABULARY:
            raise ValueError(f"{self.event!r} is no event; one of {', '.join(VOCABULARY)}")

    def to_json(self) -> str:
        """Return the event as one line of JSON."""
        body: dict[str, Any] = {
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
    **data: Any,
) -> Event:
    """Append one event to a node's JSONL file and return it."""
    made = Event(time.time() if now is None else now, event, node, rank, data)
    path.parent.mkdir(parents=True, exist_ok=True)
    append_line(path, made.to_json())
    return made


def read(path: Path) -> Iterator[Event]:
    """Yield the events of one JSONL file; unknown events and newer schemas are passed over."""
    return filter(None, map(_event_of, read_lines(path)))


def read_all(directory: Path) -> Iterator[Event]:
    """Yield an attempt's events, file by file as they were written: the script's own come first."""
    for path in _files(directory):
        yield from read(path)


def read_milestones(directory: Path) -> Iterator[Event]:
    """Yield an attempt's events, but of each rank's `step` only the first and last of a file.

    Nearly all lines of a long training are steps: no more is held than one event per rank.
    """
    for path in _files(directory):
        first: set[int | None] = set()
        last: dict[int | None, bytes] = {}
        for line in read_lines(path):
            step = _STEP.fullmatch(line)
            if step is not None and (rank := int(step[1])) in first:
                last[rank] = line  # parsed if no other follows: parsing each would take seconds
                continue
            event = _event_of(line)
            if event is not None and event.event == "step":
                if event.rank in first:
                    last[event.rank] = line
                    continue
                first.add(event.rank)
            if event is not None:
                yield event
        yield from filter(None, map(_event_of, last.values()))


def read_recent(directory: Path, size: int = 1 << 15) -> Iterator[Event]:
    """Yield the events in the last `size` bytes of each of an attempt's files that can be read."""
    for path in _files(directory):
        with contextlib.suppress(OSError), path.open("rb") as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - size))
            # The first and the last line may be torn, and then are no JSON.
            yield from filter(None, map(_event_of, stream.read(size).splitlines()))


def _files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.jsonl"), key=lambda path: (path.stem != "batch", path.name))


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
