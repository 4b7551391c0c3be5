"""The types of the records: they describe what hpml writes."""

from __future__ import annotations

import types
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

from pydantic import BaseModel

from hpml_orchestrator.records.schema import JobFields
from hpml_orchestrator.spec.job import Job


def plain(kind: Any) -> object:
    """Return a type of a model as its JSON has it, a model as the types of its fields."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        hints = get_type_hints(kind)
        return {name: plain(hints[name]) for name in kind.model_fields}
    if is_typeddict(kind):
        return {name: plain(hint) for name, hint in get_type_hints(kind).items()}
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Literal:
        return frozenset({type(part) for part in parts})
    if origin in (Union, types.UnionType):
        return [plain(part) for part in parts]
    if origin is not None:
        return origin, [plain(part) for part in parts]
    return frozenset({kind})


def test_the_type_of_a_recorded_job_is_that_of_the_model() -> None:
    """A new field of the job file needs its entry in `JobFields`; sizes are recorded as text."""
    recorded, model = plain(JobFields), plain(Job)
    assert isinstance(recorded, dict)
    assert isinstance(model, dict)
    size = [frozenset({int}), frozenset({types.NoneType})]
    for owner in (model["resources"]["memory"], model["stage"][1][0]["size"]):
        assert owner == size
        owner[0] = frozenset({str})
    assert recorded == model
