"""Which site profile applies to a job, and where data is staged on this node."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.spec.site_find import find_profiles

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpml_orchestrator.spec.site import ResolvedSite


class NodePaths(NamedTuple):
    """Where this node stages data, and the site's limits on opening files."""

    ram: str  # a directory in RAM; empty for none
    scratch: str  # one on the local disk
    opens_per_node: float = 0  # files per second; 0 for no limit
    opens_per_job: float = 0  # of all `nodes` of the job together
    nodes: int = 1


def site_for(
    job_file: str | Path | None,
    environment: Mapping[str, str],
    *,
    chosen: str = "",
    backend: str = "slurm",
) -> ResolvedSite | None:
    """Return the site profile of a job file; None without a profile.

    Local jobs use one only if it is chosen by name, since a profile describes the cluster.

    Args:
        job_file: the job file; a project's profile is in its directory or above.
        environment: of the process.
        chosen: the value of `--site` or `HPML_SITE`: a file, or `none`.
        backend: of the job.

    Raises:
        NotFoundError: the chosen profile does not exist.
        InputError: a profile is wrong.
    """
    if backend == "local" and not chosen:
        return None
    paths = find_profiles(job_file, environment, chosen=chosen)
    if not paths:
        return None
    from hpml_orchestrator.spec.site import load_site  # noqa: PLC0415 - only with a profile

    return load_site(paths)


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
    from hpml_orchestrator.topology.recognise import (  # noqa: PLC0415 - only `hpml doctor` reads them
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
