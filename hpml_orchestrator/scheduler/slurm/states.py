"""Slurm's job states in our words."""

from __future__ import annotations

from hpml_orchestrator.scheduler.model import JobState

__all__ = ["FLAGS", "parse_state"]

FLAGS = {
    "EXPEDITING": JobState.PENDING,  # 25.11: requeued with the highest priority
    "LAUNCH_FAILED": JobState.FAILED,
    "POWER_UP_NODE": JobState.CONFIGURING,
    "RECONFIG_FAIL": JobState.FAILED,
    "REQUEUE_FED": JobState.REQUEUED,
    "REQUEUE_HOLD": JobState.REQUEUED,
    "RESIZING": JobState.RUNNING,
    "RESV_DEL_HOLD": JobState.PENDING,
    "REVOKED": JobState.CANCELLED,  # another cluster of the federation runs it
    "SIGNALING": JobState.RUNNING,
    "SPECIAL_EXIT": JobState.REQUEUED,  # requeued and held
    "STAGE_OUT": JobState.COMPLETING,
    "UPDATE_DB": JobState.UNKNOWN,  # says nothing of the job
}
"""Flags that squeue shows in place of a base state and that have no state of their own here."""


def parse_state(text: str) -> JobState:
    """Return the state that Slurm's name stands for; UNKNOWN for a name that is not known.

    >>> [parse_state(text).value for text in ("CANCELLED by 1000", "COMPLETED+", "BRAND_NEW")]
    ['CANCELLED', 'COMPLETED', 'UNKNOWN']
    """
    name = (text.upper().split() or [""])[0].rstrip("+*")
    try:
        return FLAGS.get(name) or JobState(name)
    except ValueError:
        return JobState.UNKNOWN
