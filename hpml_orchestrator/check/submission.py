"""Check a rendered job, write its submission and submit it."""

from __future__ import annotations

import os
import shutil
import sys
from typing import TYPE_CHECKING, Any

from hpml_orchestrator.check.job import check_job, refusal
from hpml_orchestrator.check.request import topologies_of
from hpml_orchestrator.errors import InputError
from hpml_orchestrator.records.files import read_text_or_nothing
from hpml_orchestrator.records.texts import printable
from hpml_orchestrator.runs.backend import cluster_name, open_backend
from hpml_orchestrator.runs.prepare import prepare
from hpml_orchestrator.runs.requeue import claim_checkpoints, refuse_shared_checkpoints
from hpml_orchestrator.runs.select import pending_dependencies
from hpml_orchestrator.runs.submit import submit

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hpml_orchestrator.check.job import CheckReport
    from hpml_orchestrator.records.store import Store
    from hpml_orchestrator.records.submission import Submission
    from hpml_orchestrator.runs.prepare import Rendered
    from hpml_orchestrator.scheduler.model import Scheduler

_CLUSTER_SECONDS = 5.0  # while a submission waits


def prepare_checked(
    store: Store,
    rendered: Rendered,
    *,
    checked: bool,
    notice: Callable[[str], None],
    unchecked: str = "`--no-check`",
    sid: str = "",
    record: Mapping[str, object] | None = None,
) -> tuple[Submission, Scheduler]:
    """Check a job and write its submission; return it with its scheduler, to be submitted.

    Args:
        store: where records live.
        rendered: the job and its script.
        checked: whether to check the job first.
        notice: called with each line to show, such as a warning.
        unchecked: what the user can write to submit it without the check.
        sid: the submission's id, if it was chosen before.
        record: additional fields of `submit.json`.

    Raises:
        InputError: the job cannot run, or the cluster would not run it.
        RecordError: the records cannot be written.
    """
    job, backend = rendered.resolved.job, rendered.resolved.backend
    # Before anything is written, and also with --no-check: two runs in one directory would
    # overwrite each other's checkpoints.
    refuse_shared_checkpoints(store, job)
    dependencies = pending_dependencies(store, job.after, backend=backend)
    if checked:
        _refuse_unaccepted(rendered, store, notice, unchecked)
    scheduler = open_backend(backend, store)
    submission = prepare(
        store,
        rendered,
        cluster=cluster_name(scheduler),
        argv=sys.argv,
        environment=dict(os.environ),
        after=dependencies,
        notice=notice,
        sid=sid,
        record=record,
    )
    try:
        claim_checkpoints(store, submission)
    except InputError:  # another process was faster: this one was never submitted
        for directory in (submission.directory, store.runs_dir / submission.sid):
            shutil.rmtree(directory, ignore_errors=True)
        raise
    return submission, scheduler


def submit_checked(
    store: Store,
    rendered: Rendered,
    *,
    checked: bool,
    notice: Callable[[str], None],
) -> Submission:
    """Check a job of the Python API and submit it; the arguments are those of `prepare_checked`.

    Raises:
        SchedulerError: the scheduler refused it; no job exists.
        SchedulerUnavailable: a job may exist; `hpml submit --resume` finds out.
    """
    submission, scheduler = prepare_checked(
        store, rendered, checked=checked, notice=notice, unchecked="`check=False`"
    )
    submit(submission, scheduler, environment=dict(os.environ))
    for line in scheduler_messages(submission):
        notice(line)
    return submission


def scheduler_messages(submission: Submission) -> list[str]:
    """Return what sbatch printed about a job that it accepted, such as a site's message."""
    lines = read_text_or_nothing(submission.directory / "sbatch.err").splitlines()
    texts = filter(None, (printable(line).strip() for line in lines))
    return [text if text.startswith("sbatch: ") else f"sbatch: {text}" for text in texts]


def _refuse_unaccepted(
    rendered: Rendered,
    store: Store,
    notice: Callable[[str], None],
    unchecked: str,
) -> None:
    report = check_rendered(
        rendered,
        store,
        cluster_seconds=_CLUSTER_SECONDS,
        walk_seconds=1.0,
        others=False,
    )
    # If records cannot be written, the submission itself reports that a moment later.
    errors = [finding for finding in report.errors if finding.code != "records.unwritable"]
    if errors:
        raise refusal(errors, unchecked)
    for finding in report.warnings:
        if finding.code != "stage.partly":
            hint = f"; {finding.hint}" if finding.hint else ""
            notice(f"warning: {finding}{hint}")
    if report.not_asked:
        notice(f"warning: not checked against the cluster: {report.not_asked}")


def check_rendered(rendered: Rendered, store: Store, **limits: Any) -> CheckReport:
    """Check a job that was rendered for its scheduler; `limits` are passed to `check_job`."""
    job, backend, site = rendered.resolved.job, rendered.resolved.backend, rendered.resolved.site
    return check_job(
        job,
        backend=backend,
        records=store.root,
        environment=dict(os.environ),
        site=site,
        topologies={} if backend == "local" else topologies_of(job, site),
        targets=rendered.targets,
        **limits,
    )
