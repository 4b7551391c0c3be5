"""Two runs compared, as a sweep of two settings with one run each.

A single run of each shows no difference for certain, so a comparison names what differs: the work,
the job files, the parts of the time, and the findings.
"""

from __future__ import annotations

import difflib
import posixpath
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from hpml_orchestrator.diagnosis.model import Diagnosis, Facts
from hpml_orchestrator.diagnosis.shares import (
    BETWEEN_STEPS,
    batch_per_rank,
    doubts,
    first_option,
    hours,
    hours_unit,
    is_judged,
    mean_parts,
    nearly_equal,
    samples_per_second,
)
from hpml_orchestrator.diagnosis.thresholds import OVER_ASKED
from hpml_orchestrator.errors import InputError
from hpml_orchestrator.records.job import Job
from hpml_orchestrator.records.texts import duration_text, first_few, human_bytes
from hpml_orchestrator.sweeps import statistics
from hpml_orchestrator.sweeps.facts import Setting, SweepFacts
from hpml_orchestrator.sweeps.pairs import Comparison, Pair, question
from hpml_orchestrator.sweeps.report import build
from hpml_orchestrator.sweeps.rows import PointRow
from hpml_orchestrator.sweeps.trial import plan_of_jobs
from hpml_orchestrator.sweeps.wording import sentences

NOISE = 0.05
"""Smaller differences between one run each may be noise: the same limit as for sibling nodes."""
NOISE_SECONDS = 1.0
"""The same for the times of a run, however short it was."""

_QUALITY = "quality"  # figures of which a change in percent means nothing
_SECONDS = ("run", "phases", "between the steps")
_STEP = "one step, mean of the ranks"
_RATE = "samples/s in steps"
_RUN_TIME = "run time"
_STAGED = re.compile(r"\{stage\.([^{}]+)\}")
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
class ComparedFigure:
    """One figure or setting of both runs, as text."""

    group: str
    name: str
    first: str
    second: str
    change: float | None = None  # second / first - 1; None without figures, or of different work
    may_be_noise: bool = False  # whether one run each can differ as much by chance


@dataclass(frozen=True)
class RunComparison(Comparison):
    """A comparison of two runs.

    Attributes:
        runs: the labels of both.
        headline: which run is faster, or why that is not known.
        comparable: whether the figures are.
        doubts: sentences, why the figures are not comparable; empty if they are.
        differences: sentences, in what the work of the runs differs; then only rates are compared.
        caution: what one run each cannot show.
        rows: what differs in the job files, then the figures.
        findings: the verdicts of those that are `gone`, `new`, in `both` runs, or `not_judged`
            because the other run has no data for them.
    """

    runs: tuple[str, str]
    headline: str
    comparable: bool
    doubts: tuple[str, ...]
    differences: tuple[str, ...]
    caution: str
    rows: tuple[ComparedFigure, ...]
    findings: Mapping[str, tuple[str, ...]]


def compare_runs(first: Diagnosis, second: Diagnosis) -> RunComparison:
    """Compare two runs.

    Raises:
        InputError: both are the same run.
    """
    one, other = first.facts, second.facts
    if one.run == other.run:
        raise InputError("name two different runs", field="RUN", value=one.run)
    # Arguments may have several lines; a sentence has one.
    against = [" ".join(text.split()) for text in doubts(one, other)]
    work = tuple(" ".join(text.split()) for text in _differences(one, other))
    rated = all(samples_per_second(facts.ranks) for facts in (one, other))
    if against or not rated:  # without rates only times are known, and they are of different work
        against += work
    # groups and names of rows whose change in percent compares the same work
    same: tuple[str, ...] | None = (_RATE, _STEP) if work else None
    rows = (*_settings(one, other), *_figures(one, other, () if against else same))
    named = {row.name: row.change for row in rows if row.change is not None}
    took = [facts.elapsed_seconds or 0.0 for facts in (one, other)]
    (headline,) = sentences(
        "headline",
        doubts=against,
        differences=work,
        second=other.run,
        is_rate=_RATE in named,
        change=named.get(_RATE, named.get(_RUN_TIME)),
        noise=NOISE,
        # two times that differ by less than NOISE_SECONDS
        close=[duration_text(time) for time in took] if _is_close(*took) else (),
    )
    (caution,) = sentences("caution", noise=NOISE, seconds=NOISE_SECONDS)
    answer = sentences(
        "runs", headline=headline, caution=caution, first=one.run, comparable=not against
    )
    swept = _sweep(one, other, "samples_per_second" if rated else "total_seconds")
    before, after = swept.settings
    return RunComparison(
        version=1,
        name=swept.name,
        question=question(one.run, other.run),
        answer=answer,
        notices=(),
        pairs=(_pair(before, after, maximize=swept.figure.maximize, doubt="; ".join(against)),),
        costs=(before.costs, after.costs),
        runs=(one.run, other.run),
        headline=headline,
        comparable=not against,
        doubts=tuple(against),
        differences=work,
        caution=caution,
        rows=rows,
        findings=_findings(first, second, comparable=not against),
    )


def _is_close(first: float, second: float) -> bool:
    return abs(first - second) < NOISE_SECONDS


def _sweep(first: Facts, second: Facts, metric: str) -> SweepFacts:
    """Return two runs as a sweep of two settings with one run each."""
    jobs = {facts.run: facts.job for facts in (first, second)}
    name = " and ".join(jobs)
    plan = plan_of_jobs(jobs, name=name, base=Path(first.job.name), metric=metric)
    return build(plan, [_row(number, one) for number, one in enumerate((first, second))])


def _row(number: int, facts: Facts) -> PointRow:
    rate, took = samples_per_second(facts.ranks), facts.elapsed_seconds
    return PointRow(
        number,
        run=facts.run,
        state=facts.state,
        reason=facts.reason,
        over=facts.over,
        phases=facts.phases,
        total_seconds=took,
        samples_per_second=rate,
        metric=rate if rate is not None else took,
        code=facts.code,
        world_size=facts.world_size or None,
        allocated=1.0,  # the hours are those of the allocation
        gpu_hours=facts.gpu_count * (took or 0.0) / 3600,
        core_hours=facts.core_count * (took or 0.0) / 3600,
        node_hours=facts.node_count * (took or 0.0) / 3600,
    )


def _pair(before: Setting, after: Setting, *, maximize: bool, doubt: str) -> Pair:
    sides = [one.samples["figure"] for one in (before, after)][:: -1 if maximize else 1]
    return Pair(
        f"{before.label} and {after.label}",
        before if before.runs else None,
        after if after.runs else None,
        statistics.speedup(*sides) if all(sides) else None,
        "unknown",
        doubt,
    )


# --- what differs in the work


def _differences(first: Facts, second: Facts) -> Iterator[str]:
    """Yield how the work of two runs of the same program differs.

    Whether an argument changes the work is not known: `--workers` does not, `--epochs` does.
    """
    one, other = _arguments(first.job), _arguments(second.job)
    if not _same_words(one, first.job, other, second.job):
        before, after = _only_words(one, other), _only_words(other, one)
        yield f"different arguments: {_value_text(before)} and {_value_text(after)}"
    for what, mine, theirs in (
        ("values of the sweep", first.values, second.values),
        ("variables", first.job.environment.variables, second.job.environment.variables),
    ):
        names = [name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)]
        texts = [
            " ".join(f"{name.lstrip('-')}={_value_text(values.get(name))}" for name in names)
            for values in (mine, theirs)
        ]
        if names:
            yield f"different {what}: {texts[0]} and {texts[1]}"
    yield from _different_data(first, second)


def _different_data(first: Facts, second: Facts) -> Iterator[str]:
    one, other = ({*_sources(facts.job).values()} for facts in (first, second))
    # Staging is a usual change to try, so a source that only one of the runs stages does not make
    # the data different.
    if not (one <= other or other <= one):
        yield f"different data: {first_few(sorted(one))} and {first_few(sorted(other))}"
        return
    sizes = [(facts.data_files, facts.data_bytes) for facts in (first, second)]
    if one == other and all((*sizes[0], *sizes[1])) and sizes[0] != sizes[1]:
        texts = [f"{files:.0f} files of {human_bytes(size or 0)}" for files, size in sizes]
        yield f"different data: {texts[0]} and {texts[1]}"
        return
    counts = [sum(rank.samples or 0.0 for rank in facts.ranks) for facts in (first, second)]
    batches = [batch_per_rank(facts) for facts in (first, second)]  # `doubts` reports them
    if all(counts) and nearly_equal(*batches) and not nearly_equal(*counts):
        yield f"different numbers of samples: {counts[0]:,.0f} and {counts[1]:,.0f}"


def _sources(job: Job) -> dict[str, str]:
    return {one.name: one.source for one in job.stage}


def _arguments(job: Job) -> list[str]:
    """Return the words after the program, with the source of staged data for its path there."""
    sources, command = _sources(job), job.command or ()
    words = [*command[first_option(command) :], *job.args]
    return [_STAGED.sub(lambda match: sources.get(match[1], match[0]), word) for word in words]


def _same_words(one: Sequence[str], job: Job, other: Sequence[str], other_job: Job) -> bool:
    def path(word: str, job: Job) -> str:
        return posixpath.normpath(posixpath.join(job.workdir, word))

    return len(one) == len(other) and all(
        word == word_there or path(word, job) == path(word_there, other_job)
        for word, word_there in zip(one, other, strict=True)
    )


def _only_words(words: Sequence[object], others: Sequence[object]) -> str:
    """Return the words that the other list does not have, each with the option before it."""
    mine, theirs = [str(word) for word in words], [str(word) for word in others]
    found: list[str] = []
    for tag, start, end, _, _ in difflib.SequenceMatcher(None, mine, theirs, False).get_opcodes():
        if tag == "equal" or start == end:
            continue
        begin = start - (start > 0 and mine[start - 1].startswith("-") and mine[start][:1] != "-")
        found.append(" ".join(mine[begin:end]))
    return " … ".join(found)


def _value_text(value: object) -> str:
    """Return a value as a job file has it; `-` for nothing."""
    if value is None or value == "" or value in ([], {}):
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return " ".join(str(one) for one in value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


# --- rows


def _settings(first: Facts, second: Facts) -> Iterator[ComparedFigure]:
    """Yield what differs in the code, the points of a sweep and the job files.

    A field that only one job has, as those of an entry of `stage`, differs if it has no default.
    """
    if first.code != second.code:
        yield ComparedFigure("code", "commit", _value_text(first.code), _value_text(second.code))
    for name in {**first.values, **second.values}:
        before, after = first.values.get(name), second.values.get(name)
        if before != after:
            texts = _value_text(before), _value_text(after)
            yield ComparedFigure("point of the sweep", str(name).lstrip("-"), *texts)
    jobs = first.job, second.job
    one, other = (dict(_flat(job.to_json())) for job in jobs)
    known = {name for job in jobs for name, _ in _flat(job.to_json(defaults=False))}
    for name in {**one, **other}:
        before, after = one.get(name), other.get(name)
        if before == after or ((name in one) != (name in other) and name not in known):
            continue
        if isinstance(before, list) and isinstance(after, list):
            before, after = _only_words(before, after), _only_words(after, before)
        yield ComparedFigure("job file", name, _value_text(before), _value_text(after))


def _flat(value: object, name: str = "") -> Iterator[tuple[str, object]]:
    """Yield each field by its dotted name; entries of a list have their own name, or a number."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flat(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list) and value and all(isinstance(one, Mapping) for one in value):
        for place, entry in enumerate(value):
            fields = {key: inner for key, inner in entry.items() if key != "name"}
            yield from _flat(fields, f"{name}.{entry.get('name', place)}")
    else:
        yield name, value


def _figures(first: Facts, second: Facts, same: Sequence[str] | None) -> Iterator[ComparedFigure]:
    """Yield the figures of both runs: time, steps, throughput, cost and quality."""
    is_short = _is_close(first.elapsed_seconds or 0.0, second.elapsed_seconds or 0.0)
    tables: tuple[tuple[str, Callable[[Facts], Mapping[str, float]], Callable[[float], str]], ...]
    tables = (
        ("run", _whole, duration_text),
        ("phases", lambda facts: facts.phases, duration_text),
        (_STEP, _step, duration_text),
        ("between the steps", _between, duration_text),
        ("throughput", _throughput, lambda value: f"{value:,.4g}"),
        (_QUALITY, lambda facts: facts.accuracy, lambda value: f"{value:.4g}"),
    )
    for group, figures, word in tables:
        one, other = figures(first), figures(second)
        for name in {**one, **other}:
            before, after = one.get(name), other.get(name)
            change = after / before - 1 if before and after is not None else None
            if group == _QUALITY or not (same is None or group in same or name in same):
                change = None
            short = group in _SECONDS and _is_close(before or 0.0, after or 0.0)
            short = short or (is_short and name.endswith("-hours"))
            # The change counts as it is printed.
            noise = change is not None and (short or round(abs(change), 2) < NOISE)
            texts = ("-" if before is None else word(before), "-" if after is None else word(after))
            yield ComparedFigure(group, name, *texts, change, noise)


def _whole(facts: Facts) -> dict[str, float]:
    return {} if facts.elapsed_seconds is None else {_RUN_TIME: facts.elapsed_seconds}


def _step(facts: Facts) -> dict[str, float]:
    steps = [rank.steps for rank in facts.ranks if rank.steps]
    mean = mean_parts(facts.ranks)
    return {
        name: seconds / fmean(steps)
        for name, seconds in mean.items()
        if steps and name not in BETWEEN_STEPS
    }


def _between(facts: Facts) -> dict[str, float]:
    mean = mean_parts(facts.ranks)
    return {name: mean[name] for name in BETWEEN_STEPS if name in mean}


def _throughput(facts: Facts) -> dict[str, float]:
    figures = {}
    if rate := samples_per_second(facts.ranks):
        figures[_RATE] = rate
    if spent := hours(facts):
        figures[hours_unit(facts)] = spent
    return figures


# --- findings


def _findings(
    first: Diagnosis, second: Diagnosis, *, comparable: bool
) -> dict[str, tuple[str, ...]]:
    if not comparable:  # a finding of only one of the runs shows nothing
        return dict.fromkeys(("gone", "new", "both", "not_judged"), ())
    before, after = (
        {finding.kind: finding.verdict for finding in one.findings} for one in (first, second)
    )
    gone, lacking = _only_in(first, second, set(after))
    new, lacking_before = _only_in(second, first, set(before))
    both = [
        f"{verdict}; then: {after[kind]}" if verdict != after[kind] else verdict
        for kind, verdict in before.items()
        if kind in after
    ]
    return {"gone": gone, "new": new, "both": (*both,), "not_judged": (*lacking, *lacking_before)}


def _only_in(
    having: Diagnosis, other: Diagnosis, found: set[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the verdicts that the other run does not have, and those not judged there."""
    gone, unjudged = [], []
    for finding in having.findings:
        if finding.kind in found:
            continue
        if why := _why_not_judged(finding.kind, other):
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
