"""The JSON Schemas of job files, sweep files and site profiles, for editors and the reference."""

from __future__ import annotations

import ast
import inspect
import itertools
import textwrap
from typing import Any

from pydantic import BaseModel

from hpml_orchestrator.spec import checkpoint, job, site, sweep
from hpml_orchestrator.spec.job import Job
from hpml_orchestrator.spec.site import NEEDED_DIRECTIVES, PER_JOB, Site


def job_schema() -> dict[str, object]:
    """Return the JSON Schema (2020-12) of a job file."""
    return _schema(Job, "hpml job file")


def site_schema() -> dict[str, object]:
    """Return the JSON Schema (2020-12) of a site profile."""
    schema, job_fields = _schema(Site, "hpml site profile"), _schema(Job, "hpml job file")
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


def sweep_schema() -> dict[str, object]:
    """Return the JSON Schema (2020-12) of a sweep file."""
    return _schema(sweep.Sweep, "hpml sweep file")


def _schema(model: type[BaseModel], title: str) -> dict[str, Any]:
    schema = model.model_json_schema()
    for name, part in [(model.__name__, schema), *schema["$defs"].items()]:
        module = next(module for module in (job, checkpoint, site, sweep) if hasattr(module, name))
        descriptions = _field_docstrings(getattr(module, name))
        for field, about in part["properties"].items():
            about["description"] = descriptions[field]
    dialect = "https://json-schema.org/draft/2020-12/schema"
    return {"$schema": dialect, **schema, "title": title}


def _field_docstrings(model: type[BaseModel]) -> dict[str, str]:
    """Return the text below each field: pydantic would read the sources at every start of hpml."""
    docstrings: dict[str, str] = {}
    for cls in reversed(model.__mro__):
        if not issubclass(cls, BaseModel) or cls is BaseModel:
            continue
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
        for field, text in itertools.pairwise(ast.iter_child_nodes(definition)):
            match field, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value)):
                    docstrings[name] = inspect.cleandoc(str(value))
    return docstrings
