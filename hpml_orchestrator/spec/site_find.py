"""Find the site profiles that apply to a job file, without loading the model of a profile."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from hpml_orchestrator.errors import InputError

SYSTEM_PATH = "/etc/hpml/site.toml"
PROJECT_NAME = "hpml.toml"


def user_path(environment: Mapping[str, str]) -> Path | None:
    """Return the path of the user's profile, which may not exist; None without a home directory."""
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
    """Return the profiles that apply to a job file, lowest precedence first; none of them is read.

    They are `/etc/hpml/site.toml`, the user's `hpml/site.toml` below `$XDG_CONFIG_HOME`
    (`~/.config`), and the project's `hpml.toml`: the nearest one in the job file's directory or a
    directory above it. A profile that is chosen by name applies alone; `none` means no profile.

    A project's profile that belongs to a third person (neither the user, nor root, nor the job
    file's owner), or that everybody can write to, is refused: it could change what a job runs.

    Args:
        job_file: the job file; no project's profile is looked for when None.
        environment: of the process.
        system: the system's profile.
        chosen: the value of `--site` or `HPML_SITE`.

    Raises:
        InputError: a project's profile is not trusted, one cannot be read, or the system's
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
    """Return whether there is a profile; a broken link or a directory is an error."""
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        # A shared profile that was moved away must not silently take its rules with it.
        if path.is_symlink():
            raise _unfit(path, "is a link that leads nowhere") from None
        return False
    except OSError as error:
        # A closed directory on the way up belongs to somebody else, and so would its profile.
        if may_be_closed and isinstance(error, PermissionError) and not os.path.islink(path):
            return False
        raise _unfit(path, f"cannot be read: {error.strerror or error}") from error
    if not stat.S_ISREG(mode):
        raise _unfit(path, "is not a regular file")
    return True


def _check_trusted(profile: Path, job_file: Path) -> None:
    info = profile.stat()
    trusted = {0, os.getuid()}
    with contextlib.suppress(OSError):  # a missing job file is reported elsewhere
        trusted.add(job_file.stat().st_uid)
    hint = f"if it is right, name it with `--site {profile}`; `--site none` uses no profile"
    # A profile may name templates, and so any shell code. In a directory such as /scratch everybody
    # can put one above a colleague's job file.
    if info.st_uid not in trusted:
        problem = "belongs to somebody who is neither you, nor root, nor the job file's owner"
        raise _unfit(profile, problem, hint)
    if info.st_mode & stat.S_IWOTH:
        raise _unfit(profile, "can be written by everybody", hint)


def _unfit(
    path: Path, problem: str, hint: str = "repair or remove it; `--site none` uses no profile"
) -> InputError:
    return InputError(problem, field="site profile", value=str(path), hint=hint)
