"""Which site profile counts for a job, and what its nodes look like."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import InputError, NotFoundError
from hpml_orchestrator.spec import find_profiles

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpml_orchestrator.spec import Job
    from hpml_orchestrator.spec.site import NodeType
    from hpml_orchestrator.spec.site_load import ResolvedSite
    from hpml_orchestrator.topology import Topology

__all__ = ["kinds_for", "site_for", "topologies_of", "topology_faults"]


def site_for(
    job_file: str | Path | None,
    environment: Mapping[str, str],
    *,
    chosen: str = "",
    backend: str = "slurm",
) -> ResolvedSite | None:
    """Return the site profile of a job file; None where there is none.

    Jobs of the local backend run without one, for it describes the cluster and not this machine;
    a profile that is chosen by name counts for them too.

    Args:
        job_file: the job file, beside or below which a project keeps its profile.
        environment: of the process.
        chosen: what `--site` or `HPML_SITE` says: a file, or `none`.
        backend: where the job shall run.

    Raises:
        NotFoundError: the chosen profile is not there.
        InputError: something is wrong with a profile.
    """
    if backend == "local" and not chosen:
        return None
    paths = find_profiles(job_file, environment, chosen=chosen)
    if not paths:
        return None
    from hpml_orchestrator.spec.site_load import load_site  # noqa: PLC0415 - where there is one

    return load_site(paths)


def kinds_for(job: Job, site: ResolvedSite) -> dict[str, NodeType]:
    """Return the node types that a job may land on by the site's own rules, by name."""
    from hpml_orchestrator.script.site_rules import as_asked  # noqa: PLC0415 - where there is one

    return site.site.kinds_of(as_asked(job, site.site.directives).resources.partition)


def topologies_of(job: Job, site: ResolvedSite | None) -> dict[str, Topology]:
    """Return the topologies of the node types that a job may land on, by the type's name.

    Raises:
        InputError: a file of the profile is not there, or tells of no node; names file and field.
    """
    if site is None:
        return {}
    files = {
        name: kind.topology
        for name, kind in kinds_for(job, site).items()
        if kind.topology is not None
    }
    return {name: _read(name, path, site) for name, path in files.items()}


def topology_faults(site: ResolvedSite) -> list[InputError]:
    """Return what is wrong with the topology files of all of a profile's node types."""
    faults = []
    for name, kind in site.site.node_types.items():
        if kind.topology is not None:
            try:
                _read(name, kind.topology, site)
            except InputError as error:
                faults.append(error)
    return faults


def _read(name: str, path: str, site: ResolvedSite) -> Topology:
    from hpml_orchestrator.topology.recognise import read_topology  # noqa: PLC0415 - as above

    field = f"node_types.{name}.topology"
    try:
        found = read_topology(Path(path))
    except (InputError, NotFoundError) as error:
        raise InputError(
            error.message, field=field, hint=f"in {site.origin(field)}; {error.hint}".rstrip("; ")
        ) from None
    if not found.cores:
        raise InputError(
            f"{path}: tells of no CPUs",
            field=field,
            hint=f"in {site.origin(field)}; `hpml topo --json` on such a node writes one",
        )
    return found
