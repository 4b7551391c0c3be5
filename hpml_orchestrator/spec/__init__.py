"""What the user wants: the job file and the site profile as models, and how they are loaded.

The names below are looked up when they are first used: `spec.values` and `spec.array` are used by
commands that load no job file, which then need no pydantic.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpml_orchestrator.spec.array import ArraySpec
    from hpml_orchestrator.spec.data import Collect, Stage
    from hpml_orchestrator.spec.job import (
        Binding,
        Container,
        Environment,
        Job,
        Mail,
        Monitor,
        Resources,
    )
    from hpml_orchestrator.spec.load import ResolvedJob, load_job, parse_setting
    from hpml_orchestrator.spec.schema import job_schema, site_schema, sweep_schema
    from hpml_orchestrator.spec.site import NodeType, ResolvedSite, Site, load_site
    from hpml_orchestrator.spec.site_find import find_profiles
    from hpml_orchestrator.spec.sweep import Sweep, load_sweep

__all__ = [
    "ArraySpec",
    "Binding",
    "Collect",
    "Container",
    "Environment",
    "Job",
    "Mail",
    "Monitor",
    "NodeType",
    "ResolvedJob",
    "ResolvedSite",
    "Resources",
    "Site",
    "Stage",
    "Sweep",
    "find_profiles",
    "job_schema",
    "load_job",
    "load_site",
    "load_sweep",
    "parse_setting",
    "site_schema",
    "sweep_schema",
]

_MODULES = {
    "array": "ArraySpec",
    "data": "Collect Stage",
    "job": "Binding Container Environment Job Mail Monitor Resources",
    "load": "ResolvedJob load_job parse_setting",
    "schema": "job_schema site_schema sweep_schema",
    "site": "NodeType ResolvedSite Site load_site",
    "site_find": "find_profiles",
    "sweep": "Sweep load_sweep",
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
