"""What a node's agent works with: `agent.json`, and what only the batch script's shell knows."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hpml_orchestrator.records.job import NodeJob, SiteLimits

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hpml_orchestrator.records.job import Job, Stage


@dataclass(frozen=True)
class AgentOptions:
    """The options of an agent."""

    attempt: Path  # the attempt's directory
    job: Job
    site: SiteLimits = field(default_factory=SiteLimits)
    bases: Mapping[str, str] = field(default_factory=dict)  # directories of `shm` and `local`
    job_directories: Sequence[str] = ()  # in which of these the job gets an empty directory
    # Source and target of each result to copy back, the most important first
    collect: Sequence[tuple[str, str]] = ()

    def at_its_directory(self, stage: Stage) -> Stage:
        """Return an entry of `stage` with this node's directory in place of `shm` or `local`."""
        return replace(stage, target=self.bases.get(stage.target, stage.target))


def parse_options(argv: Sequence[str]) -> AgentOptions:
    """Return the options of `agent ATTEMPT SUBMISSION …`; see the help of each.

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
