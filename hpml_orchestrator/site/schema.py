"""The JSON Schema of site profiles, for editors and the reference."""

from __future__ import annotations

from hpml_orchestrator.jobfile.schema import schema_of
from hpml_orchestrator.records.job import Job, Json
from hpml_orchestrator.site import model
from hpml_orchestrator.site.model import NEEDED_DIRECTIVES, PER_JOB, Site


def site_schema() -> Json:
    """Return the JSON Schema (2020-12) of a site profile."""
    schema = schema_of(Site, "hpml site profile", model)
    job_fields = schema_of(Job, "hpml job file")
    schema["$defs"] |= job_fields["$defs"]
    fields = {
        name: field for name, field in job_fields["properties"].items() if name not in PER_JOB
    }
    schema["properties"]["defaults"] |= {"additionalProperties": False, "properties": fields}
    schema["properties"]["directives"]["propertyNames"] = {
        "pattern": "^[a-z][a-z0-9-]*$",
        "not": {"enum": sorted(NEEDED_DIRECTIVES)},
    }
    return schema
