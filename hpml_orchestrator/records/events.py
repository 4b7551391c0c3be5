"""What happens in a job, in one vocabulary that staging, training, sweeps and reports share."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hpml_orchestrator.records.files import SCHEMA_VERSION, append_line, read_json_lines

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["VOCABULARY", "Event", "append", "read", "read_all"]

VOCABULARY = (
    "queued",  # handed to the scheduler
    "started",  # the script of this attempt runs
    "staging",  # a node began to bring data in
    "ready",  # a node has all of its data
    "rendezvous",  # a rank entered the process group's start
    "warm-up",  # a rank runs its first steps
    "step",  # a rank's cumulative counters, at most once a second
    "evaluation",  # a rank evaluates
    "checkpoint",  # a rank writes a checkpoint
    "signal",  # one that did not end the job reached its script (node `batch`) or a node's steps
    "stopping",  # asked to stop before its end
    "ended",  # over; `data.reason` says how
)
"""The only names that an event may have, in the order of a job's life."""


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
        return json.dumps(body, ensure_ascii=False, separators=(",", ":"), default=str)


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


def read(path: Path) -> list[Event]:
    """Read one JSONL file; lines of an unknown event or a newer schema are passed over."""
    found = []
    for line in read_json_lines(path):
        try:
            if line.get("schema_version", 0) > SCHEMA_VERSION:
                continue
            found.append(
                Event(
                    float(line["time"]),
                    str(line["event"]),
                    str(line["node"]),
                    line.get("rank"),
                    dict(line.get("data") or {}),
                )
            )
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
            continue
    return found


def read_all(directory: Path) -> list[Event]:
    """Read every JSONL file of an attempt's `events/`, sorted by time; empty when there is none."""
    found: list[Event] = []
    for path in sorted(directory.glob("*.jsonl")):
        found.extend(read(path))
    return sorted(found, key=lambda event: event.time)
