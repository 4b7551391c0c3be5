"""`agent.json`, next to a batch script: the job, and what its nodes need of the site profile.

Equal jobs have equal files: nothing in it belongs to one submission.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import RecordError
from hpml_orchestrator.records.job import Job, JobPart

if TYPE_CHECKING:
    from pathlib import Path

AGENT_FILE = "agent.json"


@dataclass(frozen=True)
class SiteLimits(JobPart):
    """Limits of the site's file system, network and scheduler; a number is 0 if unknown."""

    opens_per_second: int = 0
    """Most files that one node may open per second."""
    opens_per_second_per_job: int = 0
    """Most that all nodes of the job may, together."""
    metadata_rate: int = 0
    """Files per second that the file system opens for all nodes."""
    shared_rate: int = 0
    """Bytes/s that it reads for all nodes."""
    link_rate: int = 0
    """Bytes/s between two nodes."""
    disk_rate: int = 0
    """Bytes/s that a node's disk writes."""
    array_jitter: int = 0
    """Most seconds over which the tasks of an array spread their start."""
    interfaces: tuple[str, ...] = ()
    """Network interfaces between nodes, the best first."""
    can_requeue: bool = True
    """Whether a job's owner may requeue it."""


@dataclass(frozen=True)
class NodeJob(JobPart):
    """What all nodes of a job read."""

    job: Job
    site: SiteLimits = SiteLimits()

    def text(self) -> str:
        """Return the content of `agent.json`."""
        return json.dumps(self.to_json(), indent=2, ensure_ascii=False) + "\n"

    @classmethod
    def read(cls, submission: Path) -> NodeJob:
        """Read the `agent.json` in the directory of a batch script.

        Raises:
            RecordError: it is missing or damaged.
        """
        path = submission / AGENT_FILE
        try:
            # Paths are bytes: decoded as this node encodes them, whatever its locale.
            return cls.from_json(json.loads(os.fsdecode(path.read_bytes())))
        except (OSError, AttributeError, LookupError, TypeError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise RecordError(
                f"{path} cannot be read ({why}): submit the job again, "
                "or write its files again with 'hpml render -o DIR'"
            ) from error
