"""The JSON Schemas of a job file and of a site profile, for editors."""

from __future__ import annotations

from typing import Any

from hpml_orchestrator.spec.binding import Binding
from hpml_orchestrator.spec.job import Job
from hpml_orchestrator.spec.monitor import Monitor

__all__ = ["job_schema", "site_schema"]

_LOOSE = {
    # what the loader takes besides text
    "gpus": ["string", "integer", "array"],
    "memory": ["string", "integer", "null"],
    "time": ["string", "integer"],
    "size": ["string", "integer", "null"],
}


def job_schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of a job file."""
    schema = Job.model_json_schema()
    for model in ("Resources", "Stage"):
        for name, field in schema["$defs"][model]["properties"].items():
            if name in _LOOSE:
                field.pop("anyOf", None)
                field["type"] = _LOOSE[name]
    array = schema["properties"]["array"]
    array.pop("anyOf")
    array |= {
        "type": ["string", "integer", "array", "null"],
        "items": {"type": "integer", "minimum": 0},
        "minItems": 1,
        "minimum": 0,
    }
    schema["properties"]["after"] |= {
        "type": ["string", "integer", "array", "null"],
        "items": {"type": ["string", "integer"]},
    }
    for field in (
        schema["properties"]["args"],
        schema["properties"]["command"]["anyOf"][0],
    ):
        field["items"] = {"type": ["string", "number"]}
    binding = schema["properties"]["binding"]
    reference = {"$ref": binding.pop("$ref")}
    words = schema["$defs"]["Binding"]["properties"]["policy"]["enum"]
    binding["default"] = Binding().policy
    binding["anyOf"] = [{"type": "string", "enum": list(words)}, reference]
    monitor = schema["properties"]["monitor"]
    monitor["anyOf"] = [{"type": "boolean"}, {"$ref": monitor.pop("$ref")}]
    monitor["default"] = Monitor().enabled
    variables = schema["$defs"]["Environment"]["properties"]["variables"]
    variables["additionalProperties"] = {"type": ["string", "number"]}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "hpml job file",
        **{key: value for key, value in schema.items() if key != "title"},
    }


_LOOSE_SITE = {
    "NodeType": ("memory", "local_disk", "gpus"),
    "Partition": ("max_time", "default_time", "max_memory_per_node"),
    "Staging": ("shared_rate", "link_rate", "disk_rate"),
}


def site_schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of a site profile."""
    # Most commands load no profile; this spares them the model.
    from hpml_orchestrator.spec.site import (  # noqa: PLC0415
        NEEDED_DIRECTIVES,
        PER_JOB,
        Site,
    )

    schema = Site.model_json_schema()
    for model, names in _LOOSE_SITE.items():
        for name in names:
            field = schema["$defs"][model]["properties"][name]
            optional = any(one.get("type") == "null" for one in field.pop("anyOf", []))
            field["type"] = ["string", "integer", *(["null"] if optional else ["array"])]
    job = job_schema()
    schema["$defs"] |= job["$defs"]
    properties = schema["properties"]
    properties["defaults"] |= {
        "additionalProperties": False,
        "properties": {
            name: field for name, field in job["properties"].items() if name not in PER_JOB
        },
    }
    properties["directives"]["propertyNames"] = {
        "pattern": "^[a-z][a-z0-9-]*$",
        "not": {"enum": sorted(NEEDED_DIRECTIVES)},
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "hpml site profile",
        **{key: value for key, value in schema.items() if key != "title"},
    }
