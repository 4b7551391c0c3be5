"""Compares two runs: their jobs, times, figures and findings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from hpml_orchestrator.diagnosis import comparable, shares
from hpml_orchestrator.diagnosis.comparable import only_words, value_text
from hpml_orchestrator.diagnosis.model import Diagnosis, Facts
from hpml_orchestrator.diagnosis.report import status_line
from hpml_orchestrator.diagnosis.shares import hours, hours_unit, is_judged
from hpml_orchestrator.diagnosis.thresholds import OVER_ASKED
from hpml_orchestrator.document.text import field_lines
from hpml_orchestrator.errors import InputError
from hpml_orchestrator.records.texts import duration_text, printable

NOISE = 0.05
"""Smaller differences between one run each may be noise: the same limit as for sibling nodes."""
NOISE_SECONDS = 1.0
"""The same for the times of a run, however short it was."""

QUALITY = "quality"
"""Group of the figures of which a change in percent means nothing."""

_SECONDS = ("run", "phases", "between the steps")
_STEP = "one step, mean of the ranks"
_RATE = "samples/s in steps"
_NAME, _VALUE = 30, 24
_OF_STEPS = frozenset(
    "cpu-contention waits-for-data slow-rank communication host-to-device launch-bound slow-saving "
    "slow-evaluation".split()
)
_OF_USE = frozenset(
    "slow-storage tensor-cores-idle launch-bound cpu-bound throttled faulty-gpu memory-pressure "
    "gpu-unused cpus-unused memory-over-asked".split()
)
_SILENT = frozenset(("cpu-bound", "faulty-gpu", "memory-over-asked", "time-over-asked"))
"""Kinds that have no sentence if all is well."""


@dataclass(frozen=True)
class ComparisonRow:
    """One figure or setting of both runs, as text.

    Attributes:
        change: second / first - 1 of a figure; None if it has none, or the runs did other work.
        short: whether the times of the run that it is made of differ by less than a second.
    """

    group: str
    name: str
    first: str
    second: str
    change: float | None = None
    short: bool = False

    @property
    def noise(self) -> bool:
        """Whether the two may differ by chance; the change counts as it is printed."""
        return self.change is not None and (self.short or round(abs(self.change), 2) < NOISE)

    @property
    def change_text(self) -> str:
        """The change in percent, or that it may be noise; empty without a change."""
        if self.change is None or self.first == self.second:
            return ""
        return "may be noise" if self.noise else f"{self.change:+.0%}"


@dataclass(frozen=True)
class RunComparison:
    """A comparison of two runs.

    Attributes:
        doubts: sentences, why the figures are not comparable; empty if they are.
        differences: sentences, in what the work of the runs differs; then only rates are compared.
        rows: what differs in the job files, then the figures.
        gone, new, both: verdicts of the findings of only the first, only the second, both runs.
        unjudged: of findings that the other run cannot have, because that was not judged there.
    """

    first: Diagnosis
    second: Diagnosis
    headline: str
    doubts: tuple[str, ...]
    differences: tuple[str, ...]
    rows: tuple[ComparisonRow, ...]
    gone: tuple[str, ...]
    new: tuple[str, ...]
    both: tuple[str, ...]
    unjudged: tuple[str, ...]

    @property
    def caution(self) -> str:
        """What one run each cannot show."""
        return (
            f"one run each: nothing is certain, and differences below {NOISE:.0%}, or of less than "
            f"{NOISE_SECONDS:.0f} s of the run, may be noise"
        )


def compare(first: Diagnosis, second: Diagnosis) -> RunComparison:
    """Compare two runs.

    Args:
        first: the diagnosis of one run.
        second: of the other.

    Raises:
        InputError: both are the same run.
    """
    one, other = first.facts, second.facts
    if one.run == other.run:
        raise InputError("name two different runs", field="RUN", value=one.run)
    doubts, differences = [*comparable.doubts(one, other)], (*comparable.differences(one, other),)
    rated = all(shares.samples_per_second(facts.ranks) for facts in (one, other))
    if doubts or not rated:  # without rates only times are known, and they are of different work
        doubts += differences
    # groups and names of rows whose change in percent compares the same work
    same: tuple[str, ...] | None = (_RATE, _STEP) if differences else None
    rows = tuple(_figures(one, other, () if doubts else same))
    before = {finding.kind: finding.verdict for finding in first.findings}
    after = {finding.kind: finding.verdict for finding in second.findings}
    gone, lacking = _only_in(first, second, set(after))
    new, lacking_before = _only_in(second, first, set(before))
    if doubts:  # a finding of only one of them shows nothing
        before, gone, new, lacking, lacking_before = {}, (), (), (), ()
    headline = f"Not comparable: {'; '.join(doubts)}" if doubts else _headline(other, rows)
    if differences and not doubts:
        headline += f"; {'; '.join(differences)}: only rates are compared"
    return RunComparison(
        first,
        second,
        headline,
        tuple(doubts),
        differences,
        (*_settings(one, other), *rows),
        gone=gone,
        new=new,
        both=tuple(
            f"{verdict}; then: {after[kind]}" if verdict != after[kind] else verdict
            for kind, verdict in before.items()
            if kind in after
        ),
        unjudged=(*lacking, *lacking_before),
    )


# --- findings of one run


def _only_in(
    having: Diagnosis, other: Diagnosis, found: set[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the findings that the other run does not have, and those not judged there."""
    gone, unjudged = [], []
    for finding in having.findings:
        if finding.kind in found:
            continue
        why = _why_not_judged(finding.kind, other)
        if why:
            runs = having.facts.run, other.facts.run
            unjudged.append(f"{finding.verdict} in {runs[0]}; not judged in {runs[1]}: {why}")
        else:
            gone.append(finding.verdict)
    return tuple(gone), tuple(unjudged)


def _why_not_judged(kind: str, diagnosis: Diagnosis) -> str:
    """Return why a kind of finding was not judged in a run; empty if it was."""
    facts = diagnosis.facts
    if kind in diagnosis.judged or (kind == "slow-staging" and not facts.job.stage):
        return ""
    needs = {one.kind: f"it needs {one.needs}" for one in diagnosis.unknown}
    # Findings about steps all need the channel, and those about use the monitor. What was missing
    # for one of them was missing for all.
    sources = [kind, *(["waits-for-data"] if kind in _OF_STEPS else [])]
    if kind in _OF_USE and not facts.nodes:
        sources += ["gpu-unused", "cpus-unused"]
    if found := next((source for source in sources if source in needs), ""):
        return needs[found]
    if kind in OVER_ASKED and not is_judged(facts):
        return "it was shorter than 10 minutes, or had whole nodes"
    return "" if kind in _SILENT else "it has no figures for it, or another finding explains them"


def _headline(second: Facts, rows: Sequence[ComparisonRow]) -> str:
    """Return which run is faster, by the samples per second if both count them."""
    changes = {row.name: row for row in rows if row.change is not None}
    row = changes.get(_RATE) or changes.get("run time")
    if row is None or row.change is None:
        return "Neither speed nor time of both runs is known"
    what, words = ("samples per second", ("more", "fewer"))
    if row.name != _RATE:
        what, words = "time", ("more", "less")
    if row.noise:
        of = f"{row.first} and {row.second}" if row.short else f"{row.change:+.0%}"
        return f"No difference that one run each can show: {what} {of}"
    verb = "processes" if row.name == _RATE else "takes"
    return f"{second.run} {verb} {abs(row.change):.0%} {words[row.change < 0]} {what}"


# --- rows


def _settings(first: Facts, second: Facts) -> Iterator[ComparisonRow]:
    """Yield what differs of the code, the points of a sweep and the job files.

    A field that only one job has, as those of an entry of `stage`, differs if it has no default.
    """
    if first.code != second.code:
        yield ComparisonRow("code", "commit", value_text(first.code), value_text(second.code))
    for name in {**first.values, **second.values}:
        before, after = first.values.get(name), second.values.get(name)
        if before != after:
            yield ComparisonRow(
                "point of the sweep", str(name).lstrip("-"), value_text(before), value_text(after)
            )
    jobs = first.job, second.job
    one, other = (dict(_flat(job.to_json())) for job in jobs)
    known = {name for job in jobs for name, _ in _flat(job.to_json(defaults=False))}
    for name in {**one, **other}:
        before, after = one.get(name), other.get(name)
        if before == after or ((name in one) != (name in other) and name not in known):
            continue
        if isinstance(before, list) and isinstance(after, list):
            before, after = only_words(before, after), only_words(after, before)
        yield ComparisonRow("job file", name, value_text(before), value_text(after))


def _flat(value: object, name: str = "") -> Iterator[tuple[str, object]]:
    """Yield each field with its dotted name; entries of a list have their own name, or number."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flat(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list) and value and all(isinstance(one, Mapping) for one in value):
        for place, entry in enumerate(value):
            fields = {key: inner for key, inner in entry.items() if key != "name"}
            yield from _flat(fields, f"{name}.{entry.get('name', place)}")
    else:
        yield name, value


def _figures(first: Facts, second: Facts, same: Sequence[str] | None) -> Iterator[ComparisonRow]:
    """Yield the figures of both runs: time, steps, throughput, cost and quality."""
    times = [facts.elapsed_seconds or 0.0 for facts in (first, second)]
    is_short = abs(times[0] - times[1]) < NOISE_SECONDS
    tables: tuple[tuple[str, Callable[[Facts], Mapping[str, float]], Callable[[float], str]], ...]
    tables = (
        ("run", _whole, duration_text),
        ("phases", lambda facts: facts.phases, duration_text),
        (_STEP, _step, duration_text),
        ("between the steps", _between, duration_text),
        ("throughput", _throughput, lambda value: f"{value:,.4g}"),
        (QUALITY, lambda facts: facts.accuracy, lambda value: f"{value:.4g}"),
    )
    for group, figures, word in tables:
        one, other = figures(first), figures(second)
        for name in {**one, **other}:
            before, after = one.get(name), other.get(name)
            change = after / before - 1 if before and after is not None else None
            if group == QUALITY or not (same is None or group in same or name in same):
                change = None
            short = group in _SECONDS and abs((before or 0.0) - (after or 0.0)) < NOISE_SECONDS
            yield ComparisonRow(
                group,
                name,
                "-" if before is None else word(before),
                "-" if after is None else word(after),
                change,
                short or (is_short and name.endswith("-hours")),
            )


def _whole(facts: Facts) -> dict[str, float]:
    return {} if facts.elapsed_seconds is None else {"run time": facts.elapsed_seconds}


def _step(facts: Facts) -> dict[str, float]:
    steps = [rank.steps for rank in facts.ranks if rank.steps]
    mean = shares.mean_parts(facts.ranks)
    return {
        name: seconds / fmean(steps)
        for name, seconds in mean.items()
        if steps and name not in shares.BETWEEN_STEPS
    }


def _between(facts: Facts) -> dict[str, float]:
    mean = shares.mean_parts(facts.ranks)
    return {name: mean[name] for name in shares.BETWEEN_STEPS if name in mean}


def _throughput(facts: Facts) -> dict[str, float]:
    figures = {}
    if rate := shares.samples_per_second(facts.ranks):
        figures[_RATE] = rate
    if spent := hours(facts):
        figures[hours_unit(facts)] = spent
    return figures


# --- words


def text(comparison: RunComparison) -> str:
    """Return the comparison for a terminal."""
    lines = [
        f"{'first':<10}{status_line(comparison.first.facts)}",
        f"{'second':<10}{status_line(comparison.second.facts)}",
        *field_lines("verdict", comparison.headline),
        *field_lines("", comparison.caution),
    ]
    group = ""
    for row in comparison.rows:
        if row.group != group:
            group = row.group
            lines += ["", f"{group:<{_NAME + 2}}{'first':<{_VALUE}}second"]
        lines += _row(row)
    lines.append("")
    for name, verdicts in (
        ("gone", comparison.gone),
        ("new", comparison.new),
        ("in both", comparison.both),
        ("unknown", comparison.unjudged),
    ):
        for verdict in verdicts:
            lines += field_lines(name, verdict)
    if not comparison.doubts:
        hint = f"hpml report {comparison.first.facts.run} --try measures with repeats"
        lines += field_lines("next", hint)
    return "\n".join(printable(line) for line in lines)


def _row(row: ComparisonRow) -> Iterable[str]:
    if max(len(row.first), len(row.second)) >= _VALUE or len(row.name) >= _NAME:
        yield f"  {row.name}"
        for name, value in (("first", row.first), ("second", row.second)):
            yield from field_lines(name, value, margin=4)
        return
    yield f"  {row.name:<{_NAME}}{row.first:<{_VALUE}}{row.second:<14}{row.change_text}".rstrip()


def to_json(comparison: RunComparison) -> dict[str, object]:
    """Return the comparison for programs."""
    return {
        "runs": [comparison.first.facts.run, comparison.second.facts.run],
        "headline": comparison.headline,
        "comparable": not comparison.doubts,
        "doubts": list(comparison.doubts),
        "differences": list(comparison.differences),
        "caution": comparison.caution,
        "rows": [
            {
                "group": row.group,
                "name": row.name,
                "first": row.first,
                "second": row.second,
                "change": row.change,
                "may_be_noise": row.noise,
            }
            for row in comparison.rows
        ],
        "findings": {
            "gone": comparison.gone,
            "new": comparison.new,
            "both": comparison.both,
            "not_judged": comparison.unjudged,
        },
    }
