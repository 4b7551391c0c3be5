"""From the fields of a job file to a job: each value first, then what they mean together."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from pydantic import TypeAdapter, ValidationError

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.jobfile.paths import absolute
from hpml_orchestrator.jobfile.problems import combined, problems_of
from hpml_orchestrator.jobfile.rules import contradictions, wrong_placeholders, wrong_targets
from hpml_orchestrator.records.job import Job

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path


@functools.cache
def job_adapter() -> TypeAdapter[Job]:
    """Return pydantic's reader of jobs, made once."""
    return TypeAdapter(Job)


def wrong_fields(fields: Mapping[str, object], prefix: str = "") -> list[InputError]:
    """Return what is wrong with the fields of a job.

    Args:
        fields: of a job file, complete.
        prefix: dotted place of the fields in the file, with a dot at its end.
    """
    try:
        problems = [*contradictions(job_adapter().validate_python(fields))]
    except ValidationError as error:
        return problems_of(error, Job, prefix)
    return [InputError(one.message, field=prefix + one.field, value=one.value) for one in problems]


def resolved_job(
    fields: Mapping[str, object], base: Path, points: Collection[str], hint: str
) -> Job:
    """Return the job of the fields of a job file, with absolute paths.

    Args:
        fields: of the file, with those of the command line and of a site profile.
        base: directory of the file.
        points: names of a sweep's values, which arguments refer to as `{point.NAME}`.
        hint: for the error.

    Raises:
        InputError: a value is wrong; or, if each is right by itself, what they mean together.
            Every finding is named with its field.
    """
    try:
        job = job_adapter().validate_python(fields)
    except ValidationError as error:
        raise combined(problems_of(error), hint) from None
    resolved = absolute(job, base)
    problems = [*contradictions(resolved), *wrong_placeholders(job, points), *wrong_targets(job)]
    if problems:
        raise combined(problems, hint)
    return resolved
