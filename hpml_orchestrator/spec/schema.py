"""The JSON Schemas of a job file and of a site profile, for editors and for the reference."""

from __future__ import annotations

from typing import Any

from hpml_orchestrator.spec.job import Job
from hpml_orchestrator.spec.site import NEEDED_DIRECTIVES, PER_JOB, Site

__all__ = ["job_schema", "site_schema"]

_DIALECT = "https://json-schema.org/draft/2020-12/schema"


def job_schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of a job file."""
    return {"$schema": _DIALECT, **Job.model_json_schema(), "title": "hpml job file"}


def site_schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of a site profile."""
    schema, job = Site.model_json_schema(), Job.model_json_schema()
    schema["$defs"] |= job["$defs"]
    fields = {name: field for name, field in job["properties"].items() if name not in PER_JOB}
    schema["properties"]["defaults"] |= {"additionalProperties": False, "properties": fields}
    schema["properties"]["directives"]["propertyNames"] = {
        "pattern": "^[a-z][a-z0-9-]*$",
        "not": {"enum": sorted(NEEDED_DIRECTIVES)},
    }
    return {"$schema": _DIALECT, **schema, "title": "hpml site profile"}
