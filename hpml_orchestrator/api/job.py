"""A job that Python code describes, and its submission."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpml_orchestrator.api.runs import Run, expect, expect_seconds
from hpml_orchestrator.check.submission import submit_checked
from hpml_orchestrator.records.store import open_store
from hpml_orchestrator.runs.backend import choose
from hpml_orchestrator.runs.prepare import render_job
from hpml_orchestrator.site.profile import site_for
from hpml_orchestrator.spec.load import ResolvedJob, load_job, read_fields

if TYPE_CHECKING:
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
        expect(isinstance(path, str | Path), "path", path, "the path of a job file")
        right = 'a dictionary such as {"resources.nodes": 4}'
        expect(isinstance(settings or {}, Mapping), "settings", settings, right)
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
    job: Job | str | Path,
    *,
    site: str | Path = "",
    local: bool = False,
    check: bool = True,
    records: str | Path | None = None,
) -> Run:
    """Submit a job as `hpml submit` does, and return its run once the scheduler has accepted it.

    Args:
        job: the job, or the path of its job file.
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
    if not isinstance(job, Job):
        expect(isinstance(job, str | Path), "job", job, "a Job, or the path of a job file")
        job = Job.from_file(job)
    for name, value in (("local", local), ("check", check)):
        expect(isinstance(value, bool), name, value, "True or False")
    store = open_store(records)
    backend = choose("local" if local else "auto")
    chosen = str(site) or os.environ.get("HPML_SITE", "")
    profile = site_for(job.source, os.environ, chosen=chosen, backend=backend)
    rendered = render_job(job.resolve(profile), site=profile, here=backend == "local")
    submission = submit_checked(
        store, rendered, backend, checked=check, notice=_log.warning, unchecked="`check=False`"
    )
    return Run(submission, records=store.root)


def run(
    job: Job | str | Path,
    *,
    site: str | Path = "",
    local: bool = False,
    check: bool = True,
    records: str | Path | None = None,
    timeout: float | None = None,
) -> Run:
    """Submit a job, wait until it has ended, and return its run.

    Args:
        job: the job, or the path of its job file.
        site: as for `submit`.
        local: as for `submit`.
        check: as for `submit`.
        records: as for `submit`.
        timeout: seconds to wait; None: without limit.

    Raises:
        JobFailedError: it ended in another state than COMPLETED; the error's `run` is its id.
        WaitTimeoutError: it has not ended in time; it continues.
        HpmlError: as `submit`.
    """
    expect_seconds(timeout)  # before there is a job
    submitted = submit(job, site=site, local=local, check=check, records=records)
    submitted.wait(timeout)
    return submitted
