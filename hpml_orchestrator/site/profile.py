"""Find the site profiles of a job file, and where data is staged on this node.

The models of a profile are loaded only where there is one.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hpml_orchestrator.errors import HpmlError, InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hpml_orchestrator.site.model import ResolvedSite


SYSTEM_PATH = "/etc/hpml/site.toml"
PROJECT_NAME = "hpml.toml"


class NodePaths(NamedTuple):
    """Where this node stages data, and the site's limits on opening files."""

    ram: str  # a directory in RAM; empty for none
    scratch: str  # one on the local disk
    opens_per_node: float = 0  # files per second; 0 for no limit
    opens_per_job: float = 0  # of all `nodes` of the job together
    nodes: int = 1


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


def site_for(
    job_file: str | Path | None,
    environment: Mapping[str, str],
    *,
    chosen: str = "",
    backend: str = "slurm",
    notice: Callable[[str], None] = lambda _: None,
) -> ResolvedSite | None:
    """Return the site profile of a job file; None without a profile.

    Local jobs use one only if it is chosen by name, since a profile describes the cluster.

    Args:
        job_file: the job file; a project's profile is in its directory or above.
        environment: of the process.
        chosen: the value of `--site` or `HPML_SITE`: a file, or `none`.
        backend: of the job.
        notice: takes a line about profiles that a local job does not use.

    Raises:
        NotFoundError: the chosen profile does not exist.
        InputError: a profile is wrong.
    """
    if backend == "local" and not chosen:
        with contextlib.suppress(InputError):  # one that cannot be read is not used either
            unused = find_profiles(job_file, environment)
            if unused and backend_of_site(job_file, environment) != "local":
                names = ", ".join(map(str, unused))
                note = f"a local job uses no site profile or templates of yours ({names})"
                notice(f"note: {note}; --site FILE applies one")
        return None
    paths = find_profiles(job_file, environment, chosen=chosen)
    if not paths:
        return None
    from hpml_orchestrator.site.model import load_site  # noqa: PLC0415 - only with a profile

    return load_site(paths)


def backend_of_site(
    job_file: str | Path | None, environment: Mapping[str, str], *, chosen: str = ""
) -> str:
    """Return where jobs run by default, `slurm` or `local`; empty where no profile says.

    Args:
        job_file: the job file.
        environment: of the process.
        chosen: the value of `--site` or `HPML_SITE`.

    Raises:
        InputError: a profile cannot be read, and one that it has priority over says where.
    """
    from hpml_orchestrator.jobfile.load import read_mapping  # noqa: PLC0415 - only with a profile

    found = ""
    try:
        for path in find_profiles(job_file, environment, chosen=chosen):
            found = str(read_mapping(path, "site profile").get("backend", found))
    except HpmlError:
        if found:  # without it a job for the cluster would run on this machine, or the reverse
            raise
        # whoever uses the profile names its fault
    return found if found in ("slurm", "local") else ""


def prometheus_of_site(environment: Mapping[str, str], *, chosen: str = "") -> str:
    """Return the address of the site's Prometheus; empty where the profile has none.

    Args:
        environment: of the process.
        chosen: the value of `--site` or `HPML_SITE`.

    Raises:
        As `site_for`.
    """
    site = site_for("job.yaml", environment, chosen=chosen)
    return (site.site.monitoring.prometheus or "") if site else ""


def topology_faults(site: ResolvedSite) -> list[InputError]:
    """Return the errors of the topology files of all node types."""
    from hpml_orchestrator.topology.sysfs import (  # noqa: PLC0415 - only `hpml doctor` reads them
        read_topology_field,
    )

    faults = []
    for name, kind in site.site.node_types.items():
        field = f"node_types.{name}.topology"
        try:
            if kind.topology:
                read_topology_field(kind.topology, field=field, origin=site.origin(field))
        except InputError as error:
            faults.append(error)
    return faults


def node_paths(directory: Path, environment: Mapping[str, str], *, chosen: str = "") -> NodePaths:
    """Return what `shm` and `local` mean on this node, as in a job's script.

    The profile's path may begin with a variable that only jobs have: outside of a job there is no
    local directory then. Without a profile it is $SLURM_TMPDIR, $TMPDIR or /tmp.

    Args:
        directory: the working directory; a project's profile is there or above.
        environment: of the process.
        chosen: the value of `--site` or `HPML_SITE`: a file, or `none`.

    Raises:
        NotFoundError: the chosen profile does not exist.
        InputError: a profile is wrong.
    """
    scratch = environment.get("SLURM_TMPDIR") or environment.get("TMPDIR") or "/tmp"  # noqa: S108
    ram = "/dev/shm"  # noqa: S108 - RAM is the point
    count = environment.get("SLURM_NNODES", "")
    nodes = int(count) if count.isdecimal() else 1
    resolved = site_for(directory / "job.yaml", environment, chosen=chosen)
    if resolved is None:
        return NodePaths(ram, scratch, nodes=nodes)
    site, partition = resolved.site, environment.get("SLURM_JOB_PARTITION")
    return NodePaths(
        _expanded(site.path("ram", partition) or ram, environment),
        _expanded(site.path("scratch", partition) or scratch, environment),
        site.staging.opens_per_second or 0,
        site.staging.opens_per_second_per_job or 0,
        nodes,
    )


def _expanded(path: str, environment: Mapping[str, str]) -> str:
    variable = re.match(r"\$([A-Za-z_][A-Za-z0-9_]*)", path)
    if variable is None:
        return path
    # Without the variable there is no directory. `/data` instead of `$SCRATCH/data` would be
    # somewhere else.
    value = environment.get(variable[1], "")
    return value + path[variable.end() :] if value else ""
