"""Where this node keeps what is staged, and how gently it asks, by the site profile and the job."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from hpml_orchestrator.site.profile import site_for

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["NodePaths", "node_paths"]


class NodePaths(NamedTuple):
    """A directory in RAM and one on the local disk; "" where this node has none.

    Limits are those of the site, in files opened per second, 0 for none: of a node, and of all
    `nodes` of the job together.
    """

    ram: str
    scratch: str
    opens_per_node: float = 0
    opens_per_job: float = 0
    nodes: int = 1


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
    limits = site.site.staging if site else None
    nodes = environment.get("SLURM_NNODES", "")
    usual = environment.get("SLURM_TMPDIR") or environment.get("TMPDIR") or "/tmp"  # noqa: S108
    return NodePaths(
        "/dev/shm" if ram is None else _expanded(ram, environment),  # noqa: S108 - RAM is the point
        usual if scratch is None else _expanded(scratch, environment),
        (limits.opens_per_second or 0) if limits else 0,
        (limits.opens_per_second_per_job or 0) if limits else 0,
        int(nodes) if nodes.isdecimal() else 1,
    )


def _expanded(path: str, environment: Mapping[str, str]) -> str:
    """Return a path with its first variable replaced; "" where that is not set."""
    variable = re.match(r"\$([A-Za-z_][A-Za-z0-9_]*)", path)
    if variable is None:
        return path
    value = environment.get(variable[1], "")
    return value + path[variable.end() :] if value else ""
