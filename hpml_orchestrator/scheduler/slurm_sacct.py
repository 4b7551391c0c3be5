"""Accounting asked for all that it keeps of some jobs, steps and earlier starts included.

Text and not JSON: of a job that failed, `sacct --json` of 22.05 has no exit code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpml_orchestrator.scheduler.slurm_ask import ask, unusable
from hpml_orchestrator.scheduler.slurm_columns import parse_accounted
from hpml_orchestrator.scheduler.slurm_parse import UNIT, valid_id

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hpml_orchestrator.scheduler.accounting import AccountedJob
    from hpml_orchestrator.scheduler.command import Runner

__all__ = ["ACCOUNTED_COLUMNS", "read_accounted"]

ACCOUNTED_COLUMNS = (
    "JobID JobIDRaw State ExitCode User Account Partition QOS Cluster Submit Start End Elapsed "
    "TimelimitRaw NNodes NodeList NTasks Reason ReqTRES AllocTRES TotalCPU UserCPU SystemCPU "
    "MaxRSS MaxRSSNode AveRSS TRESUsageInMax TRESUsageInTot TRESUsageOutTot JobName WorkDir"
).split()
"""All of them are in every version from 22.05 on; texts of users come last."""


def read_accounted(
    run: Runner, job_ids: Sequence[str], *, env: Mapping[str, str] | None = None
) -> tuple[AccountedJob, ...]:
    """Return every start of these jobs with its steps; none where there is no accounting.

    Args:
        run: starts commands.
        job_ids: of jobs, tasks (`3_1`) or components (`28+1`); an array's own id means all tasks.
        env: environment of the command; the process's own when none is given.

    Raises:
        SchedulerUnavailable: accounting gave no usable answer.
    """
    asked = [job_id for job_id in dict.fromkeys(job_ids) if valid_id(job_id)]
    if not asked:
        return ()
    argv = ["sacct", "--duplicates", "--parsable2", "--noheader", f"--delimiter={UNIT}"]
    argv += [f"--format={','.join(ACCOUNTED_COLUMNS)}", f"--jobs={','.join(asked)}"]
    done = ask(run, argv, env=env)
    if done.returncode == 0:
        return parse_accounted(done.stdout, ACCOUNTED_COLUMNS, UNIT)
    if "accounting storage is disabled" in (done.stderr + done.stdout).lower():
        return ()
    raise unusable("sacct", done)
