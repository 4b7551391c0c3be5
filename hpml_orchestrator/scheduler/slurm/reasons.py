"""Slurm's words for why a job waits or is refused, each with a sentence and a next step.

A limit's word is the same whether the job waits (`squeue`) or is refused (`sbatch: error: …`).
"""

from __future__ import annotations

import re

NODES_DOWN = "Nodes required for job are DOWN"
_RELEASE = "`scontrol release {job}` lets it start"
_LIMITS = "`sacctmgr show qos`, `sacctmgr show associations user=$USER` show the limits"
_DOWN = "`sinfo --list-reasons` names the nodes that are out of service and why"
_RESERVED = "`scontrol show reservation` shows until when; a shorter job may start before"

# word (a pattern), what it means, what to do
_LIMIT_REASONS: tuple[tuple[str, str, str], ...] = (
    (
        r"(?:Assoc|QOS)\w*Submit\w*|MaxSubmitJobs\w*",
        "your account or QOS has as many jobs in the queue as it may",
        "wait until jobs have ended, or submit fewer (each task of an array counts)",
    ),
    (
        r"(?:Assoc|QOS)\w*(?:WallDuration|TimeLimit)\w*",
        "your account or QOS allows less time",
        f"ask for less time; {_LIMITS}",
    ),
    (
        r"QOSMin\w+",
        "your QOS requires larger jobs",
        "ask for more, or name another QOS: `sacctmgr show qos format=name,mintres`",
    ),
    (
        r"(?:Assoc|QOS)\w*(?:Minutes|Billing|GrpWall)\w*",
        "its size times its time limit is more than your account or QOS may use",
        f"ask for less time or fewer resources; {_LIMITS}",
    ),
    (
        r"(?:Assoc|QOS)Max\w+Per(?:Job|Node)\w*",
        "your account or QOS allows less for one job",
        f"ask for less; {_LIMITS}",
    ),
    (
        r"(?:Assoc|QOS)\w*Jobs(?:Limit|Per)\w*",
        "as many jobs run as your account or QOS allows",
        f"it starts once others have ended, if any may run; {_LIMITS}",
    ),
    (
        r"(?:Assoc|QOS)(?:Max|Grp)\w+",
        "a limit of your account or QOS is reached",
        f"wait until jobs have ended, or ask for less; {_LIMITS}",
    ),
)
_REASONS: tuple[tuple[str, str, str], ...] = (
    ("JobHeldUser", "you hold it", _RELEASE),
    ("JobHeldAdmin", "an administrator holds it, who alone can release it", "ask why"),
    (
        "JobHoldMaxRequeue",
        "it was requeued as often as Slurm allows (MaxBatchRequeue) and is held",
        f"once the cause is mended {_RELEASE}",
    ),
    (
        r".*(?:requeued[ _](?:in[ _])?held|special[ _]exit).*",
        "Slurm put it back into the queue and holds it",
        f"once the cause is mended {_RELEASE}",
    ),
    ("BeginTime", "it waits for its begin time, or for two minutes after a requeue", ""),
    ("Resources", "the CPUs, GPUs or memory that it needs are in use", ""),
    ("Priority", "jobs of higher priority come first", "`sprio` shows why"),
    (
        "DependencyNeverSatisfied",
        "the job that it waits for did not end as required",
        "`hpml cancel {job}` removes it",
    ),
    (r"ReqNodeNotAvail, Reserved.*", "its nodes are reserved", _RESERVED),
    (r"ReqNodeNotAvail.*|NodeDown", "nodes that it needs are out of service", _DOWN),
    (rf"{NODES_DOWN}[^;]*", "", _DOWN),  # unless the nodes follow
    (r"Partition(?:Down|Inactive)", "its partition starts no jobs now", "`sinfo --summarize`"),
    (
        r"Partition(?:Time|Node)Limit",
        "its partition allows less",
        "ask for less, or name another partition: `sinfo --format='%P %l %s'`",
    ),
    ("Reservation", "its reservation has not begun", _RESERVED),
    ("Licenses", "the licenses that it needs are in use", "`scontrol show licenses`"),
    ("JobArrayTaskLimit", "as many tasks run as the array allows (`array: …%N`)", ""),
)

LIMIT_HINTS = tuple((rf"\b(?:{word})\b", step) for word, _, step in _LIMIT_REASONS)
"""What to do if a limit's word is in the messages of a refusal."""


def explain(reason: str, job_id: str) -> str:
    """Return why a job waits, after Slurm's own words; these alone if they are not known.

    >>> explain("JobHeldUser", "12")
    'JobHeldUser: you hold it; `scontrol release 12` lets it start'
    >>> explain("Priority: job 3 is before it", "12")
    'Priority: job 3 is before it'
    """
    for word, meaning, step in (*_REASONS, *_LIMIT_REASONS):
        if re.fullmatch(word, reason, re.IGNORECASE):
            text = "; ".join(filter(None, (meaning, step.replace("{job}", job_id))))
            return f"{reason}: {text}"
    return reason
