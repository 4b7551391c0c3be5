"""What the user wants: the job file and the site profile as models, and how they are loaded.

The names below are looked up when they are first used: `spec.values` and `spec.array` are used by
commands that load no job file, which then need no pydantic.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpml_orchestrator.spec.array import ArraySpec
    from hpml_orchestrator.spec.job import Container, Environment, Job, Mail, Resources
    from hpml_orchestrator.spec.load import ResolvedJob, load_job, parse_setting
    from hpml_orchestrator.spec.schema import job_schema, site_schema
    from hpml_orchestrator.spec.site_find import find_profiles
    from hpml_orchestrator.spec.stage import Stage

__all__ = [
    "ArraySpec",
    "Container",
    "Environment",
    "Job",
    "Mail",
    "ResolvedJob",
    "Resources",
    "Stage",
    "find_profiles",
    "job_schema",
    "load_job",
    "parse_setting",
    "site_schema",
]

_MODULES = {
    "array": "ArraySpec",
    "job": "Container Environment Job Mail Resources",
    "load": "ResolvedJob load_job parse_setting",
    "schema": "job_schema site_schema",
    "site_find": "find_profiles",
    "stage": "Stage",
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
