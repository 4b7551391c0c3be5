"""Which site profile counts for a job."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpml_orchestrator.spec import find_profiles

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from hpml_orchestrator.spec.site_load import ResolvedSite

__all__ = ["site_for"]


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
