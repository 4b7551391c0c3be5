"""The changes of a diagnosis, made to a job: which ones, and every field that they set."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpml_orchestrator.diagnosis.model import Change, Diagnosis, Finding
from hpml_orchestrator.errors import InputError
from hpml_orchestrator.records.job import Job

_SHORT_FORMS = {"binding": "policy", "monitor": "enabled", "checkpoint": "enabled"}


@dataclass(frozen=True)
class Made:
    """One change that is made."""

    finding: Finding  # what it is made for
    change: Change  # the change
    # Every field of the job that it sets, with the value; None removes the field
    fields: Mapping[str, object]

    @property
    def reason(self) -> str:
        """The change and its reason, in one line, without the fields that show in a diff."""
        text = self.change.text.partition(": `")[0]
        return f"{text} ({self.finding.verdict})"


@dataclass(frozen=True)
class Chosen:
    """The changes that are made, and advice that hpml cannot follow by itself."""

    made: Sequence[Made] = ()  # the changes, in the order of the findings
    # The findings of which no change is made: each with what to do instead
    left: Sequence[str] = ()

    @property
    def fields(self) -> dict[str, object]:
        """All fields that are set, with their values."""
        return {name: value for one in self.made for name, value in one.fields.items()}

    @property
    def touches_accuracy(self) -> bool:
        """Whether the trained model can become another one."""
        return any(one.change.touches_accuracy for one in self.made)


def choose_changes(diagnosis: Diagnosis) -> Chosen:
    """Return for each finding the first change that can be made and conflicts with no earlier one.

    Two changes conflict if one sets a field that the other sets, or one in it.
    """
    job = diagnosis.facts.job
    made: list[Made] = []
    left: list[str] = []
    for finding in diagnosis.findings:
        reasons = []
        for change in finding.changes:
            if not change.field:
                reasons.append(change.text)
                continue
            try:
                fields = fields_of(job, change)
            except InputError as error:
                reasons.append(f"{change.text}: {error.message}")
                continue
            # The finding that is worth more comes first and keeps the field. Two changes
            # of one field would make it impossible to say which of them helped.
            taken = next((one for one in made if _overlap(one.fields, fields)), None)
            if taken is not None:
                reasons.append(f"{change.text}: not together with: {taken.change.text}")
                continue
            made.append(Made(finding, change, fields))
            break
        else:
            advice = "; ".join(reasons) or "no change of the job file is known that helps"
            left.append(f"{finding.verdict}: {advice}")
    return Chosen(tuple(made), tuple(left))


def next_step(diagnosis: Diagnosis) -> str:
    """Return the command that makes the changes; empty if there is none that can be made.

    A function that submitit submitted has no job file. A trial needs runs that do not share their
    checkpoints.
    """
    job, run = diagnosis.facts.job, diagnosis.facts.run
    if diagnosis.facts.failed and not diagnosis.findings:
        return f"hpml logs {run}"
    if not run or job.has_submitit or not choose_changes(diagnosis).made:
        return ""
    shares = job.checkpoint.enabled and not job.checkpoint.is_per_run
    return f"hpml report {run} --apply tuned.yaml{'' if shares else ', or --try'}"


def fields_of(job: Job, change: Change) -> dict[str, object]:
    """Return the fields that a change sets, with those that must follow it.

    Data that are staged newly reach the program only if its arguments name the copy, so the path of
    the source becomes `{stage.NAME}` there.

    Raises:
        InputError: the job has that value already, or the change would not reach the program.
    """
    given = {change.field: change.value, **change.also}
    fields = {_spelled_out(name, value): value for name, value in given.items()}
    changed = changed_job(job, fields)
    new = [entry for entry in _stages(changed) if entry not in _stages(job)]
    for entry in new:
        fields |= _staged_arguments(changed_job(changed, fields), entry)
    if changed_job(job, fields) == job:
        raise InputError("the job file has that already")
    before = job.to_json()
    return {name: value for field in fields.items() for name, value in _entries(before, *field)}


def _entries(job: Mapping[str, object], name: str, value: object) -> Iterator[tuple[str, object]]:
    old: object = job
    for part in name.split("."):
        old = old.get(part) if isinstance(old, dict) else None
    if not (isinstance(value, list) and isinstance(old, list) and len(value) >= len(old) > 0):
        yield name, value
        return
    for index, entry in enumerate(value):
        if index >= len(old) or old[index] != entry:
            yield f"{name}.{index}", entry


def _stages(job: Job) -> list[tuple[str, str]]:
    return [(entry.name, entry.source) for entry in job.stage]


def _staged_arguments(job: Job, stage: tuple[str, str]) -> dict[str, object]:
    name, source = stage
    word = f"{{stage.{name}}}"
    given: dict[str, str | list[str]] = {"args": [*job.args], "command": [*(job.command or ())]}
    for key, value in job.environment.variables.items():
        given[f"environment.variables.{key}"] = value
    # The program names the copy already, in an argument or through a variable.
    if any(word in str(value) for value in given.values()):
        return {}
    fields: dict[str, object] = {}
    for field, words in given.items():
        listed = [words] if isinstance(words, str) else words
        replaced = [_with_copy(one, source, word, job.workdir) for one in listed]
        if replaced != listed:
            fields[field] = replaced[0] if isinstance(words, str) else replaced
    if not fields:
        raise InputError(
            f"no argument of the program is {source}, so it would not read the copy; give it "
            f"{word} instead of the path"
        )
    return fields


def _with_copy(word: str, source: str, copied: str, workdir: str) -> str:
    """Return an argument with the path of the source, or below it, moved to the copy."""
    name, equals, value = word.partition("=")
    if not equals or not re.fullmatch(r"-{0,2}[A-Za-z][\w.-]*", name):
        name, equals, value = "", "", word
    if not value or value.startswith("-"):
        return word
    # An argument may name the data by a relative path, or a file inside of them; both must point
    # into the copy.
    path = os.path.normpath(os.path.join(workdir, value))
    if path == source or path.startswith(f"{source.rstrip('/')}/"):
        return f"{name}{equals}{copied}{path[len(source.rstrip('/')) :]}"
    return word


def changed_job(job: Job, fields: Mapping[str, object]) -> Job:
    """Return a job with other values of some fields; None removes a field.

    Raises:
        InputError: a list has no such entry.
    """
    changed = job.to_json()
    for name, value in fields.items():
        here: Any = changed
        *path, last = _spelled_out(name, value).split(".")
        for part in path:
            if isinstance(here, dict) and here.get(part) is None:
                here[part] = {}
            here = here[_key(here, part, name)]
        if value is None and isinstance(here, dict):
            here.pop(last, None)
        elif isinstance(here, list) and last == str(len(here)):
            here.append(value)
        else:
            here[_key(here, last, name)] = value
    return Job.from_json(changed)


def _key(here: object, part: str, name: str) -> str | int:
    if isinstance(here, dict):
        return part
    if isinstance(here, list) and part.isdecimal() and int(part) < len(here):
        return int(part)
    raise InputError("the job has no such field", field=name)


def _spelled_out(name: str, value: object) -> str:
    """Return the inner field that a short form sets: `binding: numa` is `binding.policy`."""
    inner = _SHORT_FORMS.get(name)
    return f"{name}.{inner}" if inner and isinstance(value, (str, bool)) else name


def _overlap(one: Iterable[str], other: Iterable[str]) -> bool:
    return any(_is_in(a, b) or _is_in(b, a) for a in one for b in other)


def _is_in(name: str, around: str) -> bool:
    return f"{name}.".startswith(f"{around}.")


def differences(new: object, old: object, field: str = "") -> Iterator[tuple[str, object]]:
    """Yield the fields of a job in which it differs from another one, with their values.

    Lists are compared entry by entry if they are as long, else as a whole.
    """
    if isinstance(new, dict) and isinstance(old, dict):
        for key in {**old, **new}:
            name = f"{field}.{key}" if field else str(key)
            yield from differences(new.get(key), old.get(key), name)
    elif isinstance(new, list) and isinstance(old, list) and len(new) == len(old):
        for index, (one, other) in enumerate(zip(new, old, strict=True)):
            if isinstance(one, dict) and isinstance(other, dict):
                yield from differences(one, other, f"{field}.{index}")
            elif one != other:
                yield field, new
                return
    elif new != old:
        yield field, new
