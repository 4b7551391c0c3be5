"""Find the chain of work and collectives that decides how long the steps of several ranks take.

A collective starts when the last rank is ready for it, and all ranks get its result at about the
same time. So the path is found backwards, from the end of the last step: along the work of a rank
to the collective that it waited for, through its transfer to the rank that was ready last, and on
along the work of that one. What other ranks did meanwhile costs no time.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hpml_orchestrator.diagnosis.timeline import Collective, RankTimeline

_Key = TypeVar("_Key")
_Spent = dict[tuple[str, "int | None"], dict[tuple[str, int], float]]

_IDLE = "no kernel"
# A rank waited for a collective if it did nothing for so long before its end, and worked soon
# after; otherwise the collective ended during a pause of Python.
_LEAST_WAIT, _WAIT_SHARE, _SOON = 20.0, 0.1, 500.0  # microseconds; share of the transfer
_EARLY = 50.0  # microseconds
_QUEUED = 100.0  # microseconds between two collectives of which one waited for the other to end
_LATE = 0.05  # a rank is late if the others wait for it for this share of the steps
_LEAST_NAME = 0.1  # of a part, to be named
_LAYER = 0.5  # of an operator's time in one layer, to name the layer


@dataclass(frozen=True)
class PathPart:
    """A part of the critical path; seconds are per step."""

    kind: str  # `work`, `transfer` or `data`
    rank: int | None  # None: all ranks alike
    seconds: float
    names: tuple[tuple[str, float], ...]  # the operators or collectives that take most of it

    def text(self) -> str:
        """Return the part in a few words."""
        whose = "the ranks'" if self.rank is None else f"rank {self.rank}'s"
        names = ", ".join(f"{_ms(seconds)} {name}" for name, seconds in self.names)
        what = {"work": f"{whose} work", "data": f"{whose} wait for data"}.get(
            self.kind, "transfer"
        )
        return what + (f" ({names})" if names else "")


@dataclass(frozen=True)
class CriticalPath:
    """What decides how long a step takes; seconds are per step."""

    step_seconds: float
    parts: tuple[PathPart, ...]  # the longest first
    waits: str  # the collective that waits longest for the rank of the first part, or nothing
    gain_seconds: float  # at most, if that rank was as fast as the next one

    def text(self) -> str:
        """Return the path in one sentence."""
        first, *others = self.parts
        text = f"of a step of {_ms(self.step_seconds)}, {_ms(first.seconds)} are {first.text()}"
        if self.waits:
            text += f"; {self.waits} waits for it, {_ms(self.gain_seconds)} longer than for others"
        shown = [one for one in others if one.seconds >= _LATE * self.step_seconds][:2]
        for number, one in enumerate(shown):
            text += f"{', ' if number else '; next: '}{_ms(one.seconds)} {one.text()}"
        return text


def find_critical_path(timelines: Sequence[RankTimeline]) -> CriticalPath | None:
    """Return the critical path; None of one rank, or if the ranks have no collective in common."""
    if not timelines[1:] or not (matched := _match(timelines)):
        return None
    return _Search(timelines, matched).run()


class _Search:
    """The walk back along the ranks; their clocks are set by the ends of collectives."""

    def __init__(
        self, timelines: Sequence[RankTimeline], matched: Sequence[tuple[Collective, ...]]
    ) -> None:
        self.lines, self.lanes = timelines, [[one.lane for one in row] for row in matched]
        count = range(len(timelines))
        # Of each clock before the first rank's.
        self.ahead = [median(row[n].end - row[0].end for row in matched) for n in count]
        self.begins = [[row[n].begin - self.ahead[n] for n in count] for row in matched]
        self.ends = [[row[n].end - self.ahead[n] for n in count] for row in matched]
        self.names = _names(timelines[0], [row[0] for row in matched])
        # By kind and place in `lines`, then by name and layer: the time on the path.
        self.spent: _Spent = defaultdict(lambda: defaultdict(float))
        # By place, then by name of a collective: how long the others waited for this rank.
        self.waits: dict[int | None, dict[str, float]] = defaultdict(lambda: defaultdict(float))

    def run(self) -> CriticalPath:
        ends = [line.end - ahead for line, ahead in zip(self.lines, self.ahead, strict=True)]
        now = stop = max(ends)
        at, number, came = ends.index(now), len(self.names), None
        while (found := self._waited_for(at, number, now, came)) is not None:
            self._work(at, self.ends[found][at], now)
            order = sorted(range(len(self.lines)), key=lambda rank: self.begins[found][rank])
            ready = min(self.begins[found][order[-1]], self.ends[found][at])
            name, late = self.names[found], ready - self.begins[found][order[-2]]
            self._add("transfer", 0, name, 0, self.ends[found][at] - ready)
            self.waits[order[-1]][name] += max(0.0, late)
            at, number, now, came = order[-1], found, ready, self.lanes[found][order[-1]]
        begin = self.lines[at].steps[0][0] - self.ahead[at]
        self._work(at, begin, now)
        return self._result(stop - begin, len(self.lines[0].steps))

    def _waited_for(self, at: int, number: int, now: float, came: object) -> int | None:
        """Return the last collective before a time that a rank waited for."""
        begin = self.lines[at].steps[0][0] - self.ahead[at]
        for found in range(number - 1, -1, -1):
            end = self.ends[found][at]
            if end <= begin:
                return None
            if end > now:
                continue
            if came is not None and came == self.lanes[found][at] and now - end <= _QUEUED:
                return found
            if self._is_wait(self.lines[at], end + self.ahead[at], end - max(self.begins[found])):
                return found
        return None

    def _is_wait(self, line: RankTimeline, end: float, transfer: float) -> bool:
        """Whether a rank did nothing until a collective ended."""
        # The thread that ran it may see its end later than the one that waited.
        place, mark = (bisect_right(times, end - _EARLY) for times in (line.begins, line.marks))
        before = [line.operations[place - 1].end] if place else []
        before += [line.marks[mark - 1]] if mark else []
        after = [line.begins[place]] if place < len(line.begins) else []
        after += [line.marks[mark]] if mark < len(line.marks) else []
        waited = end - max(before, default=end)
        soon = min(after, default=end) - end <= max(waited, _SOON)
        return soon and waited >= max(_LEAST_WAIT, _WAIT_SHARE * transfer)

    def _work(self, at: int, begin: float, end: float) -> None:
        """Add what a rank did in a time: waiting for data, operators, and the time between them."""
        line, ahead = self.lines[at], self.ahead[at]
        now, end = begin + ahead, end + ahead
        for first, last in line.data:
            if now < last and first < end:
                self._operators(at, now, max(now, first))
                self._add("data", at, "", 0, min(last, end) - max(now, first))
                now = min(last, end)
        self._operators(at, now, end)

    def _operators(self, at: int, now: float, end: float) -> None:
        line = self.lines[at]
        place = max(0, bisect_right(line.begins, now) - 1)
        for one in line.operations[place : bisect_left(line.begins, end) + 1]:
            idle = _IDLE if line.on_gpu else f"Python before {one.name}"
            self._add("work", at, idle, one.layer, min(one.begin, end) - now)
            now = min(end, max(now, one.begin))
            self._add("work", at, one.name, one.layer, min(one.end, end) - now)
            now = min(end, max(now, one.end))
        self._add("work", at, _IDLE if line.on_gpu else "Python", 0, end - now)

    def _add(self, kind: str, at: int, name: str, layer: int, time: float) -> None:
        if time > 0:
            self.spent[kind, at][name, layer] += time

    def _result(self, total: float, steps: int) -> CriticalPath:
        waited = {at: sum(times.values()) for at, times in self.waits.items()}
        merged: _Spent = defaultdict(lambda: defaultdict(float))
        for (kind, at), times in self.spent.items():
            is_late = kind != "transfer" and at in waited and waited[at] >= _LATE * total
            for name, time in times.items():
                merged[kind, at if is_late else None][name] += time
        each = 1e6 * steps
        ordered = sorted(merged, key=lambda key: -sum(merged[key].values()))
        parts = [
            PathPart(
                kind,
                None if at is None else self.lines[at].rank,
                sum(merged[kind, at].values()) / each,
                tuple((name, time / each) for name, time in _costliest(merged[kind, at])),
            )
            for kind, at in ordered
        ]
        late = ordered[0][1]
        waits = "" if late is None else _most(self.waits[late])[0]
        gain = 0.0 if late is None else waited[late] / each
        return CriticalPath(total / each, tuple(parts), waits, gain)


def _match(timelines: Sequence[RankTimeline]) -> list[tuple[Collective, ...]]:
    """Return the collectives that all ranks have, each as it was on every rank."""

    def zipped(rows: Sequence[Sequence[Collective]]) -> list[tuple[Collective, ...]]:
        kinds = [[one.kind for one in row] for row in rows]
        return [*zip(*rows, strict=True)] if all(one == kinds[0] for one in kinds) else []

    if whole := zipped([line.collectives for line in timelines]):
        return whole
    # One rank's trace begins or ends a collective earlier than another's: compare step by step.
    found = []
    for number in range(min(len(line.steps) for line in timelines)):
        found += zipped([_of_step(line, number) for line in timelines])
    return found


def _of_step(line: RankTimeline, number: int) -> list[Collective]:
    begins = [*(begin for begin, _ in line.steps), float("inf")]
    return [one for one in line.collectives if begins[number] <= one.begin < begins[number + 1]]


def _names(line: RankTimeline, collectives: Sequence[Collective]) -> list[str]:
    """Return a name for each collective: its kind, and its number in its step."""
    begins, count, names = [begin for begin, _ in line.steps], len(collectives), []
    per_step = count // len(begins)
    seen: Counter[tuple[int, str]] = Counter()
    for number, one in enumerate(collectives):
        step = bisect_right(begins, one.begin)
        if line.on_gpu and per_step:  # the host is steps ahead of its GPU
            step = number // per_step
        seen[step, one.kind] += 1
        names.append(f"{one.kind} {seen[step, one.kind]}")
    return names


def _costliest(times: Mapping[tuple[str, int], float]) -> list[tuple[str, float]]:
    """Return the two names with most time, with the layer if most of it is in one."""
    layers: dict[str, dict[int, float]] = defaultdict(dict)
    for (name, layer), time in times.items():
        layers[name][layer] = time
    sums = {name: sum(took.values()) for name, took in layers.items() if name}
    found = []
    for name in sorted(sums, key=lambda name: -sums[name])[:2]:
        layer, most = _most(layers[name])
        shown = layer and most > _LAYER * sums[name]
        if sums[name] >= _LEAST_NAME * sum(times.values()):
            found.append((f"{name} {layer}" if shown else name, sums[name]))
    return found


def _most(times: Mapping[_Key, float]) -> tuple[_Key, float]:
    return max(times.items(), key=lambda pair: pair[1])


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"
