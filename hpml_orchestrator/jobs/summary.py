"""What a run did: phases, staging, throughput and accuracy, from its own records."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from hpml_orchestrator.errors import HpmlError
from hpml_orchestrator.jobs.bound import Bound, bound_of
from hpml_orchestrator.jobs.monitored import Monitored, monitor_lines, monitored_nodes, together
from hpml_orchestrator.jobs.staged import Staged, staged_entries

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hpml_orchestrator.jobs.status import State
    from hpml_orchestrator.records.events import Event

__all__ = ["Phase", "Summary", "binding_of", "phases", "summarise"]


@dataclass(frozen=True)
class Phase:
    """One stretch of a run's time.

    Attributes:
        name: `queue`, `start-up`, `staging`, `launch`, `rendezvous`, `warm-up`, `training`, `end`;
            `running` where the program reports nothing of itself.
        seconds: wall-clock time.
    """

    name: str
    seconds: float


@dataclass(frozen=True)
class Summary:
    """What is worth telling of a run.

    Attributes:
        phases: the last attempt's time, stretch by stretch, without gaps.
        staged_bytes, staged_files: brought to all nodes together.
        staging_seconds: of the slowest node.
        stages: each entry of `stage`, on all nodes.
        nodes: nodes that were ready.
        ranks: ranks that recorded where they ran.
        world_size: ranks that there should be, as those that recorded it know; 0 if none did.
        result: figures that the training reported at its end, units in the keys.
        last_step: rank 0's last counters.
        data_wait_ratio: share of the ranks' step time spent waiting for data; None if not reported.
        samples_per_second: of all ranks: what the result says, else from the counters since the
            warm-up ended; None if neither tells.
        binding: whether the ranks ran where they should, in one line; empty if nothing tells.
        binding_failed: whether the job failed for that; its output and `hpml show` tell of each
            rank.
        monitor: what the job's monitor saw on all nodes together; None where it had none.
        monitored: the same of each node.
        monitor_lines: both in words.
    """

    phases: list[Phase] = field(default_factory=list)
    staged_bytes: int = 0
    staged_files: int = 0
    staging_seconds: float = 0.0
    stages: list[Staged] = field(default_factory=list)
    nodes: int = 0
    ranks: int = 0
    world_size: int = 0
    result: dict[str, Any] = field(default_factory=dict)
    last_step: dict[str, Any] = field(default_factory=dict)
    data_wait_ratio: float | None = None
    samples_per_second: float | None = None
    binding: str = ""
    binding_failed: bool = False
    monitor: Monitored | None = None
    monitored: list[Monitored] = field(default_factory=list)
    monitor_lines: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return the summary for programs."""
        return asdict(self)


def summarise(state: State) -> Summary:
    """Return the summary of a run's last attempt; empty where nothing was recorded.

    Raises:
        RecordError: its records may not be read.
    """
    attempt = state.run.newest()
    if attempt is None:
        return Summary()
    events = attempt.events()
    ready = [event for event in events if event.event == "ready"]
    results = [event for event in events if event.data.get("final")]
    steps = _last_steps(events)
    result = dict(results[-1].data) if results else {}
    result.pop("final", None)
    queued = _first(events).get("queued")
    bindings = attempt.bindings()
    bound = binding_of(state)
    ends = [] if state.ended is None else [state.ended]
    if attempt.ended is not None:
        # The scheduler's word may be rounded; the script's comes before the scheduler clears up.
        ends.append(float(attempt.ended["time"]))
    monitored = monitored_nodes(attempt)
    return Summary(
        phases=phases(
            events,
            queued=queued,
            bound=[time for one in bindings if (time := _figure(one, "time"))],
            left=None if attempt.ended is None else float(attempt.ended["time"]),
            ended=max(ends, default=None),
        ),
        staged_bytes=sum(int(_figure(event.data, "bytes")) for event in ready),
        staged_files=sum(int(_figure(event.data, "files")) for event in ready),
        staging_seconds=max((_figure(event.data, "seconds") for event in ready), default=0.0),
        stages=staged_entries(ready),
        nodes=len(ready),
        ranks=len(bindings),
        world_size=max((int(_figure(one, "world_size")) for one in bindings), default=0),
        result=result,
        last_step=dict(steps.get(0, {})),
        data_wait_ratio=_data_wait(list(steps.values())),
        samples_per_second=(
            _figure(result, "samples_per_second") or None
            if "samples_per_second" in result
            else _rate(events)
        ),
        binding=bound.line,
        binding_failed=bound.fatal,
        monitor=together(monitored),
        monitored=monitored,
        monitor_lines=monitor_lines(
            monitored,
            ready=[event.node for event in ready],
            ended=None if attempt.ended is None else float(attempt.ended["time"]),
        ),
    )


def binding_of(state: State) -> Bound:
    """Return what the last attempt's records tell of where its ranks ran.

    Raises:
        RecordError: they may not be read.
    """
    attempt = state.run.newest()
    if attempt is None:
        return Bound()
    try:
        asked = state.submission.record()["job"]["binding"]
    except (HpmlError, KeyError, TypeError):
        asked = None
    return bound_of(attempt, asked)


def phases(
    events: Sequence[Event],
    *,
    queued: float | None = None,
    bound: Sequence[float] = (),
    left: float | None = None,
    ended: float | None = None,
) -> list[Phase]:
    """Return the stretches between the marks of an attempt.

    A mark that many ranks or nodes reach counts when the last of them does (nodes ready, training
    over), since nobody goes on before; a beginning counts when the first begins. The warm-up ends,
    and the training begins, with the first counters that a rank sent. A mark that was not recorded
    joins its stretch to the next, so the stretches always add up to the whole. What was going on
    when the script ended, without any training, lasted until then.

    Args:
        events: of one attempt, by time.
        queued: when it was handed to the scheduler.
        bound: when each rank became its program.
        left: when the script was over; where it left no word, all was over at once.
        ended: when it was over.
    """
    first, last = _first(events), _last(events)
    trained = [event.time for event in events if event.event == "step" or event.data.get("final")]
    marks: dict[str, float | None] = {
        "queue": first.get("started"),
        "start-up": first.get("staging", first.get("ready")),
        "staging": last.get("ready"),
        "launch": first.get("rendezvous", max(bound, default=None)),
        "running": None,
        "rendezvous": first.get("warm-up"),
        "warm-up": first.get("step"),
        "training": max(trained, default=None),
    }
    going_on = "" if trained else _going_on(first, launched=bool(bound))
    if going_on:
        marks[going_on] = ended if left is None else left
    marks["end"] = ended
    found = []
    here = queued if queued is not None else first.get("started")
    for name, mark in marks.items():
        if mark is None or here is None:
            continue
        if name == "queue" and queued is None:
            continue
        found.append(Phase(name, round(max(0.0, mark - here), 6)))
        here = max(here, mark)
    return found


def _going_on(first: Mapping[str, float], *, launched: bool) -> str:
    """Return the stretch that began last; empty where nothing began."""
    for event in ("warm-up", "rendezvous"):
        if event in first:
            return event
    if "ready" in first or launched:
        return "running" if launched else "launch"
    if "staging" in first:
        return "staging"
    return "start-up" if "started" in first else ""


def _first(events: Sequence[Event]) -> dict[str, float]:
    found: dict[str, float] = {}
    for event in events:
        found[event.event] = min(event.time, found.get(event.event, event.time))
    return found


def _last(events: Sequence[Event]) -> dict[str, float]:
    found: dict[str, float] = {}
    for event in events:
        found[event.event] = max(event.time, found.get(event.event, event.time))
    return found


def _last_steps(events: Sequence[Event]) -> dict[int, dict[str, Any]]:
    return {
        event.rank: dict(event.data)
        for event in events
        if event.event == "step" and event.rank is not None
    }


def _data_wait(steps: Sequence[dict[str, Any]]) -> float | None:
    """Return waited / (steps' whole time), both summed over the ranks."""
    waited = sum(_figure(step, "data_wait_seconds_total") for step in steps)
    stepped = sum(_figure(step, "step_seconds_total") for step in steps)
    return waited / stepped if stepped > 0 else None


def _rate(events: Sequence[Event]) -> float | None:
    """Return samples/s of all ranks between their first counters and their last."""
    steps: dict[int, list[Event]] = {}
    for event in events:
        if event.event == "step" and event.rank is not None:
            steps.setdefault(event.rank, []).append(event)
    counted = [
        _figure(mine[-1].data, "samples_total") - _figure(mine[0].data, "samples_total")
        for mine in steps.values()
    ]
    times = [one.time for mine in steps.values() for one in (mine[0], mine[-1])]
    took = max(times, default=0.0) - min(times, default=0.0)
    samples = sum(max(0.0, one) for one in counted)
    return samples / took if samples and took > 0 else None


def _figure(data: Mapping[str, Any], key: str) -> float:
    """Return a figure that a rank reported; 0 where it reported none, or something else."""
    value = data.get(key)
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else 0.0
