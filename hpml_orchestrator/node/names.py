"""Names that the parts of a job agree on without asking each other."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping

__all__ = ["attempt_channel", "job_key", "node_names"]

_MOST_NODES = 100_000


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


def node_names(told: str) -> list[str]:
    """Return the names of a job's nodes, as Slurm writes lists of them; empty where it is no list.

    >>> node_names("n[08-10,12],login"), node_names("n[1-"), node_names("")
    (['n08', 'n09', 'n10', 'n12', 'login'], [], [])
    """
    found: list[str] = []
    for part in re.findall(r"(?:[^,\[\]]|\[[^\]]*\]?)+", told):
        match = re.fullmatch(r"([^\[\]]*)(?:\[([0-9,-]+)\])?([^\[\]]*)", part)
        if match is None:
            return []
        before, numbers, after = match.groups()
        if numbers is None:
            found.append(before + after)
            continue
        for one in numbers.split(","):
            first, _, last = one.partition("-")
            if not first or (last and int(last) - int(first) > _MOST_NODES):
                return []
            numbered = range(int(first), int(last or first) + 1)
            found += [f"{before}{number:0{len(first)}d}{after}" for number in numbered]
    return found
