"""`hpml report --apply`: the job file of a run with the changes of a diagnosis."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hpml_orchestrator.diagnosis.apply import changed_job, differences
from hpml_orchestrator.errors import HpmlError, InputError, RecordError
from hpml_orchestrator.jobfile.load import parse_yaml, read_fields
from hpml_orchestrator.jobfile.write import JobDocument, job_text, one_line
from hpml_orchestrator.records.files import read_text_or_nothing, write_users_file
from hpml_orchestrator.runs.load import ResolvedJob, load_job
from hpml_orchestrator.script.template import variable

if TYPE_CHECKING:
    from hpml_orchestrator.diagnosis.apply import Chosen
    from hpml_orchestrator.records.job import Job
    from hpml_orchestrator.records.submission import Submission
    from hpml_orchestrator.site.model import ResolvedSite

_POINT = re.compile(r"\{(point\.[^{}]+)\}")


@dataclass(frozen=True)
class ChangedFile:
    """A job file with changes.

    Attributes:
        path: of the new file.
        text: its text.
        diff: lines of a unified diff from the old job file.
        resolved: the job that it describes.
        notes: remarks for the user, for example that comments could not be kept.
    """

    path: Path
    text: str
    diff: list[str]
    resolved: ResolvedJob
    notes: tuple[str, ...] = ()


def job_of_run(submission: Submission) -> Job:
    """Return the complete job that a run was, with the values of a sweep's point filled in.

    A job array stays one: its tasks share the job file.
    """
    record = submission.record()
    job = submission.requested_job()
    if not record.get("sweep"):
        return job
    values = _point_values(submission)

    def filled(text: str) -> str:
        return _POINT.sub(lambda match: values.get(variable(match[1]), match[0]), text)

    variables = {name: filled(text) for name, text in job.environment.variables.items()}
    return replace(
        job,
        array=None,
        args=tuple(map(filled, job.args)),
        command=None if job.command is None else tuple(map(filled, job.command)),
        environment=replace(job.environment, variables=variables),
    )


def _point_values(submission: Submission) -> Mapping[str, str]:
    script = read_text_or_nothing(submission.directory / "points.sh")
    index = submission.index or 0
    line = next((one for one in script.splitlines() if one.startswith(f"{index}) ")), "")
    words = [word.partition("=") for word in shlex.split(line)]
    return {name: value for name, equals, value in words if equals}


def refuse_unchangeable(job: Job, label: str, chosen: Chosen) -> None:
    """Refuse a run whose job file cannot be changed or need not be.

    Raises:
        InputError: it has no job file, as a Python function that submitit submitted; or there is no
            change.
    """
    if job.has_submitit:
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


def changed_file(
    submission: Submission, chosen: Chosen, target: Path, site: ResolvedSite | None = None
) -> ChangedFile:
    """Return the job file of a run with changes; nothing is written.

    It describes the job as it ran: what came from `--set`, from words after `--` or from a point of
    a sweep becomes part of it, and relative paths stay right in another directory.

    Args:
        submission: the run.
        chosen: the changes.
        target: the new file, absolute.
        site: the site profile that applies to the new file.

    Raises:
        InputError: there is nothing to change, the changed job is not valid, or its job file cannot
            be changed so that it describes that job.
    """
    label, ran = submission.label, job_of_run(submission)
    refuse_unchangeable(ran, label, chosen)
    source = Path(str(submission.record()["job_file"]))

    def load(text: str) -> ResolvedJob:
        return load_job(target, site=site, fields=parse_yaml(text, str(target)))

    try:
        old, written, notes = _read(source, site)
    except (HpmlError, OSError) as error:
        written, notes = replace(ran, after=()), (f"written from the record of the run: {error}",)
        old = JobDocument(job_text(written.to_json(defaults=False), [])).text()
    document, base = JobDocument(old), _as_in_file(ran, written)
    if document.text().count("#") < old.count("#"):
        notes += (f"without the comments of {source} that are between brackets",)
    # Where the new file is in another directory, its relative paths mean others.
    for name, value in differences(written.to_json(), load(old).job.to_json()):
        if name != "script":  # relative to the workdir
            _put(document, name, value, base, "")
    # The run may differ from its file by --set or by edits made since. Those come first, with a
    # comment of their own, so that the diff shows which lines are the advice.
    for name, value in differences(base.to_json(), written.to_json()):
        _put(document, name, value, base, f"as it was in {label}")
    wanted = changed_job(base, chosen.fields)
    for one in chosen.made:
        for name, value in one.fields.items():
            _put(document, name, value, wanted, f"{one.reason}, in {label}")
    text = document.text()
    # Two fields may share a value through an anchor, or a site's default take the place of a field
    # that was removed. Only the reread file proves that it describes the wanted job.
    resolved = load(text)
    if rest := [name for name, _ in differences(wanted.to_json(), resolved.job.to_json())]:
        fields = (f"{name}: {one_line(value)}" for name, value in chosen.fields.items())
        raise InputError(
            f"cannot be made: {', '.join(rest)} would not become what it should be",
            field="--apply",
            value=str(target),
            hint=f"change {source} by hand: {', '.join(fields)}",
        )
    lines = difflib.unified_diff(
        old.splitlines(), text.splitlines(), str(source), str(target), lineterm="", n=1
    )
    return ChangedFile(target, text, [*lines], resolved, notes)


def _read(source: Path, site: ResolvedSite | None) -> tuple[str, Job, tuple[str, ...]]:
    """Return the text of a job file, as YAML, the job that it describes now, and notes."""
    fields = read_fields(source)
    job = load_job(source, site=site, fields=fields).job
    if source.suffix.lower() == ".toml":
        text = JobDocument(job_text(fields, [])).text()
        return text, job, (f"written as YAML, without the comments of {source}",)
    return source.read_text(encoding="utf-8-sig"), job, ()


def _as_in_file(ran: Job, written: Job) -> Job:
    """Return the job that ran, without what is found anew for each run."""
    stages = list(ran.stage)
    for index, (entry, now) in enumerate(zip(ran.stage, written.stage, strict=False)):
        stages[index] = replace(
            entry,
            target="auto" if now.target == "auto" else entry.target,
            size=None if now.size is None else entry.size,
        )
    return replace(ran, after=written.after, stage=tuple(stages))


def _put(document: JobDocument, name: str, value: object, job: Job, comment: str) -> None:
    top, _, inner = name.partition(".")
    whole = job.written(top)
    if inner and isinstance(whole, list) and not document.has_entry(top, inner):
        name, value = top, whole  # the list is a default of the site
    document.put(name, value, comment)


def write_changed(changed: ChangedFile) -> None:
    """Write the job file.

    Raises:
        InputError: it cannot be written.
    """
    try:
        write_users_file(changed.path, changed.text)
    except RecordError as error:
        raise InputError(str(error), hint="name another file with --apply") from error
