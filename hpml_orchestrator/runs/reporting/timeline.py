"""The events of an attempt in one pass: its phases, counters and checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from hpml_orchestrator.runs.reporting.monitor import numbers

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from hpml_orchestrator.records.feed import Event


def link_of(data: Mapping[str, object]) -> tuple[str, str] | None:
    """Return name and address in the data of an event `link`; None if it is not a web address."""
    name, url = str(data.get("name") or "link"), data.get("url")
    if isinstance(url, str) and url.startswith(("https://", "http://")) and not url.split()[1:]:
        return name, url
    return None


@dataclass(frozen=True)
class Phase:
    """One stretch of a run's time.

    The names are `queue`, `start-up`, `staging`, `launch`, `rendezvous`, `preparation`, `warm-up`,
    `training`, `end`; `running` if the program reports nothing. Without `rendezvous` that is part
    of the preparation: the program did not report where it ended.
    """

    name: str
    seconds: float  # wall-clock time


class Timeline:
    """The events of an attempt that a summary needs, gathered in one pass.

    Args:
        events: of one attempt, in any order.

    Attributes:
        first: when each kind of event happened first.
        last: the newest event of each kind.
        ready: the nodes' events of that name.
        result: the last that a rank reported.
        trained: when a rank last reported counters or a result.
        steps: each rank's first and last counters in order, of every start of the rank.
        certain_steps: named by checkpoints, resumed ranks and ranks that stopped.
        saved_steps: named by checkpoints.
        saves: the seconds of each checkpoint, by rank.
        links: addresses by name; of two with the same name, the last.
    """

    def __init__(self, events: Iterable[Event]) -> None:
        self.first: dict[str, float] = {}
        self.last: dict[str, Event] = {}
        self.ready: list[Event] = []
        self.result: Event | None = None
        self.trained: float | None = None
        self.steps: dict[int, list[Event]] = {}
        self.certain_steps: list[int] = []
        self.saved_steps: list[int] = []
        self.saves: dict[int | None, list[float]] = {}
        self.links: dict[str, str] = {}
        self._signals: dict[str, dict[str, tuple[int, float]]] = {}
        for event in events:
            self._add(event)
        self.steps = {rank: _ends(counters) for rank, counters in self.steps.items()}

    def _add(self, event: Event) -> None:
        time = event.time
        self.first[event.event] = min(time, self.first.get(event.event, time))
        if time >= self.last.get(event.event, event).time:
            self.last[event.event] = event
        final = bool(event.data.get("final"))
        if event.event == "step" or final:
            self.trained = max(time, self.trained or time)
        if final and (self.result is None or time >= self.result.time):
            self.result = event
        if event.event == "ready":
            self.ready.append(event)
        if event.event == "link" and (link := link_of(event.data)):
            self.links.update([link])
        if event.event == "signal":
            came = self._signals.setdefault(str(event.data.get("name")), {})
            count, before = came.get(event.node, (0, time))
            came[event.node] = count + int(numbers(event.data).get("count", 0.0)), max(before, time)
        if event.event == "step" and event.rank is not None:
            self.steps.setdefault(event.rank, []).append(event)
        if event.event in ("checkpoint", "stopping", "resumed"):
            self._add_certain(event)

    def _add_certain(self, event: Event) -> None:
        figures = numbers(event.data)
        steps = [int(figures["step"])] if "step" in figures else []
        self.certain_steps += steps
        if event.event == "checkpoint":
            self.saved_steps += steps
            seconds = max(0.0, figures.get("seconds", 0.0))
            self.saves.setdefault(event.rank, []).append(seconds)

    @property
    def signals(self) -> dict[str, tuple[int, float]]:
        """Signals by name: how often, and when last.

        One to a step counts once, however many nodes got it; node `batch` is the script.
        """
        signals = {}
        for name, nodes in self._signals.items():
            of_script = nodes.get("batch", (0, 0.0))[0]
            # A signal to a step reaches every node's agent. The largest count is how often it was
            # sent; the sum would multiply it by the number of nodes.
            counts = [count for node, (count, _) in nodes.items() if node != "batch"]
            last = max(last for _, last in nodes.values())
            signals[name] = of_script + max(counts, default=0), last
        return signals

    def grown(self) -> list[dict[str, float]]:
        """Return each rank's counters since the warm-up ended, see `Summary.training`.

        All figures of the training derive from these, so that they agree. The counters of a rank
        that was restarted begin at 0 again; what it had counted before is added.
        """
        ranks = []
        for rank, counters in sorted(self.steps.items()):
            # The first event is the origin, not part of the sum: what was counted before it belongs
            # to the warm-up. A drop of `steps` means that the rank has restarted from 0.
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
    ordered = sorted(counters, key=lambda event: event.time)
    kept = ordered[:1]
    for before, event in pairwise(ordered):
        if _totals(event).get("steps", 0.0) < _totals(before).get("steps", 0.0):
            kept += [before] * (before is not kept[-1]) + [event]
    return kept + ordered[-1:] * (ordered[-1] is not kept[-1])


def _totals(event: Event) -> dict[str, float]:
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

    A phase that all nodes or ranks complete (staging, training) ends with the last of them. A phase
    that each of them leaves separately ends when the first does. The warm-up ends with the first
    counters of any rank. A phase without a recorded end is part of the next one, so that the phases
    add up to the whole. A phase that would end before it begins, because the clocks of two hosts
    differ, is left out. Without training, the last phase that began lasts until the script ended.

    Args:
        timeline: the attempt's.
        queued: when it was submitted.
        bound: when each rank became its program.
        left: when the script ended; None if that was not recorded.
        ended: when the job was over.
    """
    first, trained = timeline.first, timeline.trained
    # Without a mark of its beginning the time before the first step is not called warm-up.
    warming = first.get("warm-up", first.get("training"))
    # Each phase ends at its mark, in this order, and the next begins there. A mark may be missing:
    # not every program reports all events, and a killed job reports no end. Then the time goes to
    # the next phase with a mark, so that the sum stays the whole duration.
    marks: dict[str, float | None] = {
        "queue": first.get("started"),
        "start-up": first.get("staging", first.get("ready")),
        "staging": max((event.time for event in timeline.ready), default=None),
        "launch": first.get("rendezvous", max(bound, default=None)),
        "running": None,
        "rendezvous": first.get("preparation"),
        "preparation": first.get("step") if warming is None else warming,
        "warm-up": None if warming is None else first.get("step"),
        "training": trained,
    }
    begun = {
        "start-up": "started" in first,
        "staging": "staging" in first,
        "launch": "ready" in first,
        "running": bool(bound),
        "rendezvous": "rendezvous" in first,
        "preparation": "preparation" in first,
        "warm-up": warming is not None,
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
