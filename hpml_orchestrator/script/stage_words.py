"""The words by which a script tells the agents how to stage; `node/arguments.py` reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpml_orchestrator.spec import Job, Stage
    from hpml_orchestrator.spec.site_load import ResolvedSite

__all__ = ["entry_options", "staging_options"]

_RATES = ("shared_rate", "metadata_rate", "link_rate", "disk_rate")


def entry_options(stage: Stage) -> list[str]:
    """Return the options behind an entry's `--stage`; what is as by default is left out."""
    options = []
    if stage.keep:
        options.append("--keep")
    if stage.distribution != "auto":
        options.append(f"--distribution {stage.distribution}")
    if stage.outside_links:
        options.append("--outside-links")
    if not stage.hash:
        options.append("--no-hash")
    if stage.epochs is not None:
        options.append(f"--epochs {stage.epochs}")
    return options


def staging_options(job: Job, site: ResolvedSite | None) -> list[str]:
    """Return what the site says of its file system, as far as this job's staging depends on it.

    One node has nothing to distribute, so rates are told to several; a job that is no array has
    nothing to spread. Sizes are in MiB/s, as the site profile's are in MiB.
    """
    if site is None or not job.stage:
        return []
    staging = site.site.staging
    names = ["opens_per_second", "opens_per_second_per_job"]
    if job.resources.nodes > 1:
        names += _RATES
    options = [
        f"--{name.replace('_', '-')} {value}"
        for name in names
        if (value := getattr(staging, name)) is not None
    ]
    interfaces = site.site.interfaces_of(job.resources.partition)
    if interfaces and job.resources.nodes > 1:
        options.append(f"--interfaces {','.join(interfaces)}")
    if job.tasks is not None and staging.array_jitter:
        options.append(f"--array-jitter {staging.array_jitter}")
        options.append(f"--array-tasks {len(job.tasks.indices)}")
    return options
