"""Names that the parts of a job agree on without asking each other."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping

__all__ = ["attempt_channel", "job_key"]


def job_key(environment: Mapping[str, str]) -> str:
    """Return `<cluster>-<job id>`, which the batch script sets as HPML_JOB_KEY."""
    given = environment.get("HPML_JOB_KEY")
    if given:
        return given
    cluster = environment.get("SLURM_CLUSTER_NAME") or "slurm"
    return f"{cluster}-{environment.get('SLURM_JOB_ID', '0')}"


def attempt_channel(environment: Mapping[str, str], attempt: str) -> str:
    """Return the abstract socket's name (no leading NUL, under 100 bytes) of this node's agent.

    Made of the user, the job, the attempt's directory and the node, so that jobs, attempts and
    several virtual nodes on one host never share one.
    """
    node = environment.get("SLURMD_NODENAME") or ""
    place = f"{attempt}\0{node}\0{job_key(environment)}"
    digest = hashlib.sha256(place.encode("utf-8", "surrogateescape")).hexdigest()[:24]
    return f"hpml-{os.getuid()}-{digest}"
