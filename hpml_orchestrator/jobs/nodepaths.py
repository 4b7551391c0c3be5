"""Where this node keeps what is staged, by the site profile and the variables of the job."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from hpml_orchestrator.jobs.site import site_for

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["NodePaths", "node_paths"]


class NodePaths(NamedTuple):
    """A directory in RAM and one on the local disk; "" where this node has none."""

    ram: str
    scratch: str


def node_paths(directory: Path, environment: Mapping[str, str], *, chosen: str = "") -> NodePaths:
    """Return what `shm` and `local` stand for here, as a job's script would have it.

    The profile's path may begin with a variable that only jobs have: outside of one there is no
    local directory then. Without a profile it is $SLURM_TMPDIR, $TMPDIR or /tmp.

    Args:
        directory: where the command runs, in or below which a project keeps its profile.
        environment: of the process.
        chosen: what `--site` or `HPML_SITE` says: a file, or `none`.

    Raises:
        NotFoundError: the chosen profile is not there.
        InputError: something is wrong with a profile.
    """
    site = site_for(directory / "job.yaml", environment, chosen=chosen)
    partition = environment.get("SLURM_JOB_PARTITION")
    ram = site.site.path("ram", partition) if site else None
    scratch = site.site.path("scratch", partition) if site else None
    usual = environment.get("SLURM_TMPDIR") or environment.get("TMPDIR") or "/tmp"  # noqa: S108
    return NodePaths(
        "/dev/shm" if ram is None else _expanded(ram, environment),  # noqa: S108 - RAM is the point
        usual if scratch is None else _expanded(scratch, environment),
    )


def _expanded(path: str, environment: Mapping[str, str]) -> str:
    """Return a path with its first variable replaced; "" where that is not set."""
    variable = re.match(r"\$([A-Za-z_][A-Za-z0-9_]*)", path)
    if variable is None:
        return path
    value = environment.get(variable[1], "")
    return value + path[variable.end() :] if value else ""
