"""A job that Python code describes, and its submission."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpml_orchestrator.api.runs import Run, open_store
from hpml_orchestrator.api.submission import prepare_checked, scheduler_messages
from hpml_orchestrator.runs.backend import choose
from hpml_orchestrator.runs.prepare import render_job
from hpml_orchestrator.runs.submit import submit as submit_prepared
from hpml_orchestrator.site.profile import site_for
from hpml_orchestrator.spec.load import ResolvedJob, load_job, read_fields

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpml_orchestrator.spec.site import ResolvedSite

__all__ = ["Job", "run", "submit"]

_NO_FILE = "Job(…)"
"""Stands for the name of the job file if the fields come from Python."""

_log = logging.getLogger("hpml_orchestrator")


class Job:
    """A job to submit, validated as a job file is.

    The fields are those of a job file. Relative paths start at the current directory.

    Attributes:
        name: of the job.
        source: the job file, or a path in the current directory that does not exist.

    Raises:
        InputError: a field is wrong; the message names every one.

    >>> from hpml_orchestrator import InputError, Job
    >>> job = Job(name="fit", command=["true"], resources={"nodes": 2, "time": "10m"})
    >>> job
    Job('fit')
    >>> try:
    ...     Job(name="fit", command=["true"], resources={"node": 2})
    ... except InputError as error:
    ...     print(error)
    resources.node: unknown field; did you mean resources.nodes?
    """

    def __init__(self, **fields: Any) -> None:
        self._read(Path.cwd() / _NO_FILE, fields, {})

    @classmethod
    def from_file(cls, path: str | Path, settings: Mapping[str, Any] | None = None) -> Job:
        """Return the job of a job file; the file is read once.

        Args:
            path: a YAML or TOML file; relative paths in it start at its directory.
            settings: fields to change and their values, such as `{"resources.nodes": 4}`.

        Raises:
            NotFoundError: the file does not exist.
            InputError: a field is wrong.
        """
        job = cls.__new__(cls)
        source = Path(path).expanduser().absolute()
        cls._read(job, source, read_fields(source), settings or {})
        return job

    def _read(self, source: Path, fields: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        self.source = source
        self._fields, self._settings = dict(fields), dict(settings)
        self.name = self.resolve(None).job.name

    def resolve(self, site: ResolvedSite | None) -> ResolvedJob:
        """Return the complete job: its fields, those of a site profile, and the defaults.

        Raises:
            InputError: a field is wrong.
        """
        return load_job(self.source, [*self._settings.items()], site, fields=self._fields)

    def __repr__(self) -> str:
        return f"Job({self.name!r})"


def submit(
    job: Job,
    *,
    site: str | Path = "",
    local: bool = False,
    check: bool = True,
    records: str | Path | None = None,
) -> Run:
    """Submit a job as `hpml submit` does, and return its run once the scheduler has accepted it.

    Args:
        job: the job.
        site: the only site profile to use, or `none`; default: as `hpml` finds profiles.
        local: whether to run it on this machine; default: on Slurm if `sbatch` is on PATH.
        check: whether to check the job first, as `hpml check` does.
        records: directory of the records; default: `HPML_HOME`.

    Raises:
        InputError: the job is wrong, or the cluster would not run it.
        SchedulerError: the scheduler refused it; no job exists.
        SchedulerUnavailable: the scheduler did not answer, so a job may exist: do not submit it
            again. `list_runs` finds it, `hpml submit --resume` completes its submission.
        RecordError: the records cannot be written.
    """
    store = open_store(records)
    backend = choose("local" if local else "auto")
    chosen = str(site) or os.environ.get("HPML_SITE", "")
    profile = site_for(job.source, os.environ, chosen=chosen, backend=backend)
    rendered = render_job(job.resolve(profile), site=profile, here=backend == "local")
    submission, scheduler = prepare_checked(
        store, rendered, backend, checked=check, notice=lambda text: _log.warning("%s", text)
    )
    submit_prepared(submission, scheduler, environment=dict(os.environ))
    for line in scheduler_messages(submission):
        _log.warning("%s", line)
    return Run(submission, records=store.root)


def run(
    job: Job,
    *,
    site: str | Path = "",
    local: bool = False,
    check: bool = True,
    records: str | Path | None = None,
    timeout: float | None = None,
) -> Run:
    """Submit a job, wait until it has ended, and return its run.

    Args:
        job: the job.
        site: as for `submit`.
        local: as for `submit`.
        check: as for `submit`.
        records: as for `submit`.
        timeout: seconds to wait; None: without limit.

    Raises:
        JobFailedError: it ended in another state than COMPLETED; `Run("last")` is the run.
        TimeoutError: it has not ended in time; it continues.
        HpmlError: as `submit`.
    """
    submitted = submit(job, site=site, local=local, check=check, records=records)
    submitted.wait(timeout)
    return submitted
