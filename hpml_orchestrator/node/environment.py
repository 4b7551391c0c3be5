"""The environment of a node's agent and ranks: variables and options."""

from __future__ import annotations

import argparse
import os
import re
import socket
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hpml_orchestrator.records.job import NodeJob, SiteLimits

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hpml_orchestrator.records.job import Job, Stage

ELSEWHERE = "HPML_STAGE_ELSEWHERE"
"""Variable with JSON: by node, the paths of staged data that differ from the first node's."""

_RANGE = r"\d{1,9}(?:-\d{1,9})?"


def node_name(environment: Mapping[str, str] = os.environ) -> str:
    """Return this node's name in Slurm; without Slurm the short host name."""
    return environment.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]


def job_key(environment: Mapping[str, str]) -> str:
    """Return `<cluster>-<job id>`, which the batch script sets as HPML_JOB_KEY."""
    cluster = environment.get("SLURM_CLUSTER_NAME") or "slurm"
    return environment.get("HPML_JOB_KEY") or f"{cluster}-{environment.get('SLURM_JOB_ID', '0')}"


def integer(environment: Mapping[str, str], name: str, default: int) -> int:
    """Return a variable as a number; the default if it is not set or not a number."""
    text = environment.get(name, "")
    return int(text) if text.isdecimal() else default


def node_index(environment: Mapping[str, str]) -> tuple[int, int]:
    """Return this node's index in the job and the number of nodes."""
    nodes = integer(environment, "SLURM_NNODES", 1)
    return integer(environment, "SLURM_NODEID", 0), max(1, nodes)


def node_names(text: str) -> list[str]:
    """Return the names in a job's node list; empty if it cannot be read.

    Does not use `scheduler`, which needs a library: nodes may have only Python.

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


# The options of an agent: from `agent.json` and from the batch script's shell.


@dataclass(frozen=True)
class AgentOptions:
    """The options of an agent."""

    attempt: Path  # the attempt's directory
    job: Job
    site: SiteLimits = field(default_factory=SiteLimits)
    bases: Mapping[str, str] = field(default_factory=dict)  # directories for `shm` and `local`
    job_directories: Sequence[str] = ()  # those in which the job gets an empty directory
    # Source and target of each result to copy back, most important first
    collect: Sequence[tuple[str, str]] = ()

    def at_its_directory(self, stage: Stage) -> Stage:
        """Return an entry of `stage` with `shm` or `local` replaced by this node's directory."""
        return replace(stage, target=self.bases.get(stage.target, stage.target))


def parse_options(argv: Sequence[str]) -> AgentOptions:
    """Return the options in `agent ATTEMPT SUBMISSION …`; the help of each describes it.

    Raises:
        RecordError: the submission's `agent.json` cannot be read.
    """
    parser = argparse.ArgumentParser(prog="hpml-node.pyz agent", allow_abbrev=False)
    parser.add_argument("attempt", type=Path, help="the attempt's directory")
    parser.add_argument("submission", type=Path, help="the directory of agent.json")
    for name in ("shm", "local"):
        parser.add_argument(f"--{name}", metavar="DIRECTORY", help=f"what target {name} means here")
    parser.add_argument(
        "--job-directory",
        choices=("shm", "local"),
        action="append",
        default=[],
        help="make an empty directory of the job there",
    )
    parser.add_argument(
        "--collect",
        metavar=("SOURCE", "TARGET"),
        nargs=2,
        action="append",
        default=[],
        help="copy a result back",
    )
    given = parser.parse_args(argv)
    read = NodeJob.read(given.submission)
    bases = {name: path for name in ("shm", "local") if (path := getattr(given, name))}
    collect = [(source, target) for source, target in given.collect]
    return AgentOptions(given.attempt, read.job, read.site, bases, given.job_directory, collect)
