"""Find the site profiles that count for a job file, without reading them."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from hpml_orchestrator.errors import InputError

__all__ = ["PROJECT_NAME", "SYSTEM_PATH", "find_profiles", "user_path"]

SYSTEM_PATH = "/etc/hpml/site.toml"
PROJECT_NAME = "hpml.toml"
_NONE = "none"


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
    """Return the profiles that count for a job file, the weakest first.

    They are `/etc/hpml/site.toml`, the user's `hpml/site.toml` below `$XDG_CONFIG_HOME`
    (`~/.config`), and the project's `hpml.toml`: the nearest one in the job file's directory or a
    directory above it. Another one, chosen by name, counts alone; `none` stands for no profile.
    A directory of the user's or the project's that may not be looked into is passed over: that is
    what `su` leaves as the current directory and the home.

    A project's profile of a third person (neither the user, nor root, nor the job file's owner),
    and one that everybody can write, is refused: it could change what a job runs.

    Args:
        job_file: the job file; no project's profile is looked for when None.
        environment: of the process.
        system: the system's profile.
        chosen: what `--site` or `HPML_SITE` says.

    Raises:
        InputError: a project's profile is not to be trusted, or one is there that cannot be read,
            or the system's cannot be looked for.
    """
    if chosen:
        return [] if chosen == _NONE else [Path(os.path.abspath(os.path.expanduser(chosen)))]
    own = user_path(environment)
    found = [Path(system)] if _is_there(Path(system), closed_is_none=False) else []
    if own is not None and _is_there(own):
        found.append(own)
    if job_file:
        project = _project_profile(Path(os.path.abspath(job_file)))
        if project is not None and project not in found:
            _check_trusted(project, Path(job_file))
            found.append(project)
    return found


def _project_profile(job_file: Path) -> Path | None:
    for directory in job_file.parents:
        candidate = directory / PROJECT_NAME
        if _is_there(candidate):
            return candidate
    return None


def _is_there(path: Path, *, closed_is_none: bool = True) -> bool:
    """Return whether there is a profile; one that cannot be one is not passed over in silence.

    Args:
        path: where it would be.
        closed_is_none: whether there is none where its directory may not be looked into.

    Raises:
        InputError: there is something else of that name, or a link that leads nowhere.
    """
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        if closed_is_none and isinstance(error, PermissionError):
            return False
        raise _unfit(path, f"cannot be looked for: {error.strerror or error}") from error
    try:
        info = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        raise _unfit(path, "is a link that leads nowhere") from None
    except OSError as error:
        raise _unfit(path, f"cannot be read: {error.strerror or error}") from error
    if not stat.S_ISREG(info.st_mode):
        raise _unfit(path, "is no regular file")
    return True


def _unfit(path: Path, problem: str) -> InputError:
    return InputError(
        problem,
        field="site profile",
        value=str(path),
        hint="mend or remove it; `--site none` does without a profile",
    )


def _check_trusted(profile: Path, job_file: Path) -> None:
    info = profile.stat()
    trusted = {0, os.getuid()}
    with contextlib.suppress(OSError):  # there is no job file: its own error says so
        trusted.add(job_file.stat().st_uid)
    if info.st_uid not in trusted:
        problem = "belongs to somebody who is neither you, nor root, nor the job file's owner"
    elif info.st_mode & stat.S_IWOTH:
        problem = "can be written by everybody"
    else:
        return
    raise InputError(
        problem,
        field="site profile",
        value=str(profile),
        hint=f"look at it; then `--site {profile}` takes it, `--site none` does without",
    )
