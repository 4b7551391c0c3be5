"""What an exporter of a node is told: a frozen object, which travels as JSON to its process."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from hpml_exporters.attribution.jobs import JobFacts, facts_of
from hpml_exporters.roots import Roots

__all__ = ["COLLECTORS", "NodeOptions"]

COLLECTORS = (
    "gpu", "jobs", "processes", "shm", "disks", "infiniband", "nfs", "lustre", "training"
)  # fmt: skip
"""Names of the collectors that can be switched off."""


@dataclass(frozen=True)
class NodeOptions:
    """How a node is exported.

    Attributes:
        listen: ADDRESS:PORT; port 0 takes a free one.
        any_port: take a free port where that of `listen` is another's, as several jobs of a node
            may want one port.
        web_config: file in Prometheus' web-config format (TLS, users); empty: none.
        without: names of collectors that are off.
        gpu_interval: seconds between two readings of GPUs.
        job_interval: seconds between two readings of the jobs' control groups.
        process_interval: seconds between two looks at processes.
        node_interval: seconds between two readings of disks and networks.
        stuck_seconds: after which a reading that has not ended counts as stuck: its series go.
        exit_seconds: after which a stuck reading ends the process for its supervisor.
        job: set by the node agent: only this job is exported.
        address_file: is written with the address that is listened on, once it is; empty: none.
        summary_file: is written with the job's figures, at the end and now and then; empty: none.
        feed_fd: inherited descriptor (a unix datagram socket) that brings what ranks say; -1: none.
        parent_pid: the exporter ends when its parent is another than this; 0: never.
        roots: where the kernel's file systems are.
    """

    listen: str = "127.0.0.1:9445"
    any_port: bool = False
    web_config: str = ""
    without: tuple[str, ...] = ()
    gpu_interval: float = 1.0
    job_interval: float = 5.0
    process_interval: float = 10.0
    node_interval: float = 10.0
    stuck_seconds: float = 10.0
    exit_seconds: float = 60.0
    job: JobFacts | None = None
    address_file: str = ""
    summary_file: str = ""
    feed_fd: int = -1
    parent_pid: int = 0
    roots: Roots = field(default_factory=Roots)

    def to_json(self) -> str:
        """Return the one line that `from_json` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> NodeOptions:
        """Return the options in a line of JSON.

        Raises:
            ValueError: it is no such object.
        """
        data: dict[str, Any] = json.loads(text)
        unknown = set(data) - {one.name for one in fields(cls)}
        if unknown:
            raise ValueError(f"unknown: {', '.join(sorted(unknown))}")
        data["without"] = tuple(data.get("without", ()))
        data["roots"] = Roots(**data.get("roots", {}))
        if data.get("job") is not None:
            data["job"] = facts_of(data["job"])
        return cls(**data)
