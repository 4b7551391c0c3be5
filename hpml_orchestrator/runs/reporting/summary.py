"""A run in figures: phases, staging, throughput and accuracy, from its own records."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from statistics import fmean
from typing import TYPE_CHECKING, Any

from hpml_orchestrator.errors import HpmlError
from hpml_orchestrator.runs.damaged import naming_damage
from hpml_orchestrator.runs.reporting.binding import BindingReport, read_binding
from hpml_orchestrator.runs.reporting.links import link_of
from hpml_orchestrator.runs.reporting.monitor import (
    Monitored,
    aggregate_nodes,
    monitor_lines,
    monitored_nodes,
    numbers,
)
from hpml_orchestrator.runs.reporting.staging import Staged, collected_lines, staged_entries

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from hpml_orchestrator.records.events import Event
    from hpml_orchestrator.records.store import Attempt
    from hpml_orchestrator.runs.state import State

__all__ = ["Phase", "Summary", "Timeline", "binding_of", "phases", "summarise"]


@dataclass(frozen=True)
class Phase:
    """One stretch of a run's time.

    The names are `queue`, `start-up`, `staging`, `launch`, `rendezvous`, `warm-up`, `training`,
    `end`; `running` if the program reports nothing.
    """

    name: str
    seconds: float  # wall-clock time


@dataclass(frozen=True)
class Summary:
    """A run in figures."""

    phases: list[Phase] = field(default_factory=list)  # of the last attempt, without gaps
    staged_bytes: int = 0  # on all nodes together
    staged_files: int = 0
    staging_seconds: float = 0.0  # of the slowest node
    stages: list[Staged] = field(default_factory=list)
    collected: list[dict[str, Any]] = field(default_factory=list)  # entries of `collect`, by node
    collected_lines: list[str] = field(default_factory=list)  # the same as text
    nodes: int = 0  # that became ready
    ranks: int = 0  # that recorded their binding
    world_size: int = 0  # by those records; 0 without any
    result: dict[str, Any] = field(default_factory=dict)  # what the training reported at its end
    last_step: dict[str, Any] = field(default_factory=dict)  # rank 0's last counters
    # By rank: `rank`, `seconds` between the first and the last counters since the warm-up, and by
    # how much each counter (`samples`, `steps`, `wait_seconds`) grew; what was not counted is out.
    training: list[dict[str, float]] = field(default_factory=list)
    # Share of the step time spent waiting for data since the warm-up, as the mean of the ranks.
    data_wait_ratio: float | None = None
    # Of all ranks: by the result, else by the counters since the warm-up ended.
    samples_per_second: float | None = None
    binding: str = ""  # whether the ranks are bound as planned, in one line
    binding_failed: bool = False  # whether the job failed because they are not
    monitor: Monitored | None = None  # of all nodes together; None without a monitor
    monitored: list[Monitored] = field(default_factory=list)  # of each node
    monitor_lines: list[str] = field(default_factory=list)  # both as text
    # Those that did not end the job, by name: how often, and when last, seconds since the epoch.
    signals: dict[str, tuple[int, float]] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)  # addresses that the training reported
    command: list[str] = field(default_factory=list)  # as rank 0 received it; empty if not recorded
    bindings: list[dict[str, Any]] = field(default_factory=list)  # of the ranks, as recorded
    bound: BindingReport = field(
        default_factory=BindingReport
    )  # the same with what the nodes verified

    def to_json(self) -> dict[str, Any]:
        """Return the summary for programs, without the binding of each rank."""
        value = asdict(replace(self, bindings=[], bound=BindingReport()))
        del value["bindings"], value["bound"]
        return value


def summarise(state: State) -> Summary:
    """Return the summary of a run's last attempt; empty if nothing was recorded.

    Raises:
        RecordError: its records may not be read, or are damaged.
    """
    attempt = state.run.newest()
    if attempt is None:
        return Summary()
    with naming_damage(state):
        return _summary(state, attempt)


def _summary(state: State, attempt: Attempt) -> Summary:
    timeline = Timeline(attempt.milestones())
    ready = sorted(timeline.ready, key=lambda event: event.time)
    staged = [numbers(event.data) for event in ready]
    result = dict(timeline.result.data) if timeline.result else {}
    result.pop("final", None)
    last_step = dict(timeline.steps[0][-1].data) if 0 in timeline.steps else {}
    training = timeline.grown()
    rate = _rate(timeline, training)
    if "samples_per_second" in result:
        rate = numbers(result).get("samples_per_second") or None
    bindings = attempt.bindings()
    ranks = [numbers(record) for record in bindings]
    bound = binding_of(state, bindings)
    script_ended = None if attempt.ended is None else float(attempt.ended["time"])
    # The scheduler's time may be rounded; the script's comes before the scheduler clears up.
    ends = [end for end in (state.ended, script_ended) if end is not None]
    monitored = monitored_nodes(attempt)
    collected = attempt.markers("collected")
    told = {row["node"] for node in collected for row in node["entries"]}
    owing = [event.node for event in ready if event.data.get("collect")]
    silent = [node for node in owing if state.over and node not in told]
    sources = []
    if owing:
        sources = [entry["source"] for entry in state.submission.record()["job"]["collect"]]
    return Summary(
        phases=phases(
            timeline,
            queued=timeline.first.get("queued"),
            bound=[rank["time"] for rank in ranks if rank.get("time")],
            left=script_ended,
            ended=max(ends, default=None),
        ),
        staged_bytes=int(sum(node.get("bytes", 0.0) for node in staged)),
        staged_files=int(sum(node.get("files", 0.0) for node in staged)),
        staging_seconds=max((node.get("seconds", 0.0) for node in staged), default=0.0),
        stages=staged_entries(ready),
        collected=[row for node in collected for row in node["entries"]],
        collected_lines=collected_lines(collected, sources, silent),
        nodes=len(ready),
        ranks=len(bindings),
        world_size=int(max((rank.get("world_size", 0.0) for rank in ranks), default=0.0)),
        result=result,
        last_step=last_step,
        training=training,
        data_wait_ratio=_data_wait(training),
        samples_per_second=rate,
        binding=bound.line,
        binding_failed=bound.fatal,
        monitor=aggregate_nodes(monitored),
        monitored=monitored,
        monitor_lines=monitor_lines(
            monitored, ready=[event.node for event in ready], ended=script_ended
        ),
        signals=_signals(timeline.signals),
        links=timeline.links,
        command=[*map(str, bindings[0].get("command", ()))] if bindings else [],
        bindings=bindings,
        bound=bound,
    )


def binding_of(state: State, records: Sequence[Mapping[str, Any]] | None = None) -> BindingReport:
    """Return the binding of the last attempt's ranks.

    Args:
        state: of the run.
        records: of the ranks' binding, if they were read already.

    Raises:
        RecordError: its records may not be read.
    """
    attempt = state.run.newest()
    if attempt is None:
        return BindingReport()
    try:
        asked = state.submission.record()["job"]["binding"]
    except (HpmlError, KeyError, TypeError):
        asked = None
    return read_binding(attempt, asked, records)


class Timeline:
    """The few of an attempt's events that a summary needs, gathered in one pass.

    Args:
        events: of one attempt, in any order.

    Attributes:
        first: when each kind of event happened first.
        ready: the nodes' events of that name.
        result: the last that a rank reported.
        trained: when a rank last reported counters or a result.
        steps: each rank's first and last counters in order, of every start of the rank.
        links: addresses by name; of two with the same name, the last.
        signals: by name and node (`batch` for the script), how often it came, and when last.
    """

    def __init__(self, events: Iterable[Event]) -> None:
        self.first: dict[str, float] = {}
        self.ready: list[Event] = []
        self.result: Event | None = None
        self.trained: float | None = None
        self.steps: dict[int, list[Event]] = {}
        self.signals: dict[str, dict[str, tuple[int, float]]] = {}
        self.links: dict[str, str] = {}
        for event in events:
            self._add(event)
        self.steps = {rank: _ends(counters) for rank, counters in self.steps.items()}

    def _add(self, event: Event) -> None:
        time = event.time
        self.first[event.event] = min(time, self.first.get(event.event, time))
        final = bool(event.data.get("final"))
        if event.event == "step" or final:
            self.trained = max(time, self.trained or time)
        if final and (self.result is None or time >= self.result.time):
            self.result = event
        if event.event == "ready":
            self.ready.append(event)
        if event.event == "signal":
            came = self.signals.setdefault(str(event.data.get("name")), {})
            count, before = came.get(event.node, (0, time))
            came[event.node] = count + int(numbers(event.data).get("count", 0.0)), max(before, time)
        if event.event == "link" and (link := link_of(event.data)):
            self.links.update([link])
        if event.event == "step" and event.rank is not None:
            self.steps.setdefault(event.rank, []).append(event)

    def grown(self) -> list[dict[str, float]]:
        """Return each rank's counters since the warm-up ended, see `Summary.training`.

        All figures of the training are made of these, so that they agree. Counters of a rank that
        was started again begin at 0: what it counted before that is added.
        """
        ranks = []
        for rank, counters in sorted(self.steps.items()):
            # The first event is the origin, not part of the sum: what was counted before it belongs
            # to the warm-up. A drop of `steps` means that the rank was started again from 0.
            seconds = counters[-1].time - counters[0].time
            figures = {"rank": float(rank), "seconds": seconds}
            before = _totals(counters[0])
            figures |= dict.fromkeys(before, 0.0)
            for event in counters[1:]:
                after = _totals(event)
                if after.get("steps", 0.0) < before.get("steps", 0.0):
                    before = {}
                for name, total in after.items():
                    grown = max(0.0, total - before.get(name, 0.0))
                    figures[name] = figures.get(name, 0.0) + grown
                before = after
            ranks.append(figures)
        return ranks


def _ends(counters: Sequence[Event]) -> list[Event]:
    """Return the first and the last counters of each start of a rank, in order."""
    ordered = sorted(counters, key=lambda event: event.time)
    kept = ordered[:1]
    for before, event in pairwise(ordered):
        if _totals(event).get("steps", 0.0) < _totals(before).get("steps", 0.0):
            kept += [before] * (before is not kept[-1]) + [event]
    return kept + ordered[-1:] * (ordered[-1] is not kept[-1])


def _totals(event: Event) -> dict[str, float]:
    """Return the counters of an event `step`, without the end of their names."""
    end = "_total"
    told = numbers(event.data).items()
    return {name[: -len(end)]: value for name, value in told if name.endswith(end)}


def phases(
    timeline: Timeline,
    *,
    queued: float | None = None,
    bound: Sequence[float] = (),
    left: float | None = None,
    ended: float | None = None,
) -> list[Phase]:
    """Return the phases of an attempt.

    A phase that all nodes or ranks complete (staging, training) ends with the last of them; one
    that each begins by itself ends when the first begins. The warm-up ends with the first counters
    that a rank sent. A phase whose end was not recorded is part of the next, so that the phases add
    up to the whole. A phase that ends before it begins, because the clocks of two hosts
    differ, is left out. Without any training, the last that began lasts until the script ended.

    Args:
        timeline: the attempt's.
        queued: when it was submitted.
        bound: when each rank became its program.
        left: when the script ended; None if that was not recorded.
        ended: when the job was over.
    """
    first, trained = timeline.first, timeline.trained
    # Each phase ends at its mark, in this order, and the next begins there. A mark may be missing:
    # not every program reports all events, and a killed job reports no end. Then the time goes to
    # the next phase with a mark, so that the sum stays the whole duration.
    marks: dict[str, float | None] = {
        "queue": first.get("started"),
        "start-up": first.get("staging", first.get("ready")),
        "staging": max((event.time for event in timeline.ready), default=None),
        "launch": first.get("rendezvous", max(bound, default=None)),
        "running": None,
        "rendezvous": first.get("warm-up"),
        "warm-up": first.get("step"),
        "training": trained,
    }
    begun = {
        "start-up": "started" in first,
        "staging": "staging" in first,
        "launch": "ready" in first,
        "running": bool(bound),
        "rendezvous": "rendezvous" in first,
        "warm-up": "warm-up" in first,
    }
    last = [name for name, has_begun in begun.items() if has_begun][-1:]
    if trained is None and last:
        marks[last[0]] = ended if left is None else left
    marks["end"] = ended
    stretches = []
    here = queued
    if here is None:
        here = first.get("started")
        del marks["queue"]
    for name, mark in marks.items():
        if mark is not None and here is not None:
            if mark >= here:  # else the clocks of two hosts differ: how long it took is not known
                stretches.append(Phase(name, round(mark - here, 6)))
            here = (
                mark if name == "queue" else max(here, mark)
            )  # the login host's clock counts once
    return stretches


def _signals(came: Mapping[str, Mapping[str, tuple[int, float]]]) -> dict[str, tuple[int, float]]:
    """Return count and last time by name; one to a step counts once, however many nodes got it."""
    signals = {}
    for name, nodes in came.items():
        of_script = nodes.get("batch", (0, 0.0))[0]
        of_steps = max((count for node, (count, _) in nodes.items() if node != "batch"), default=0)
        signals[name] = of_script + of_steps, max(last for _, last in nodes.values())
    return signals


def _data_wait(training: Sequence[Mapping[str, float]]) -> float | None:
    """Return waited / (steps' whole time), as the mean of the ranks that report both."""
    shares = [
        min(1.0, rank["data_wait_seconds"] / rank["step_seconds"])
        for rank in training
        if rank.get("step_seconds") and "data_wait_seconds" in rank
    ]
    return fmean(shares) if shares else None


def _rate(timeline: Timeline, training: Sequence[Mapping[str, float]]) -> float | None:
    """Return samples/s of all ranks between their first counters and their last."""
    began = min((counters[0].time for counters in timeline.steps.values()), default=0.0)
    took = max((counters[-1].time for counters in timeline.steps.values()), default=0.0) - began
    samples = sum(rank.get("samples", 0.0) for rank in training)
    return samples / took if samples and took > 0 else None
