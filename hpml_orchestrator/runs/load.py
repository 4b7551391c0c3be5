"""Load a job: find its site profile, merge the fields, read them, resolve the paths."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, Union

from hpml_orchestrator.jobfile.load import leaves, merge, read_fields
from hpml_orchestrator.jobfile.rules import resolved_job
from hpml_orchestrator.records.job import JOB_FIELDS, Job
from hpml_orchestrator.site.profile import site_for

if TYPE_CHECKING:
    from hpml_orchestrator.site.model import ResolvedSite

SiteChoice: TypeAlias = Union[str, "ResolvedSite", None]
"""The word of `--site` or `HPML_SITE` (empty: the profiles that are found), the profile that
another job was loaded with, or None for no profile."""


@dataclass(frozen=True)
class ResolvedJob:
    """A complete job, the source of each of its values, its backend and its site profile.

    Attributes:
        job: the job; every path in it is absolute.
        source: absolute path of the job file.
        origins: dotted field -> `command line`, `job file`, `site profile FILE`, `default` or
            `measured`.
        backend: `slurm` or `local`.
        site: the site profile that applies to it.
    """

    job: Job
    source: Path
    origins: dict[str, str]
    backend: str = "slurm"
    site: ResolvedSite | None = None


def load_job(
    path: str | Path,
    settings: Sequence[tuple[str, object]] = (),
    site: SiteChoice = None,
    points: Collection[str] = (),
    *,
    backend: str = "slurm",
    fields: Mapping[str, object] | None = None,
    arguments: Sequence[str] = (),
    notice: Callable[[str], None] = lambda _: None,
) -> ResolvedJob:
    """Load a job from a YAML 1.2 or TOML file.

    Args:
        path: the job file; `.toml` is read as TOML, all else as YAML.
        settings: dotted field and value pairs of the command line; later ones win.
        site: which site profile applies; its defaults lie below the job file.
        points: names of a sweep's values, which arguments refer to as `{point.NAME}`.
        backend: `slurm` or `local`; a local job only uses a profile that is chosen by name.
        fields: the fields instead of those of the file, whose path only places them.
        arguments: of the command line, to append to `args`.
        notice: takes a line about profiles that a local job does not use.

    Raises:
        NotFoundError: the job file, or the chosen profile, does not exist.
        InputError: something in one of them is wrong; every finding is named with its field.
    """
    source = Path(os.path.abspath(path))
    if isinstance(site, str):
        site = site_for(source, os.environ, chosen=site, backend=backend, notice=notice)
    given = read_fields(path) if fields is None else fields
    layer = merge(given, settings, site.job_defaults() if site else None, arguments)
    where = f"in {source}; " if source.is_file() else ""
    hint = f"{_argument(settings)}{where}`hpml schema job` prints every field"
    job = resolved_job(layer.fields, source.parent, points, hint)
    origins = {name: layer.origin(name) for name in leaves(job.to_json())}
    return ResolvedJob(job, source, origins, backend, site)


def _argument(settings: Sequence[tuple[str, object]]) -> str:
    meant = [f"{name}={one}" for name, one in settings if name not in JOB_FIELDS]
    meant = [one for one in meant if "." not in one.partition("=")[0]]
    return f"an argument of the program goes to the end: -- --{meant[0]}; " if meant else ""
