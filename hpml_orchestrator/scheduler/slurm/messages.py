"""What Slurm's messages mean, and how to recover an interrupted submission."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from hpml_orchestrator.errors import SchedulerUnavailable
from hpml_orchestrator.records.files import read_text_or_nothing
from hpml_orchestrator.records.ids import parse_answer

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from pathlib import Path

    from hpml_orchestrator.scheduler.model import Scheduler

NOT_CONFIGURED = "Slurm is installed here but not configured (no slurm.conf found)"
NOT_CONFIGURED_HINT = (
    "on a machine without a cluster use --local, or once and for all HPML_BACKEND=local; "
    "else load Slurm's module or set SLURM_CONF"
)

_PREFIX = re.compile(
    r"^(?:sbatch|squeue|sacct|sacctmgr|scancel|scontrol|slurm_load_\w+|slurm_kill_job2?)"
    r"(?:: (?:error|fatal|warning|info)| error)?: ?|^allocation failure: ",
)

# The request may have reached the controller although no answer reached us. Observed with 22.05:
# a job was accepted 20 s after sbatch had ended with "Socket timed out on send/recv operation".
_TRANSPORT = re.compile(
    r"timed out|timeout (?:on|while|waiting)|unable to contact|zero bytes|connect(?:ion)? "
    r"(?:failure|refused|reset|closed|timed)|communications? (?:connection|send|receive|shutdown)"
    r"|unexpected message|message length|protocol (?:authentication|version)|munge|transport "
    r"endpoint|broken pipe|backup controller|standby mode|temporarily (?:unable|unavailable)"
    r"|interrupted system call|no route to host|network is (?:unreachable|down)"
    r"|problem talking to the database|persist_conn|persistinit|header lengths",
    re.IGNORECASE,
)

_FAILED = re.compile(r"^sbatch: error: Batch job submission failed: (.+)$")
# Printed before anything is sent: errors in options, script or configuration.
_BEFORE = re.compile(
    r"^sbatch: (?:fatal: |unrecognized option|option .* (?:requires an argument|is ambiguous)"
    r"|error: (?:Unable to open file|Batch script |This does not look like|Invalid --|"
    r"Invalid \S+ specification))",
)

# In a login shell without Slurm's module every command fails like this. It gets its own message,
# because the usual hint, to try again, would never help.
_NO_CONFIGURATION = re.compile(
    r"^\w+: fatal: Could not establish a configuration source$", re.MULTILINE
)

_NO_JOB = re.compile(r"invalid job id|job/step already complet|already complet", re.IGNORECASE)

NODES_DOWN = "Nodes required for job are DOWN"
_RELEASE = "`scontrol release {job}` lets it start"
_SHOW = "`sacctmgr show qos` and `sacctmgr show associations user=$USER` show limits"
_DOWN = "`sinfo --list-reasons` names nodes that are out of service"

# squeue shows these words for a waiting job, and sbatch prints them before its refusal.
_LIMITS = (
    (r"(?:Assoc|QOS)\w*Submit\w*|MaxSubmitJobs\w*",
     f"wait for queued jobs to end, or submit fewer (array tasks count); {_SHOW}"),
    (r"(?:Assoc|QOS)\w*(?:WallDuration|TimeLimit)\w*", f"ask for less time; {_SHOW}"),
    (r"QOSMin\w+", "ask for more, or name another QOS: `sacctmgr show qos format=name,mintres`"),
    (r"(?:Assoc|QOS)\w*(?:Minutes|Billing|GrpWall)\w*",
     f"size times time limit is above the limit: ask for less time or a smaller job; {_SHOW}"),
    (r"(?:Assoc|QOS)Max\w+Per(?:Job|Node)\w*", f"ask for less; {_SHOW}"),
    (r"(?:Assoc|QOS)\w*Jobs(?:Limit|Per)\w*", f"as many jobs run as may run; {_SHOW}"),
    (r"(?:Assoc|QOS)(?:Max|Grp)\w+", f"running jobs fill a limit: wait, or ask for less; {_SHOW}"),
)  # fmt: skip
_REASONS = (
    ("JobHeldUser", f"you hold it; {_RELEASE}"),
    ("JobHeldAdmin", "an administrator holds it, who alone can release it"),
    ("JobHoldMaxRequeue", f"requeued too often and held; once the cause is mended {_RELEASE}"),
    (r".*(?:requeued[ _](?:in[ _])?held|special[ _]exit).*",
     f"Slurm requeued and holds it; once the cause is mended {_RELEASE}"),
    ("BeginTime", "it waits for its begin time, or for two minutes after a requeue"),
    ("Resources", "the CPUs, GPUs or memory that it needs are in use"),
    ("Priority", "jobs of higher priority come first; `sprio` shows why"),
    ("DependencyNeverSatisfied", "the job before it did not end as required; cancel this one"),
    (r"ReqNodeNotAvail, Reserved.*|Reservation",
     "`scontrol show reservation` shows until when; a shorter job may start before"),
    (rf"ReqNodeNotAvail.*|NodeDown|{NODES_DOWN}[^;]*", _DOWN),
    (r"Partition(?:Down|Inactive)", "its partition starts no jobs now: `sinfo --summarize`"),
    (r"Partition(?:Time|Node)Limit", "its partition allows less: `sinfo --format='%P %l %s'`"),
    ("Licenses", "the licenses that it needs are in use: `scontrol show licenses`"),
    ("JobArrayTaskLimit", "as many of its tasks run as `array: …%N` allows"),
    *_LIMITS,
)  # fmt: skip

_HINTS: tuple[tuple[str, str], ...] = (
    # The text "job submit limit, user's size and/or time limits" covers all policies: the word
    # before it names the limit.
    *_LIMITS,
    (
        r"submit limit|job ?count|accounting/qos policy|association.*limit|max.*jobs?",
        "a limit of your account or QOS is reached: wait until jobs have ended, or ask for less",
    ),
    (
        r"invalid account|account or account/partition",
        "name an account that you may use: `sacctmgr show associations user=$USER`",
    ),
    (
        r"invalid partition|partition.*(?:not available|does not exist|down)",
        "name a partition that exists and that you may use: `sinfo --summarize`",
    ),
    (
        r"invalid qos|qos (?:not|is not)",
        "name a QOS that you may use: `sacctmgr show associations user=$USER format=account,qos`",
    ),
    (
        r"generic resource|\bgres\b",
        "ask for GPUs as the nodes name them: `sinfo --format='%P %N %G'`",
    ),
    (
        r"memory (?:specification|required)|--mem",
        "ask for less memory per node, or for nodes that have more: `sinfo --format='%P %N %m'`",
    ),
    (
        r"requested node configuration is not available",
        "the nodes are smaller than that: `sinfo --Node --format='%N %P %c CPUs %m MB %G %f'`",
    ),
    (
        r"time limit|timelimit",
        "ask for less time, or for a partition that allows more: `sinfo --format='%P %l'`",
    ),
    (
        r"node count",
        "ask for fewer nodes, or for a partition that has more: `sinfo --summarize`",
    ),
    (r"invalid feature", "ask for features that nodes have: `sinfo --format='%P %N %f'`"),
    (
        r"invalid job array specification",
        "the largest index must be below MaxArraySize of `scontrol show config`",
    ),
    (r"reservation", "see what is reserved for you: `scontrol show reservation`"),
    (r"invalid node name", "see which nodes there are: `sinfo --Node`"),
    (r"job dependency|dependency problem", "the job that it depends on is no longer known"),
    (rf"^{re.escape(NOT_CONFIGURED)}", NOT_CONFIGURED_HINT),
    (
        r"configuration source|fetch config|slurm\.conf",
        "this machine is not a client of a Slurm cluster; is SLURM_CONF right?",
    ),
    (
        r"dos line breaks|does not look like a batch script|script is empty",
        "the script was changed after hpml wrote it",
    ),
)


def clean(text: str) -> str:
    r"""Return Slurm's messages on one line, without the leading name of the command.

    >>> clean("sbatch: error: invalid partition specified: x\nsbatch: error: Batch job failed\n")
    'invalid partition specified: x; Batch job failed'
    """
    lines = (_PREFIX.sub("", line).strip() for line in text.splitlines())
    return "; ".join(dict.fromkeys(line for line in lines if line))


def hint_for(text: str) -> str:
    """Return a hint for a refusal; empty if there is none."""
    for pattern, hint in _HINTS:
        if re.search(pattern, text, re.IGNORECASE):
            return hint
    return ""


def explain(reason: str, job_id: str) -> str:
    """Return Slurm's reason why a job waits, followed by an explanation if there is one.

    >>> explain("JobHeldUser", "12")
    'JobHeldUser: you hold it; `scontrol release 12` lets it start'
    """
    for word, text in _REASONS:
        if re.fullmatch(word, reason, re.IGNORECASE):
            return f"{reason}: {text.replace('{job}', job_id)}"
    return reason


def on_other_cluster(job_id: str, cluster: str, here: str) -> tuple[str, str]:
    """Return message and hint for a job that sbatch has sent to another cluster."""
    message = f"sbatch sent it to cluster {cluster}, as job {job_id}; this is {here}"
    return message, (
        f"`scancel --clusters={cluster} {job_id}` cancels that job; "
        f"run hpml on a login node of {cluster}"
    )


def transport_fault(text: str) -> bool:
    """Return whether the controller or the connection to it failed, not the request itself."""
    return _TRANSPORT.search(text) is not None


def not_configured(text: str) -> bool:
    """Return whether the command found no configuration and so cannot have contacted a controller.

    A client that fetches slurm.conf from a slurmd does not count: in that case the connection
    failed.
    """
    return _NO_CONFIGURATION.search(text) is not None and not transport_fault(text)


def denied(text: str) -> bool:
    """Return whether Slurm denied this user access."""
    return "access/permission denied" in text.lower()


def no_such_job(text: str) -> bool:
    """Return whether every message is about a job that is unknown or has ended."""
    lines = [line for line in text.splitlines() if line.strip()]
    # All lines, not any: scancel reports each job separately, and one refused job among finished
    # ones is an error that the user must see.
    return bool(lines) and all(_NO_JOB.search(line) for line in lines)


def final_refusal(text: str) -> str | None:
    """Return why sbatch refused, if its messages alone prove that no job exists.

    Only complete lines count, not a torn last one. A message that may concern a request in flight,
    or that may follow a lost answer, proves nothing.
    """
    if transport_fault(text):
        return None
    if text.endswith("\n") and not_configured(text):
        return NOT_CONFIGURED
    for line in text.splitlines(keepends=True):
        if line.endswith("\n") and (_FAILED.match(line.strip()) or _BEFORE.match(line)):
            return clean(text)
    return None


# Recovery: find the job of a submission whose job id was not recorded, because hpml was killed.
#
# `recover` submits nothing. Only `Absent` permits another sbatch. The caller guarantees that:
#
# - the submission's directory is complete, and the marker `sbatch.started` is durable in it, before
#   sbatch starts;
# - sbatch runs in that directory and writes its output to `sbatch.out` and `sbatch.err` there;
# - a job first writes its own id to its run's directory, and ends at once if another job has done
#   so before. That is the last safeguard.

GRACE_SECONDS = 120.0
"""How long an sbatch that we cannot see may still be running, here or on another machine."""

_POLL_SECONDS = 5.0
UNAVAILABLE_SECONDS = 30.0
"""Pause before the next query if the scheduler does not answer."""


@dataclass(frozen=True)
class Found:
    """The job exists.

    Attributes:
        job_id: its id.
        how: the source: sbatch's answer, the job's own record, or the queue.
    """

    job_id: str
    how: Literal["sbatch.out", "job", "queue"]


@dataclass(frozen=True)
class Absent:
    """No job exists, and none will appear: sbatch may be called.

    Attributes:
        reason: why that is certain.
        refused: sbatch's message if it refused the job; otherwise empty.
        hint: what to do about a refusal.
    """

    reason: str
    refused: str = ""
    hint: str = ""


@dataclass(frozen=True)
class Undecided:
    """Not known yet.

    Attributes:
        reason: why.
        retry_after: seconds after which to ask again.
    """

    reason: str
    retry_after: float


Outcome: TypeAlias = Found | Absent | Undecided


def recover(
    scheduler: Scheduler,
    directory: Path,
    *,
    name: str,
    prepared_at: float,
    sbatch_started_at: float | None,
    attempt_job_ids: Sequence[str],
    now: float,
    grace_seconds: float = GRACE_SECONDS,
    answers: Path | None = None,
    known: Collection[str] = (),
) -> Outcome:
    """Determine whether a submission has a job.

    Args:
        scheduler: the scheduler that it was submitted to.
        directory: the submission's directory.
        name: the job's name.
        prepared_at: when the directory was written, seconds since the epoch; no job is older.
        sbatch_started_at: time of the marker `sbatch.started`; None without a marker.
        attempt_job_ids: ids that jobs of this submission have recorded themselves.
        now: seconds since the epoch.
        grace_seconds: how long after its start an unseen sbatch may still be running; at least
            `GRACE_SECONDS` if sbatch itself reported that its answer was lost.
        answers: directory of sbatch's output; default: that of the submission.
        known: ids of earlier jobs of the submission, to ignore.
    """
    answers = answers or directory
    # The order matters. Evidence on disk comes first, since it is final and needs no scheduler:
    # sbatch's own answer, then the id that a job wrote when it started.
    answered = _answered(answers, scheduler)
    if answered and not (isinstance(answered, Found) and answered.job_id in known):
        return answered
    recorded = next((job_id.strip() for job_id in attempt_job_ids if job_id.strip()), "")
    if recorded:
        return Found(recorded, "job")
    # A live sbatch may still create the job, so neither queue nor accounting can rule it out yet.
    # Check this before the query: if sbatch ends in between, its job is in the queue by then.
    if scheduler.submitting(directory):
        return Undecided("sbatch still works on it", _POLL_SECONDS)
    try:
        found = scheduler.find(directory, name=name, since=prepared_at)
        job_ids = [job_id for job_id in found if job_id not in known]
    except SchedulerUnavailable as error:
        stderr = read_text_or_nothing(answers / "sbatch.err")
        if sbatch_started_at is not None and not_configured(stderr):
            # The queue cannot be read for the same reason, so nothing reached any controller.
            refused = final_refusal(stderr)
            if refused:
                return Absent("sbatch refused it", refused, hint_for(refused))
        return Undecided(f"the scheduler gives no answer: {error}", UNAVAILABLE_SECONDS)
    # A double start can create several jobs. The oldest counts: each job records its id first,
    # and the others end as soon as they see it.
    if job_ids:
        return Found(job_ids[0], "queue")
    # The marker is durable before sbatch starts, so without it no request was ever sent.
    if sbatch_started_at is None:
        return Absent("sbatch was never started")
    # If the clock was set back, this waits longer, never shorter.
    outcome = _jobless(answers, scheduler, grace_seconds, max(now - sbatch_started_at, 0.0))
    if isinstance(outcome, Found) and outcome.job_id in known:
        return Absent("the answer of sbatch is that of an earlier job")
    return outcome


def _jobless(
    directory: Path, scheduler: Scheduler, grace_seconds: float, elapsed_seconds: float
) -> Outcome:
    stderr = read_text_or_nothing(directory / "sbatch.err")
    refused = final_refusal(stderr)
    if refused:
        return Absent("sbatch refused it", refused, hint_for(refused))
    if transport_fault(stderr):
        # The request may be pending in a hanging controller, although sbatch has ended.
        grace_seconds = max(grace_seconds, GRACE_SECONDS)
    left = grace_seconds - elapsed_seconds
    if left > 0:
        return Undecided("sbatch was started a moment ago and has not answered", left)
    # sbatch may have answered while the scheduler was being queried.
    return _answered(directory, scheduler) or Absent(
        f"sbatch has left neither answer nor job in {grace_seconds:g} s"
    )


def _answered(directory: Path, scheduler: Scheduler) -> Found | Absent | None:
    job_id, cluster = parse_answer(read_text_or_nothing(directory / "sbatch.out"))
    if cluster:
        with contextlib.suppress(SchedulerUnavailable):
            if cluster != (here := scheduler.cluster()):
                message, hint = on_other_cluster(job_id, cluster, here)
                return Absent("sbatch sent it to another cluster", message, hint)
    return Found(job_id, "sbatch.out") if job_id else None
