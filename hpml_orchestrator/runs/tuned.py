"""The job file of a run with the changes of a diagnosis; the user's comments stay."""

from __future__ import annotations

import copy
import difflib
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpml_orchestrator.diagnosis.apply import changed_job, differences
from hpml_orchestrator.errors import HpmlError, InputError, RecordError
from hpml_orchestrator.records.files import read_text_or_nothing, write_users_file
from hpml_orchestrator.runs.request import job_fields
from hpml_orchestrator.script.template import variable
from hpml_orchestrator.spec.document import parse_yaml
from hpml_orchestrator.spec.edit import (
    CannotEditError,
    block_text,
    flow_text,
    set_field,
)
from hpml_orchestrator.spec.job import Job, expand_shorthand
from hpml_orchestrator.spec.load import (
    ResolvedJob,
    field_value,
    load_job,
    make_absolute,
    read_fields,
)

if TYPE_CHECKING:
    from hpml_orchestrator.diagnosis.apply import Chosen, Made
    from hpml_orchestrator.records.schema import JobFields, SubmitRecord
    from hpml_orchestrator.records.submission import Submission
    from hpml_orchestrator.spec.site import ResolvedSite

_POINT = re.compile(r"\{(point\.[^{}]+)\}")


@dataclass(frozen=True)
class Tuned:
    """A job file with changes.

    Attributes:
        path: of the new file.
        text: its text.
        diff: lines of a unified diff from the old job file.
        resolved: the job that it describes.
        site: the site profile that applies to it there.
        notes: remarks for the user, for example that comments could not be kept.
    """

    path: Path
    text: str
    diff: list[str]
    resolved: ResolvedJob
    site: ResolvedSite | None
    notes: tuple[str, ...] = ()


def job_of_run(submission: Submission) -> JobFields:
    """Return the complete job that a run was, with the values of a sweep's point filled in.

    A job array stays one: its tasks share the job file.
    """
    record = submission.record()
    job = copy.deepcopy(record["job"])
    if not record.get("sweep"):
        return job
    job["array"] = None
    values = _point_values(submission)
    job["args"] = _filled(job["args"], values)
    job["command"] = _filled(job["command"], values)
    job["environment"] = _filled(job["environment"], values)
    return job


def _point_values(submission: Submission) -> Mapping[str, str]:
    script = read_text_or_nothing(submission.directory / "points.sh")
    index = submission.index or 0
    line = next((one for one in script.splitlines() if one.startswith(f"{index}) ")), "")
    words = [word.partition("=") for word in shlex.split(line)]
    return {name: value for name, equals, value in words if equals}


def _filled(value: Any, values: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        return _POINT.sub(lambda match: values.get(variable(match[1]), match[0]), value)
    if isinstance(value, dict):
        return {key: _filled(inner, values) for key, inner in value.items()}
    return [_filled(inner, values) for inner in value] if isinstance(value, list) else value


def refuse_unchangeable(record: SubmitRecord, label: str, chosen: Chosen) -> None:
    """Refuse a run whose job file cannot be changed or need not be.

    Raises:
        InputError: it has no job file, as a Python function that submitit submitted; or there is no
            change.
    """
    if "SUBMITIT_EXECUTOR" in record["job"]["environment"]["variables"]:
        raise InputError(
            "runs a Python function that submitit submitted: it has no job file",
            field="RUN",
            value=label,
            hint="change the parameters of the executor; `hpml report` names them",
        )
    if not chosen.made:
        hint = "; ".join(chosen.left) or f"`hpml report {label}` shows what was found"
        raise InputError(
            "no advice for this run changes its job file", field="RUN", value=label, hint=hint
        )


def tune(
    submission: Submission, chosen: Chosen, target: Path, site: ResolvedSite | None = None
) -> Tuned:
    """Return the job file of a run with changes; nothing is written.

    It describes the job as it ran: what came from `--set`, from words after `--` or from a point of
    a sweep becomes part of it, and relative paths stay right in another directory.

    Args:
        submission: the run.
        chosen: the changes.
        target: the new file, absolute.
        site: the site profile that applies to the new file.

    Raises:
        InputError: there is nothing to change, or the changed job is not valid.
    """
    label, record = submission.label, submission.record()
    refuse_unchangeable(record, label, chosen)
    source = Path(str(record["job_file"]))
    ran = job_of_run(submission)
    reasons = {name: f"{one.reason}, in {label}" for one in chosen.made for name in one.fields}
    writer = _Writer(source, target, site, label)
    fields, text, notes = _document(source)
    if fields is not None:
        try:
            base = _as_written(ran, load_job(source, site=site, fields=fields).job)
            moved = writer.moved(text, fields)
            return replace(
                writer.written(moved, base, chosen.fields, reasons, old=text), notes=notes
            )
        except (CannotEditError, InputError) as error:
            notes = (f"{target.name} is new; {source} cannot be changed as it is written: {error}",)
    whole = Job.model_validate({**ran, "after": []})
    text = block_text(_written_fields(whole))
    base = job_fields(whole)
    try:
        return replace(writer.written(text, base, chosen.fields, reasons, old=text), notes=notes)
    except CannotEditError as error:
        raise InputError(
            f"cannot be made: {error}",
            field="--apply",
            value=str(target),
            hint="change the job file by hand: " + "; ".join(map(_by_hand, chosen.made)),
        ) from error


def _by_hand(made: Made) -> str:
    return ", ".join(f"{name}: {flow_text(value)}" for name, value in made.fields.items())


def _document(source: Path) -> tuple[dict[str, object] | None, str, tuple[str, ...]]:
    try:
        fields = read_fields(source)
        text = source.read_text(encoding="utf-8-sig")
    except (HpmlError, OSError) as error:
        return None, "", (f"written from the record of the run: {error}",)
    if source.suffix.lower() == ".toml":
        note = f"written as YAML, without the comments of {source}"
        return fields, block_text(_plain(fields)), (note,)
    return fields, text, ()


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    if isinstance(value, float):
        return float(value)
    return value


def _written_fields(job: Job) -> dict[str, object]:
    return job.model_dump(mode="json", exclude_defaults=True)


def _as_written(ran: JobFields, now: Job) -> JobFields:
    job, today = copy.deepcopy(ran), job_fields(now)
    job["after"] = today["after"]
    for entry, written in zip(job["stage"], today["stage"], strict=False):
        if written["target"] == "auto":
            entry["target"] = "auto"
        if written["size"] is None:
            entry["size"] = None
    return job


class _Writer:
    """Writes the new text of one job file.

    Args:
        source: the old file.
        target: the new one.
        site: the profile that applies to the new one.
        label: of the run.
    """

    def __init__(self, source: Path, target: Path, site: ResolvedSite | None, label: str) -> None:
        self._source, self._target, self._site, self._label = source, target, site, label

    def moved(self, text: str, fields: dict[str, object]) -> str:
        """Return the text with absolute paths for relative ones, if the directory is another."""
        if self._source.parent == self._target.parent:
            return text
        absolute = copy.deepcopy(fields)
        absolute.setdefault("workdir", ".")
        make_absolute(absolute, self._source.parent)
        for name, value in differences(absolute, fields):
            is_kept = name == "script" or str(field_value(fields, name)).startswith("~")
            if not is_kept:
                text = set_field(text, name, value)
        return text

    def written(
        self,
        text: str,
        base: JobFields,
        changes: Mapping[str, object],
        reasons: Mapping[str, str],
        *,
        old: str,
    ) -> Tuned:
        """Return a text that describes the base job, with the changes.

        Raises:
            CannotEditError: the text cannot be made to.
            InputError: the changed job is not valid.
        """
        changed: dict[str, object] = {**changed_job(base, changes)}
        make_absolute(changed, self._source.parent)
        job = Job.model_validate(changed)
        wanted, now = job.model_dump(mode="json"), self._load(text).job.model_dump(mode="json")
        whole = _written_fields(Job.model_validate(base))
        # The run may differ from its file by --set or by edits made since. Those come first, with a
        # comment of their own, so that the diff shows which lines are the advice.
        for name, value in list(differences(base, now)):
            given = whole.get(name, value)
            text = self._set(text, name, given, whole, f"as it was in {self._label}")
        for name, value in changes.items():
            text = self._set(text, name, value, _written_fields(job), reasons[name])
        resolved = self._load(text)
        found = resolved.job.model_dump(mode="json")
        # Editing text is fragile: an anchor or alias may have changed more than one field. Only a
        # reread job file proves that the result is the wanted job.
        rest = [name for name, _ in differences(wanted, found)]
        if rest:
            raise CannotEditError(f"{', '.join(rest)} would not become what it should be")
        lines = difflib.unified_diff(
            old.splitlines(),
            text.splitlines(),
            str(self._source),
            str(self._target),
            lineterm="",
            n=1,
        )
        return Tuned(self._target, text, list(lines), resolved, self._site)

    def _load(self, text: str) -> ResolvedJob:
        fields = parse_yaml(text, str(self._target))
        return load_job(self._target, site=self._site, fields=fields)

    def _set(
        self, text: str, name: str, value: object, whole: Mapping[str, object], comment: str
    ) -> str:
        fields = parse_yaml(text, str(self._target))
        top, _, inner = name.partition(".")
        if inner and top in fields and expand_shorthand(top, fields[top]) is not fields[top]:
            mapping = _plain(expand_shorthand(top, fields[top]))
            return set_field(text, top, {**mapping, inner: value}, comment=comment)
        if inner and isinstance(whole.get(top), list) and not _has_entry(fields.get(top), inner):
            name, value = top, whole[top]
        return set_field(text, name, value, comment=comment)


def _has_entry(entries: object, inner: str) -> bool:
    if not isinstance(entries, list) or not entries:
        return False
    index = inner.partition(".")[0]
    return index.isdecimal() and int(index) <= len(entries)


def write_tuned(tuned: Tuned) -> None:
    """Write the job file.

    Raises:
        InputError: it cannot be written.
    """
    try:
        write_users_file(tuned.path, tuned.text)
    except RecordError as error:
        raise InputError(str(error), hint="name another file with --apply") from error
