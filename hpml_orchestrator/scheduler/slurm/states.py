"""Slurm's job states, long and compact, in our words."""

from __future__ import annotations

from hpml_orchestrator.scheduler.model import JobState

__all__ = ["COMPACT", "LONG", "parse_state"]

LONG: dict[str, JobState] = {
    # Base states, of which a job has one.
    "PENDING": JobState.PENDING,
    "RUNNING": JobState.RUNNING,
    "SUSPENDED": JobState.SUSPENDED,
    "COMPLETED": JobState.COMPLETED,
    "CANCELLED": JobState.CANCELLED,
    "FAILED": JobState.FAILED,
    "TIMEOUT": JobState.TIMEOUT,
    "NODE_FAIL": JobState.NODE_FAIL,
    "PREEMPTED": JobState.PREEMPTED,
    "BOOT_FAIL": JobState.BOOT_FAIL,
    "DEADLINE": JobState.DEADLINE,
    "OUT_OF_MEMORY": JobState.OUT_OF_MEMORY,
    # Flags on top of one; squeue shows the flag in place of the base state.
    "COMPLETING": JobState.COMPLETING,
    "CONFIGURING": JobState.CONFIGURING,
    "EXPEDITING": JobState.PENDING,  # 25.11: requeued with the highest priority
    "LAUNCH_FAILED": JobState.FAILED,
    "POWER_UP_NODE": JobState.CONFIGURING,
    "RECONFIG_FAIL": JobState.FAILED,
    "REQUEUED": JobState.REQUEUED,
    "REQUEUE_FED": JobState.REQUEUED,
    "REQUEUE_HOLD": JobState.REQUEUED,
    "RESIZING": JobState.RUNNING,
    "RESV_DEL_HOLD": JobState.PENDING,
    "REVOKED": JobState.CANCELLED,  # another cluster of the federation runs it
    "SIGNALING": JobState.RUNNING,
    "SPECIAL_EXIT": JobState.REQUEUED,  # requeued and held
    "STAGE_OUT": JobState.COMPLETING,
    "STOPPED": JobState.STOPPED,
    "UPDATE_DB": JobState.UNKNOWN,  # says nothing of the job
}
"""Every long name, as squeue's %T, sacct and scontrol print it."""

COMPACT: dict[str, str] = {
    "PD": "PENDING",
    "R": "RUNNING",
    "S": "SUSPENDED",
    "CD": "COMPLETED",
    "CA": "CANCELLED",
    "F": "FAILED",
    "TO": "TIMEOUT",
    "NF": "NODE_FAIL",
    "PR": "PREEMPTED",
    "BF": "BOOT_FAIL",
    "DL": "DEADLINE",
    "OOM": "OUT_OF_MEMORY",
    "CG": "COMPLETING",
    "CF": "CONFIGURING",
    "EX": "EXPEDITING",
    "LF": "LAUNCH_FAILED",
    "PU": "POWER_UP_NODE",
    "RQ": "REQUEUED",
    "RF": "REQUEUE_FED",
    "RH": "REQUEUE_HOLD",
    "RS": "RESIZING",
    "RD": "RESV_DEL_HOLD",
    "RV": "REVOKED",
    "SI": "SIGNALING",
    "SE": "SPECIAL_EXIT",
    "SO": "STAGE_OUT",
    "ST": "STOPPED",
    "UD": "UPDATE_DB",
}
"""squeue's %t and what it stands for."""


def parse_state(text: str) -> JobState:
    """Return the state that a word of Slurm's stands for; UNKNOWN when there is no such word.

    >>> parse_state("CANCELLED by 1000").value
    'CANCELLED'
    >>> parse_state("COMPLETED+").value
    'COMPLETED'
    >>> parse_state("CG").value
    'COMPLETING'
    >>> parse_state("BRAND_NEW").value
    'UNKNOWN'
    """
    words = text.upper().split()
    if not words:
        return JobState.UNKNOWN
    word = words[0].rstrip("+*")
    return LONG.get(COMPACT.get(word, word), JobState.UNKNOWN)
