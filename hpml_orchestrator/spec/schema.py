"""The JSON Schema of a job file, for editors."""

from __future__ import annotations

from typing import Any

from hpml_orchestrator.spec.job import Job

__all__ = ["job_schema"]

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
    for field in (
        schema["properties"]["args"],
        schema["properties"]["command"]["anyOf"][0],
    ):
        field["items"] = {"type": ["string", "number"]}
    variables = schema["$defs"]["Environment"]["properties"]["variables"]
    variables["additionalProperties"] = {"type": ["string", "number"]}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "hpml job file",
        **{key: value for key, value in schema.items() if key != "title"},
    }
