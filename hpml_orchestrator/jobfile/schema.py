"""The JSON Schemas of job files and sweep files, for editors and the reference."""

from __future__ import annotations

import ast
import inspect
import itertools
import sys
import textwrap

from pydantic import BaseModel, TypeAdapter

from hpml_orchestrator.jobfile import sweep
from hpml_orchestrator.jobfile.rules import ModelType
from hpml_orchestrator.records import job
from hpml_orchestrator.records.job import Job, Json


def job_schema() -> dict[str, object]:
    """Return the JSON Schema (2020-12) of a job file."""
    return schema_of(Job, "hpml job file")


def sweep_schema() -> dict[str, object]:
    """Return the JSON Schema (2020-12) of a sweep file."""
    return schema_of(sweep.Sweep, "hpml sweep file")


def schema_of(model: ModelType, title: str) -> Json:
    """Return the JSON Schema of a model, with the descriptions of its fields."""
    module = sys.modules[model.__module__]
    schema = TypeAdapter(model).json_schema()
    for name, part in [(model.__name__, schema), *schema["$defs"].items()]:
        kind = getattr(module, name)
        descriptions = _field_docstrings(kind)
        for field, about in part["properties"].items():
            about["description"] = descriptions[field]
        if issubclass(kind, job.JobPart):  # whose defaults pydantic would show in their units
            for field, default in kind.written_defaults().items():
                part["properties"][field]["default"] = default
    dialect = "https://json-schema.org/draft/2020-12/schema"
    return {"$schema": dialect, **schema, "title": title}


def _field_docstrings(model: ModelType) -> dict[str, str]:
    """Return the text below each field: pydantic would read the sources at every start of hpml."""
    docstrings: dict[str, str] = {}
    for cls in reversed(model.__mro__):
        if not issubclass(cls, (BaseModel, job.JobPart)) or cls in (BaseModel, job.JobPart):
            continue
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
        for field, text in itertools.pairwise(ast.iter_child_nodes(definition)):
            match field, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value)):
                    docstrings[name] = inspect.cleandoc(str(value))
    return docstrings
