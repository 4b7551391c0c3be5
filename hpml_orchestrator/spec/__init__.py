"""What the user wants: the job file as a typed model, how it is loaded, and its JSON Schema.

Names are loaded when they are first used: `spec.values` and `spec.array` start without pydantic.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpml_orchestrator.spec.array import ArraySpec
    from hpml_orchestrator.spec.job import Container, Environment, Job, Mail, Resources
    from hpml_orchestrator.spec.load import ResolvedJob, load_job, parse_setting
    from hpml_orchestrator.spec.schema import job_schema, site_schema
    from hpml_orchestrator.spec.site_find import find_profiles
    from hpml_orchestrator.spec.stage import Stage

_MODULES = {
    "array": ("ArraySpec",),
    "job": ("Container", "Environment", "Job", "Mail", "Resources"),
    "load": ("ResolvedJob", "load_job", "parse_setting"),
    "schema": ("job_schema", "site_schema"),
    "site_find": ("find_profiles",),
    "stage": ("Stage",),
}

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


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
