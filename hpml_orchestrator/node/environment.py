"""Variables that Slurm and the batch script set on a node."""

from __future__ import annotations

import os
import re
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

ELSEWHERE = "HPML_STAGE_ELSEWHERE"
"""JSON: by the name of a node, the paths of staged data that are others there."""

_RANGE = r"\d{1,9}(?:-\d{1,9})?"


def node_name(environment: Mapping[str, str] = os.environ) -> str:
    """Return Slurm's name of this node; the host's short name without Slurm."""
    return environment.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]


def job_key(environment: Mapping[str, str]) -> str:
    """Return `<cluster>-<job id>`, which the batch script sets as HPML_JOB_KEY."""
    cluster = environment.get("SLURM_CLUSTER_NAME") or "slurm"
    return environment.get("HPML_JOB_KEY") or f"{cluster}-{environment.get('SLURM_JOB_ID', '0')}"


def integer(environment: Mapping[str, str], name: str, default: int) -> int:
    """Return a variable as a number; the default if it is not set, or not a number."""
    text = environment.get(name, "")
    return int(text) if text.isdecimal() else default


def node_index(environment: Mapping[str, str]) -> tuple[int, int]:
    """Return this node's number in the job, from 0, and how many nodes the job has."""
    nodes = integer(environment, "SLURM_NNODES", 1)
    return integer(environment, "SLURM_NODEID", 0), max(1, nodes)


def node_names(text: str) -> list[str]:
    """Return the names in a job's node list; empty if it cannot be read.

    Not `scheduler.nodelist`, which needs a library: nodes may have only Python.

    >>> node_names("n[08-10,12],login"), node_names("n[1-"), node_names("")
    (['n08', 'n09', 'n10', 'n12', 'login'], [], [])
    """
    names: list[str] = []
    for entry in re.findall(r"(?:[^,\[\]]|\[[^\]]*\]?)+", text):
        match = re.fullmatch(rf"([^\[\]]*)(?:\[({_RANGE}(?:,{_RANGE})*)\])?([^\[\]]*)", entry)
        if match is None:
            return []
        prefix, ranges, suffix = match.groups()
        if ranges is None:
            names.append(prefix)
            continue
        for part in ranges.split(","):
            first, _, last = part.partition("-")
            numbers = range(int(first), int(last or first) + 1)
            names += [f"{prefix}{number:0{len(first)}d}{suffix}" for number in numbers]
    return names
