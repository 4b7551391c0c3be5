"""Recorded jobs for tests that give a few of their fields."""

from __future__ import annotations

from typing import Any

from hpml_orchestrator.records.schema import JobFields
from hpml_orchestrator.spec.data import Stage
from hpml_orchestrator.spec.job import Job

_DEFAULTS = Job(name="digits", command=["true"]).model_dump(mode="json")
_STAGE = Stage(name="data", source="/data").model_dump(mode="json")


def complete(**fields: Any) -> JobFields:
    """Return a job with these fields, and the default of every other; nothing is checked."""
    job: Any = {**_DEFAULTS, "command": None}
    for name, value in fields.items():
        is_section = isinstance(value, dict) and isinstance(_DEFAULTS.get(name), dict)
        job[name] = {**_DEFAULTS[name], **value} if is_section else value
    job["stage"] = [{**_STAGE, **entry} for entry in job["stage"]]
    whole: JobFields = job
    return whole
