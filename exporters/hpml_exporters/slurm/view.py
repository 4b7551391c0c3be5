"""What is read of a cluster at one moment, whichever source it came from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

__all__ = ["ENDED", "Job", "Node", "Reservation", "Source", "View", "node_state"]

ENDED = frozenset(
    "BOOT_FAIL CANCELLED COMPLETED DEADLINE FAILED LAUNCH_FAILED NODE_FAIL OUT_OF_MEMORY "
    "PREEMPTED RECONFIG_FAIL REVOKED TIMEOUT".split()
)
"""States of jobs that have ended, as squeue names them."""

# A node has one base state and many flags: the first of these that it has is its state.
_UNUSABLE = ("DOWN", "ERROR", "FAIL", "NOT_RESPONDING", "UNKNOWN", "FUTURE", "INVALID_REG")
_BUSY = frozenset({"ALLOCATED", "MIXED", "COMPLETING"})
_POWER = frozenset({"POWERED_DOWN", "POWERING_DOWN", "POWERING_UP", "POWER_DOWN"})


class Job(NamedTuple):
    """One row of the queue: a job, a task of an array, or all tasks of it that still wait.

    Attributes:
        id: `25`, `25_3` or `25_[4-9]`.
        tasks: jobs in this row.
        eligible, start, end: seconds since the epoch; 0 where there is none yet.
    """

    id: str
    state: str
    reason: str
    partition: str
    qos: str
    user: str
    account: str
    tasks: int
    eligible: int
    start: int
    end: int


@dataclass(frozen=True)
class Node:
    """One node and what is allocated of it; memory in bytes, GPUs by type."""

    name: str
    address: str
    state: str
    reason: str
    partitions: tuple[str, ...]
    cpus: int
    cpus_allocated: int
    memory: int
    memory_allocated: int
    gpus: Mapping[str, int]
    gpus_allocated: Mapping[str, int]

    @property
    def usable(self) -> bool:
        """Whether idle resources of this node can be allocated."""
        return self.state in {"idle", "mixed", "allocated", "completing", "reserved", "planned"}


class Reservation(NamedTuple):
    """A reservation; times in seconds since the epoch."""

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

    jobs: Iterable[Job]
    nodes: Iterable[Node]
    statistics: Mapping[str, float] = field(default_factory=dict)
    licenses: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    reservations: tuple[Reservation, ...] = ()
    user_shares: Mapping[tuple[str, str], float] = field(default_factory=dict)


class Source(Protocol):
    """Where views come from."""

    name: str

    def read(self) -> View:
        """Ask Slurm once.

        Raises:
            SchedulerUnavailable: it gave no usable answer.
        """
        ...


def node_state(states: frozenset[str]) -> str:
    """Return the one word that says what a node can do, lower case.

    >>> node_state(frozenset({"MIXED", "DRAIN"})), node_state(frozenset({"IDLE", "DRAIN"}))
    ('draining', 'drained')
    >>> node_state(frozenset({"IDLE", "PLANNED"})), node_state(frozenset({"DOWN", "DRAIN"}))
    ('planned', 'down')
    """
    if any(state in states for state in _UNUSABLE):
        return "down"
    if states & {"DRAIN", "DRAINED", "DRAINING"}:
        return "draining" if states & _BUSY else "drained"
    if states & {"MAINTENANCE", "MAINT"}:
        return "maintenance"
    if states & {"REBOOT_REQUESTED", "REBOOT_ISSUED", "REBOOT"} and not states & _BUSY:
        return "rebooting"
    if states & _POWER and not states & _BUSY:
        return "powered_down"
    for state in ("ALLOCATED", "MIXED", "COMPLETING", "RESERVED", "PLANNED", "IDLE"):
        if state in states:
            return state.lower()
    return "unknown"
