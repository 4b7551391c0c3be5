"""Read site profiles and lay them over one another."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.spec.document import SITE_PROFILE, read_mapping
from hpml_orchestrator.spec.job import spelled_out
from hpml_orchestrator.spec.load import make_absolute
from hpml_orchestrator.spec.overlay import covers, leaves, merged
from hpml_orchestrator.spec.problems import input_error
from hpml_orchestrator.spec.site import DefaultsError, ResolvedSite, Site

__all__ = ["ResolvedSite", "load_site"]


def load_site(paths: list[Path]) -> ResolvedSite:
    """Load profiles, each laid over those before it.

    Raises:
        NotFoundError: there is no such file.
        InputError: something in one is wrong; every finding is named with its field and file.
    """
    data: dict[str, Any] = {}
    origins: dict[str, Path] = {}
    for path in paths:
        fields = read_mapping(path, SITE_PROFILE)
        _make_absolute(fields, path.parent)
        data = merged(data, fields, whole="directives")
        given = leaves(fields, empty=False)
        origins = {
            name: file
            for name, file in origins.items()
            if not any(covers(other, name) for other in given)
        }
        origins.update(dict.fromkeys(leaves(fields), path))
    try:
        site = Site.model_validate(data)
    except ValidationError as error:
        raise _named(error, paths, origins) from None
    return ResolvedSite(site, tuple(paths), origins)


def _make_absolute(fields: dict[str, Any], base: Path) -> None:
    """Make the paths of a profile absolute, in place, and spell out short forms in its defaults."""
    node_types = fields.get("node_types")
    kinds = node_types.values() if isinstance(node_types, dict) else []
    for owner, name in [(fields, "templates"), *((kind, "topology") for kind in kinds)]:
        path = owner.get(name) if isinstance(owner, dict) else None
        if isinstance(path, str) and path:
            owner[name] = os.path.normpath(os.path.join(base, os.path.expanduser(path)))
    defaults = fields.get("defaults")
    if isinstance(defaults, dict):
        for name, value in defaults.items():
            defaults[name] = spelled_out(name, value)
        make_absolute(defaults, base)


def _named(error: ValidationError, paths: list[Path], origins: dict[str, Path]) -> InputError:
    """Return the findings as one error that names the file of the first one."""
    problem = input_error(error, model=Site)
    for finding in error.errors(include_url=False):
        inner = (finding.get("ctx") or {}).get("error")
        if isinstance(inner, DefaultsError):
            problem = input_error(inner.error, prefix="defaults.")
    files = {
        str(path)
        for given, path in origins.items()
        if problem.field and covers(given, problem.field)
    }
    where = ", ".join(sorted(files) or [str(path) for path in paths])
    problem.hint = f"in {where}; `hpml schema site` prints every field"
    return problem
