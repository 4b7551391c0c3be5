"""Find the site profiles that count for a job file, read them, and lay them over one another."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Mapping
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

__all__ = [
    "PROJECT_NAME",
    "SYSTEM_PATH",
    "ResolvedSite",
    "find_profiles",
    "load_site",
    "user_path",
]

SYSTEM_PATH = "/etc/hpml/site.toml"
PROJECT_NAME = "hpml.toml"


def user_path(environment: Mapping[str, str]) -> Path | None:
    """Return where the user's own profile is, or would be; None where there is no home."""
    home = environment.get("HOME", "")
    config = environment.get("XDG_CONFIG_HOME") or (os.path.join(home, ".config") if home else "")
    return Path(config, "hpml", "site.toml") if os.path.isabs(config) else None


def find_profiles(
    job_file: str | Path | None,
    environment: Mapping[str, str],
    *,
    system: str = SYSTEM_PATH,
    chosen: str = "",
) -> list[Path]:
    """Return the profiles that count for a job file, the weakest first; none of them is read.

    They are `/etc/hpml/site.toml`, the user's `hpml/site.toml` below `$XDG_CONFIG_HOME`
    (`~/.config`), and the project's `hpml.toml`: the nearest one in the job file's directory or a
    directory above it. Another one, chosen by name, counts alone; `none` stands for no profile.

    A project's profile of a third person (neither the user, nor root, nor the job file's owner),
    and one that everybody can write, is refused: it could change what a job runs.

    Args:
        job_file: the job file; no project's profile is looked for when None.
        environment: of the process.
        system: the system's profile.
        chosen: the value of `--site` or `HPML_SITE`.

    Raises:
        InputError: a project's profile is not to be trusted, one cannot be read, or the system's
            cannot be looked for.
    """
    if chosen:
        return [] if chosen == "none" else [Path(os.path.abspath(os.path.expanduser(chosen)))]
    profiles = [Path(system)] if _exists(Path(system), may_be_closed=False) else []
    own = user_path(environment)
    if own is not None and _exists(own):
        profiles.append(own)
    if job_file:
        directories = Path(os.path.abspath(job_file)).parents
        candidates = (directory / PROJECT_NAME for directory in directories)
        project = next((path for path in candidates if _exists(path)), None)
        if project is not None and project not in profiles:
            _check_trusted(project, Path(job_file))
            profiles.append(project)
    return profiles


def _exists(path: Path, *, may_be_closed: bool = True) -> bool:
    """Return whether there is a profile; a broken link or a directory is an error.

    Args:
        path: of the profile.
        may_be_closed: False makes a directory that may not be entered an error. `su` leaves such
            a one as current directory and home.

    Raises:
        InputError: there is something else of that name, or it cannot be looked for.
    """
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        if may_be_closed and isinstance(error, PermissionError):
            return False
        raise _unfit(path, f"cannot be looked for: {error.strerror or error}") from error
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise _unfit(path, "is a link that leads nowhere") from None
    except OSError as error:
        raise _unfit(path, f"cannot be read: {error.strerror or error}") from error
    if not stat.S_ISREG(mode):
        raise _unfit(path, "is not a regular file")
    return True


def _check_trusted(profile: Path, job_file: Path) -> None:
    info = profile.stat()
    trusted = {0, os.getuid()}
    with contextlib.suppress(OSError):  # a missing job file has an error of its own
        trusted.add(job_file.stat().st_uid)
    hint = f"if it is right, name it with `--site {profile}`; `--site none` uses no profile"
    if info.st_uid not in trusted:
        problem = "belongs to somebody who is neither you, nor root, nor the job file's owner"
        raise _unfit(profile, problem, hint)
    if info.st_mode & stat.S_IWOTH:
        raise _unfit(profile, "can be written by everybody", hint)


def _unfit(
    path: Path, problem: str, hint: str = "repair or remove it; `--site none` uses no profile"
) -> InputError:
    return InputError(problem, field="site profile", value=str(path), hint=hint)


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
