"""What is read of a cluster at one moment, whichever source it came from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from hpml_orchestrator.scheduler.cluster import node_state, takes_jobs

ENDED = frozenset(
    "BOOT_FAIL CANCELLED COMPLETED DEADLINE FAILED LAUNCH_FAILED NODE_FAIL OUT_OF_MEMORY "
    "PREEMPTED RECONFIG_FAIL REVOKED TIMEOUT".split()
)
"""States of jobs that have ended, as squeue names them."""


class QueueRow(NamedTuple):
    """One row of the queue: a job, an array task, or all pending tasks of an array.

    Attributes:
        id: `25`, `25_3` or `25_[4-9]`.
        partitions: where it waits, or where it runs.
        tasks: jobs in this row.
        eligible, start, end: seconds since the epoch; 0 if it has none yet.
    """

    id: str
    state: str
    reason: str
    partitions: tuple[str, ...]
    qos: str
    user: str
    tasks: int
    eligible: int
    start: int
    end: int


@dataclass(frozen=True)
class ClusterNode:
    """One node with its total and allocated resources; GPUs by type."""

    name: str
    address: str
    states: frozenset[str]
    reason: str
    partitions: tuple[str, ...]
    cpus: int
    cpus_allocated: int
    gpus: Mapping[str, int]
    gpus_allocated: Mapping[str, int]

    @property
    def state(self) -> str:
        """The one word for its states; see `node_state`."""
        return node_state(self.states)

    @property
    def free_state(self) -> str:
        """What its CPUs and GPUs are that no job has; Slurm starts nodes that it powered down."""
        if self.usable:
            return "idle"
        return "powered_down" if self.state == "powered_down" else "down"

    @property
    def usable(self) -> bool:
        """Whether idle resources of this node can be allocated now."""
        return takes_jobs(self.states)


class Reservation(NamedTuple):
    """A reservation; times in seconds since the epoch, 0 if unknown."""

    name: str
    state: str
    nodes: int
    start: int
    end: int


@dataclass(frozen=True)
class View:
    """A cluster at one moment.

    Attributes:
        statistics: numbers of sdiag by the attribute of a pyslurm.slurmctld.Statistics.
        licenses: total and used by name.
        user_shares: the fairshare factor by (account, user).
    """

    jobs: Iterable[QueueRow]
    nodes: Iterable[ClusterNode]
    statistics: Mapping[str, float] = field(default_factory=dict)
    licenses: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    reservations: tuple[Reservation, ...] = ()
    user_shares: Mapping[tuple[str, str], float] = field(default_factory=dict)


class ViewSource(Protocol):
    """Where views come from."""

    name: str

    def read(self) -> View:
        """Ask Slurm once.

        Raises:
            SchedulerUnavailable: it gave no usable answer.
        """
        ...
