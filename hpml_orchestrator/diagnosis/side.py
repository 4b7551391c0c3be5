"""Two runs side by side: what differs in their jobs, their time, their figures and findings."""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from hpml_orchestrator.diagnosis import parts
from hpml_orchestrator.diagnosis.model import Diagnosis, Facts
from hpml_orchestrator.diagnosis.shares import hours, hours_unit
from hpml_orchestrator.diagnosis.wording import status_line
from hpml_orchestrator.errors import InputError
from hpml_orchestrator.records.texts import first_few, printable

__all__ = ["NOISE", "Row", "Side", "compare", "text", "to_json"]

NOISE = 0.05
"""Smaller differences between one run each may be noise: the same limit as for sibling nodes."""

QUALITY = "quality"
"""Group of the figures of which a change in percent means nothing."""

_SECONDS = ("run", "phases", "between the steps")
_WIDTH = 100
_NAME, _VALUE = 30, 24


@dataclass(frozen=True)
class Row:
    """One figure or setting of both runs, as text; `change` is second / first - 1 of a figure."""

    group: str
    name: str
    first: str
    second: str
    change: float | None = None
    short: bool = False  # whether they differ by less than a second of the run

    @property
    def noise(self) -> bool:
        """Whether the two may differ by chance."""
        return self.change is not None and (self.short or abs(self.change) < NOISE)

    @property
    def change_text(self) -> str:
        """The change in percent, or what a reader has to know instead."""
        if self.change is None or self.first == self.second:
            return ""
        return "may be noise" if self.noise else f"{self.change:+.0%}"


@dataclass(frozen=True)
class Side:
    """A comparison of two runs.

    Attributes:
        doubts: sentences, why the figures are not comparable; empty if they are.
        rows: what differs in the job files, then the figures.
        gone, new, both: verdicts of the findings of only the first, only the second, both runs.
    """

    first: Diagnosis
    second: Diagnosis
    headline: str
    doubts: tuple[str, ...]
    rows: tuple[Row, ...]
    gone: tuple[str, ...]
    new: tuple[str, ...]
    both: tuple[str, ...]

    @property
    def caution(self) -> str:
        """What one run each cannot show."""
        return f"one run each: nothing is certain, and differences below {NOISE:.0%} may be noise"


def compare(first: Diagnosis, second: Diagnosis) -> Side:
    """Compare two runs.

    Raises:
        InputError: both are the same run.
    """
    one, other = first.facts, second.facts
    if one.run == other.run:
        raise InputError("name two different runs", field="RUN", value=one.run)
    doubts = tuple(_doubts(one, other))
    before = {finding.kind: finding.verdict for finding in first.findings}
    after = {finding.kind: finding.verdict for finding in second.findings}
    return Side(
        first,
        second,
        f"Not comparable: {'; '.join(doubts)}" if doubts else _headline(one, other),
        doubts,
        (*_settings(one, other), *_figures(one, other)),
        gone=tuple(verdict for kind, verdict in before.items() if kind not in after),
        new=tuple(verdict for kind, verdict in after.items() if kind not in before),
        both=tuple(
            f"{verdict}; then: {after[kind]}" if verdict != after[kind] else verdict
            for kind, verdict in before.items()
            if kind in after
        ),
    )


# --- whether they can be compared


def _doubts(first: Facts, second: Facts) -> Iterator[str]:
    """Yield why the figures of two runs do not show the effect of a change."""
    for facts in (first, second):
        if not facts.over:
            yield f"{facts.run} is not over ({facts.state})"
        elif facts.state != "COMPLETED":
            yield f"{facts.run} did not complete ({facts.state})"
    for what, name in (("jobs", _name), ("programs", _program)):
        names = [name(facts.job) for facts in (first, second)]
        if names[0] != names[1]:
            yield f"different {what}: {names[0]} and {names[1]}"
    measured: tuple[tuple[str, Callable[[Facts], Any]], ...] = (
        ("ranks", lambda facts: facts.world_size or None),
        ("GPUs", lambda facts: facts.gpu_count),
        ("nodes", lambda facts: facts.node_count or None),
        ("samples per step and rank", _batch),
        ("types of GPU", _gpu_names),
    )
    for what, figure in measured:
        values = [figure(facts) for facts in (first, second)]
        if None not in values and not _equal(*values):
            yield f"different {what}: {_value(values[0])} and {_value(values[1])}"
    for facts, other in ((first, second), (second, first)):
        if parts.mean_parts(facts.ranks) and not parts.mean_parts(other.ranks):
            yield f"only {facts.run} reports its steps"


def _name(job: Mapping[str, Any]) -> str:
    return str(job.get("name") or "-")


def _program(job: Mapping[str, Any]) -> str:
    """Return the script of a job, or its command up to the first option."""
    if job.get("script"):
        return str(job["script"]).rpartition("/")[2]
    words = [str(word) for word in job.get("command") or ()]
    options = (place for place, word in enumerate(words) if word.startswith("-"))
    return " ".join(words[: next(options, len(words))]) or "-"


def _batch(facts: Facts) -> float | None:
    """Return the samples in a step of one rank, as they were counted."""
    batches = [rank.samples / rank.steps for rank in facts.ranks if rank.samples and rank.steps]
    return fmean(batches) if batches else None


def _gpu_names(facts: Facts) -> str | None:
    names = sorted({gpu.name for node in facts.nodes for gpu in node.gpus if gpu.name})
    return first_few(names) if names else None


def _equal(first: Any, second: Any) -> bool:
    if isinstance(first, float) and isinstance(second, float):  # the last batch may be smaller
        return abs(first - second) <= NOISE * max(first, second)
    return bool(first == second)


def _headline(first: Facts, second: Facts) -> str:
    """Return which run is faster, by the samples per second if both count them."""
    rates = [parts.samples_per_second(facts.ranks) for facts in (first, second)]
    if rates[0] and rates[1]:
        change, what = rates[1] / rates[0] - 1, "samples per second"
        words = ("more", "fewer")
    elif first.elapsed_seconds and second.elapsed_seconds:
        change, what = second.elapsed_seconds / first.elapsed_seconds - 1, "time"
        words = ("more", "less")
    else:
        return "Neither speed nor time of both runs is known"
    if abs(change) < NOISE:
        return f"No difference that one run each can show: {what} {change:+.1%}"
    verb = "processes" if what != "time" else "takes"
    return f"{second.run} {verb} {abs(change):.0%} {words[change < 0]} {what}"


# --- rows


def _settings(first: Facts, second: Facts) -> Iterator[Row]:
    """Yield what differs of the code, the points of a sweep and the job files."""
    if first.code != second.code:
        yield Row("code", "commit", _value(first.code), _value(second.code))
    for name in {**first.values, **second.values}:
        before, after = first.values.get(name), second.values.get(name)
        if before != after:
            yield Row("point of the sweep", str(name).lstrip("-"), _value(before), _value(after))
    one, other = dict(_flat(first.job)), dict(_flat(second.job))
    for name in {**one, **other}:
        before, after = one.get(name), other.get(name)
        if before == after:
            continue
        if isinstance(before, list) and isinstance(after, list):
            before, after = _only(before, after), _only(after, before)
        yield Row("job file", name, _value(before), _value(after))


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each field with its dotted name; entries of a list have their own name, or number."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flat(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list) and value and all(isinstance(one, Mapping) for one in value):
        for place, entry in enumerate(value):
            yield from _flat(dict(entry), f"{name}.{entry.get('name', place)}")
    else:
        yield name, value


def _only(words: Sequence[Any], others: Sequence[Any]) -> str:
    """Return the words that the others do not have there, each with the option it belongs to."""
    mine, theirs = [str(word) for word in words], [str(word) for word in others]
    found: list[str] = []
    for tag, start, end, _, _ in difflib.SequenceMatcher(None, mine, theirs, False).get_opcodes():
        if tag == "equal" or start == end:
            continue
        begin = start - (start > 0 and mine[start - 1].startswith("-") and mine[start][:1] != "-")
        found.append(" ".join(mine[begin:end]))
    return " … ".join(found)


def _value(value: Any) -> str:
    """Return a value as a job file has it; `-` for nothing."""
    if value is None or value == "" or value in ([], {}):
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return " ".join(str(one) for one in value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _figures(first: Facts, second: Facts) -> Iterator[Row]:
    """Yield the figures of both runs: time, steps, throughput, cost and quality."""
    tables: tuple[tuple[str, Callable[[Facts], Mapping[str, float]], Callable[[float], str]], ...]
    tables = (
        ("run", _whole, parts.duration),
        ("phases", lambda facts: facts.phases, parts.duration),
        ("one step, mean of the ranks", _step, parts.duration),
        ("between the steps", _between, parts.duration),
        ("throughput", _throughput, lambda value: f"{value:,.4g}"),
        (QUALITY, lambda facts: facts.accuracy, lambda value: f"{value:.4g}"),
    )
    for group, figures, word in tables:
        one, other = figures(first), figures(second)
        for name in {**one, **other}:
            before, after = one.get(name), other.get(name)
            change = after / before - 1 if before and after is not None else None
            yield Row(
                group,
                name,
                "-" if before is None else word(before),
                "-" if after is None else word(after),
                None if group == QUALITY else change,
                group in _SECONDS and abs((before or 0.0) - (after or 0.0)) < 1,
            )


def _whole(facts: Facts) -> dict[str, float]:
    return {} if facts.elapsed_seconds is None else {"run time": facts.elapsed_seconds}


def _step(facts: Facts) -> dict[str, float]:
    steps = [rank.steps for rank in facts.ranks if rank.steps]
    mean = parts.mean_parts(facts.ranks)
    return {
        name: seconds / fmean(steps)
        for name, seconds in mean.items()
        if steps and name not in parts.BETWEEN_STEPS
    }


def _between(facts: Facts) -> dict[str, float]:
    mean = parts.mean_parts(facts.ranks)
    return {name: mean[name] for name in parts.BETWEEN_STEPS if name in mean}


def _throughput(facts: Facts) -> dict[str, float]:
    figures = {}
    if rate := parts.samples_per_second(facts.ranks):
        figures["samples/s in steps"] = rate
    if spent := hours(facts):
        figures[hours_unit(facts)] = spent
    return figures


# --- words


def text(side: Side) -> str:
    """Return the comparison for a terminal."""
    lines = [
        f"{'first':<10}{status_line(side.first)}",
        f"{'second':<10}{status_line(side.second)}",
        *_wrapped("verdict", side.headline),
        *_wrapped("", side.caution),
    ]
    group = ""
    for row in side.rows:
        if row.group != group:
            group = row.group
            lines += ["", f"{group:<{_NAME + 2}}{'first':<{_VALUE}}second"]
        lines += _row(row)
    lines.append("")
    for name, verdicts in (("gone", side.gone), ("new", side.new), ("in both", side.both)):
        for verdict in verdicts:
            lines += _wrapped(name, verdict)
    if not side.doubts:
        lines += _wrapped("next", f"hpml report {side.first.facts.run} --try measures with repeats")
    return "\n".join(printable(line) for line in lines)


def _wrapped(name: str, value: str) -> list[str]:
    first, *rest = textwrap.wrap(value, _WIDTH - 10) or [""]
    return [f"{name:<10}{first}", *(f"{'':<10}{line}" for line in rest)]


def _row(row: Row) -> Iterable[str]:
    """Yield the lines of a row; long values get lines of their own."""
    if max(len(row.first), len(row.second)) >= _VALUE or len(row.name) >= _NAME:
        yield f"  {row.name}"
        for name, value in (("first", row.first), ("second", row.second)):
            yield from (f"    {line}" for line in _wrapped(name, value))
        return
    yield f"  {row.name:<{_NAME}}{row.first:<{_VALUE}}{row.second:<14}{row.change_text}".rstrip()


def to_json(side: Side) -> dict[str, Any]:
    """Return the comparison for programs."""
    return {
        "runs": [side.first.facts.run, side.second.facts.run],
        "headline": side.headline,
        "comparable": not side.doubts,
        "doubts": list(side.doubts),
        "caution": side.caution,
        "rows": [
            {
                "group": row.group,
                "name": row.name,
                "first": row.first,
                "second": row.second,
                "change": row.change,
                "may_be_noise": row.noise,
            }
            for row in side.rows
        ],
        "findings": {"gone": side.gone, "new": side.new, "both": side.both},
    }
