"""Whether the figures of two runs can be compared: the same program, hardware, data and words."""

from __future__ import annotations

import difflib
import posixpath
import re
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from hpml_orchestrator.diagnosis import shares
from hpml_orchestrator.diagnosis.model import Facts
from hpml_orchestrator.records.texts import first_few, human_bytes

if TYPE_CHECKING:
    from hpml_orchestrator.records.job import Job

_EQUAL = 0.05  # the last batch of an epoch may be smaller
_STAGED = re.compile(r"\{stage\.([^{}]+)\}")


def doubts(first: Facts, second: Facts) -> Iterator[str]:
    """Yield why the figures of two runs do not show the effect of a change."""
    for facts in (first, second):
        if not facts.over:
            yield f"{facts.run} is not over ({facts.state})"
        elif facts.state != "COMPLETED":
            yield f"{facts.run} did not complete ({facts.state})"
    for what, name in (("jobs", lambda job: job.name), ("programs", _program)):
        names = [name(facts.job) for facts in (first, second)]
        if names[0] != names[1]:
            yield f"different {what}: {names[0]} and {names[1]}"
    measured: tuple[tuple[str, Callable[[Facts], object]], ...] = (
        ("ranks", lambda facts: facts.world_size or None),
        ("GPUs", lambda facts: facts.gpu_count),
        ("nodes", lambda facts: facts.node_count or None),
        ("samples per step and rank", _batch),
        ("types of GPU", _gpu_names),
    )
    for what, figure in measured:
        values = [figure(facts) for facts in (first, second)]
        if None not in values and not _equal(*values):
            yield f"different {what}: {value_text(values[0])} and {value_text(values[1])}"
    # One run with counters and one without would make every share of a step look new.
    for facts, other in ((first, second), (second, first)):
        if shares.mean_parts(facts.ranks) and not shares.mean_parts(other.ranks):
            yield f"only {facts.run} reports its steps"


def _program(job: Job) -> str:
    if named := job.script or job.module:
        return named.rpartition("/")[2]
    words = job.command or ()
    return " ".join(words[: _first_option(words)])


def _first_option(words: Sequence[str]) -> int:
    options = (place for place, word in enumerate(words) if word.startswith("-"))
    return next(options, len(words))


def differences(first: Facts, second: Facts) -> Iterator[str]:
    """Yield how the work of two runs of the same program differs.

    Whether an argument changes the work is not known: `--workers` does not, `--epochs` does.
    """
    one, other = _arguments(first.job), _arguments(second.job)
    if not _same_words(one, first.job, other, second.job):
        before, after = only_words(one, other), only_words(other, one)
        yield f"different arguments: {value_text(before)} and {value_text(after)}"
    for what, mine, theirs in (
        ("values of the sweep", first.values, second.values),
        ("variables", first.job.environment.variables, second.job.environment.variables),
    ):
        names = [name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)]
        texts = [
            " ".join(f"{name.lstrip('-')}={value_text(values.get(name))}" for name in names)
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
    batches = [_batch(facts) for facts in (first, second)]  # `doubts` reports different ones
    if all(counts) and _equal(*batches) and not _equal(*counts):
        yield f"different numbers of samples: {counts[0]:,.0f} and {counts[1]:,.0f}"


def _sources(job: Job) -> dict[str, str]:
    return {one.name: one.source for one in job.stage}


def _arguments(job: Job) -> list[str]:
    """Return the words after the program, with the source of staged data for its path there."""
    sources = _sources(job)
    command = job.command or ()
    words = [*command[_first_option(command) :], *job.args]
    return [_STAGED.sub(lambda match: sources.get(match[1], match[0]), word) for word in words]


def _same_words(one: Sequence[str], job: Job, other: Sequence[str], other_job: Job) -> bool:
    def path(word: str, job: Job) -> str:
        return posixpath.normpath(posixpath.join(job.workdir, word))

    return len(one) == len(other) and all(
        word == word_there or path(word, job) == path(word_there, other_job)
        for word, word_there in zip(one, other, strict=True)
    )


def _batch(facts: Facts) -> float | None:
    batches = [rank.samples / rank.steps for rank in facts.ranks if rank.samples and rank.steps]
    return fmean(batches) if batches else None


def _gpu_names(facts: Facts) -> str | None:
    names = sorted({gpu.name for node in facts.nodes for gpu in node.gpus if gpu.name})
    return first_few(names) if names else None


def _equal(first: object, second: object) -> bool:
    if isinstance(first, float) and isinstance(second, float):
        return abs(first - second) <= _EQUAL * max(first, second)
    return bool(first == second)


def only_words(words: Sequence[object], others: Sequence[object]) -> str:
    """Return the words that the others do not have there, each with the option it belongs to."""
    mine, theirs = [str(word) for word in words], [str(word) for word in others]
    found: list[str] = []
    for tag, start, end, _, _ in difflib.SequenceMatcher(None, mine, theirs, False).get_opcodes():
        if tag == "equal" or start == end:
            continue
        begin = start - (start > 0 and mine[start - 1].startswith("-") and mine[start][:1] != "-")
        found.append(" ".join(mine[begin:end]))
    return " … ".join(found)


def value_text(value: object) -> str:
    """Return a value as a job file has it; `-` for nothing."""
    if value is None or value == "" or value in ([], {}):
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return " ".join(str(one) for one in value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)
