"""Slurm's words for why a job waits or is refused: a pattern, what it means, and what to do."""

from __future__ import annotations

import re

NODES_DOWN = "Nodes required for job are DOWN"
_RELEASE = "`scontrol release {job}` lets it start"
_SHOW = "`sacctmgr show qos` and `sacctmgr show associations user=$USER` show limits"
_DOWN = "`sinfo --list-reasons` names nodes that are out of service"

# The same words stand in squeue for a job that waits and before sbatch's message of a refusal.
LIMITS = (
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
    *LIMITS,
)  # fmt: skip


def explain(reason: str, job_id: str) -> str:
    """Return why a job waits, after Slurm's own words; these alone if they are not known.

    >>> explain("JobHeldUser", "12")
    'JobHeldUser: you hold it; `scontrol release 12` lets it start'
    """
    for word, text in _REASONS:
        if re.fullmatch(word, reason, re.IGNORECASE):
            return f"{reason}: {text.replace('{job}', job_id)}"
    return reason
