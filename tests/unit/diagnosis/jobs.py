"""Recorded jobs for tests that give a few of their fields."""

from __future__ import annotations

from typing import Any

from hpml_orchestrator.records.job import Job, Stage

_DEFAULTS = Job(name="digits", command=("true",)).to_json()
_STAGE = Stage(name="data", source="/data").to_json()


def complete(**fields: Any) -> Job:
    """Return a job with these fields, and the default of every other; nothing is checked."""
    job: Any = {**_DEFAULTS, "command": None}
    for name, value in fields.items():
        is_section = isinstance(value, dict) and isinstance(_DEFAULTS.get(name), dict)
        job[name] = {**_DEFAULTS[name], **value} if is_section else value
    job["stage"] = [{**_STAGE, **entry} for entry in job["stage"]]
    return Job.from_json(job)
