"""Variables that Slurm and the batch script set on a node.

The agent's own options are in `options.py`, apart, because that imports `staging`: the other
commands of a job's start do without it.
"""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from hpml_orchestrator.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

T = TypeVar("T")
_RANGE = r"\d{1,9}(?:-\d{1,9})?"


@dataclass(frozen=True)
class CheckpointOptions:
    """When the ranks are asked to save and stop, and what follows; the job file's `checkpoint`."""

    requeue: Sequence[str] = ()  # the reasons after which the run continues
    # Seconds before the time limit at which ranks are asked to stop; None for automatic
    lead: float | None = None
    attempts: int = 20  # how many the run may have
    # Seconds without a sign of life after which the ranks of a node hang; 0 for never
    hang: float = 0
    avoid_failed_nodes: bool = True  # whether the next attempt leaves out nodes that failed or hung
    # Name of the signal that ranks get with a stop request, such as USR1; may be empty
    signal: str = ""
    time_limit: float | None = None  # the job's, in seconds; None if unknown
    can_requeue: bool = True  # whether the site lets a job's owner requeue it

    @classmethod
    def from_environment(
        cls, environment: Mapping[str, str] = os.environ
    ) -> CheckpointOptions | None:
        """Return the options in HPML_CHECKPOINT; None if the job file has no `checkpoint`.

        Raises:
            InputError: it cannot be read.
        """
        text = environment.get("HPML_CHECKPOINT", "")
        return read_option(cls, "HPML_CHECKPOINT", text) if text else None


def read_option(kind: Callable[..., T], option: str, text: str) -> T:
    """Build an options object from the text of a JSON object.

    Raises:
        InputError: the text is not a JSON object, or has unknown fields.
    """
    try:
        return kind(**json.loads(text))
    except (ValueError, TypeError, KeyError) as error:
        raise InputError(f"cannot be read: {error}", field=option, value=text) from error


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
