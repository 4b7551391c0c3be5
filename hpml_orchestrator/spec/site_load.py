"""Read site profiles, lay them over one another, and say what is wrong with them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.spec import monitor
from hpml_orchestrator.spec.binding import spelled_out
from hpml_orchestrator.spec.job import Job
from hpml_orchestrator.spec.load import SITE_PROFILE, explained, read_mapping
from hpml_orchestrator.spec.overlay import covers, leaves, merged, values
from hpml_orchestrator.spec.site import DefaultsError, Site

__all__ = ["ResolvedSite", "load_site"]


@dataclass(frozen=True)
class ResolvedSite:
    """A site profile, complete.

    Attributes:
        site: the profile; every path in it is absolute.
        sources: the files that it came from, the weakest first.
        origins: dotted field -> the file that it came from.
    """

    site: Site
    sources: tuple[Path, ...] = ()
    origins: Mapping[str, Path] = field(default_factory=dict)

    def origin(self, name: str) -> Path | None:
        """Return the file that a field came from; the strongest that has to do with it."""
        if name in self.origins:
            return self.origins[name]
        found = {path for given, path in self.origins.items() if covers(given, name)}
        return next((path for path in reversed(self.sources) if path in found), None)


def load_site(paths: list[Path]) -> ResolvedSite:
    """Load profiles, each laid over those before it.

    Raises:
        NotFoundError: there is no such file.
        InputError: something in one is wrong; every finding is named with its field and file.
    """
    data: dict[str, Any] = {}
    origins: dict[str, Path] = {}
    for path in paths:
        own = _absolute(read_mapping(path, SITE_PROFILE), path.parent)
        if isinstance(own.get("defaults"), dict):
            own["defaults"] = monitor.spelled_out(spelled_out(own["defaults"]))
        data = merged(data, own, whole="directives")
        origins = {
            name: file
            for name, file in origins.items()
            if not any(covers(given, name) for given in values(own))
        }
        origins.update(dict.fromkeys(leaves(own), path))
    try:
        site = Site.model_validate(data)
    except ValidationError as error:
        raise _explained(error, paths, origins) from None
    return ResolvedSite(site, tuple(paths), origins)


def _absolute(data: dict[str, Any], base: Path) -> dict[str, Any]:
    """Make the paths of a profile absolute: against its own directory."""

    def at(path: object) -> object:
        if not isinstance(path, str) or not path:
            return path
        return os.path.normpath(os.path.join(base, os.path.expanduser(path)))

    result = dict(data)
    if "templates" in result:
        result["templates"] = at(result["templates"])
    kinds = result.get("node_types")
    if isinstance(kinds, dict):
        result["node_types"] = {
            name: {**kind, "topology": at(kind["topology"])}
            if isinstance(kind, dict) and "topology" in kind
            else kind
            for name, kind in kinds.items()
        }
    defaults = result.get("defaults")
    if isinstance(defaults, dict):
        places = {"environment": _environment, "monitor": _monitor}
        changed = {
            name: make(defaults[name], at)
            for name, make in places.items()
            if isinstance(defaults.get(name), dict)
        }
        result["defaults"] = {**defaults, **changed}
    return result


def _environment(given: dict[str, Any], at: Callable[[object], object]) -> dict[str, Any]:
    environment = dict(given)
    for name in ("venv", "conda", "python"):
        value = environment.get(name)
        if isinstance(value, str) and (name == "venv" or "/" in value):
            environment[name] = at(value)
    container = environment.get("container")
    if isinstance(container, dict) and container.get("engine") == "apptainer":
        image = container.get("image")
        if isinstance(image, str) and "://" not in image:
            environment["container"] = {**container, "image": at(image)}
    return environment


def _monitor(given: dict[str, Any], at: Callable[[object], object]) -> dict[str, Any]:
    paths = ("web_config", "targets")
    return {name: at(value) if name in paths else value for name, value in given.items()}


def _explained(error: ValidationError, paths: list[Path], origins: dict[str, Path]) -> InputError:
    """Turn pydantic's findings into one error; those of the defaults are told as of a job file."""
    for finding in error.errors(include_url=False):
        inner = (finding.get("ctx") or {}).get("error")
        if isinstance(inner, DefaultsError):
            return _named(
                explained(inner.error, hint="", model=Job, prefix="defaults."), paths, origins
            )
    return _named(explained(error, hint="", model=Site), paths, origins)


def _named(made: InputError, paths: list[Path], origins: dict[str, Path]) -> InputError:
    files = {
        str(path) for given, path in origins.items() if made.field and covers(given, made.field)
    }
    where = ", ".join(sorted(files) or [str(path) for path in paths])
    made.hint = f"in {where}; `hpml schema site` prints every field"
    return made
