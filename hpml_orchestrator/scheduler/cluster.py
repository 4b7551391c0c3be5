"""A cluster as its controller describes it: nodes, partitions, limits, accounts.

Memory sizes are in MiB, as in Slurm; times are in seconds. A limit of None means unlimited; a list
of None could not be read, or means that everybody is allowed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, order=True)
class Gres:
    """Generic resources of one kind on one node."""

    name: str  # such as gpu, mps, shard
    kind: str  # the type, such as a100 or a MIG profile 1g.10gb; empty if not configured
    count: int


@dataclass(frozen=True)
class Node:
    """One node, with the CPUs and the memory that jobs can use."""

    name: str
    states: frozenset[str] = frozenset()  # base state and flags, upper case
    partitions: tuple[str, ...] = ()
    sockets: int = 1
    cores_per_socket: int = 1
    threads_per_core: int = 1
    cpus: int = 1
    memory_mib: int = 1
    tmp_disk_mib: int = 0  # 0 if not configured
    gres: tuple[Gres, ...] = ()
    features: frozenset[str] = frozenset()
    reason: str = ""  # why it is down or drained

    @property
    def up(self) -> bool:
        """Whether jobs can start on it, now or once its current jobs have ended."""
        return not self.states & (_DOWN | _DRAIN | _MAINTENANCE)

    def gpus(self, kind: str = "") -> int:
        """Number of GPUs of a type; of all types by default."""
        return sum(
            gres.count for gres in self.gres if gres.name == "gpu" and kind in ("", gres.kind)
        )


_DOWN = frozenset("DOWN FAIL FAILING ERROR UNKNOWN FUTURE NOT_RESPONDING INVAL INVALID_REG".split())
_DRAIN = frozenset({"DRAIN", "DRAINED", "DRAINING"})
_MAINTENANCE = frozenset({"MAINTENANCE", "MAINT"})
_POWER = frozenset("POWERED_DOWN POWERING_DOWN POWERING_UP POWER_DOWN POWER_DRAIN POWER_UP".split())
_REBOOT = frozenset({"REBOOT_REQUESTED", "REBOOT_ISSUED", "REBOOT"})
_BLOCKED = frozenset({"BLOCKED", "PERFCTRS"})
_BUSY = frozenset({"ALLOCATED", "MIXED", "COMPLETING"})
_READY = _BUSY | {"IDLE", "PLANNED"}
_AWAY = _DOWN | _DRAIN | _MAINTENANCE | _BLOCKED | _POWER | {"RESERVED", "REBOOT_ISSUED", "REBOOT"}


def takes_jobs(states: frozenset[str]) -> bool:
    """Return whether Slurm starts any user's job now on free resources of a node in these states.

    The flags that prevent it are those that `man sinfo` calls unavailable, "not generally
    available" (a reservation) or not capable of running jobs. Slurm still starts short jobs on a
    node that is planned for a larger one, and any job on a busy node that reboots when it is idle.
    """
    if "REBOOT_REQUESTED" in states and not states & _BUSY:
        return False
    return bool(states & _READY) and not states & _AWAY


def node_state(states: frozenset[str]) -> str:
    """Return one lower-case word for what a node can do.

    A node has one base state and many flags; the most important of them decides.

    >>> node_state(frozenset({"MIXED", "DRAIN"})), node_state(frozenset({"IDLE", "DRAIN"}))
    ('draining', 'drained')
    >>> node_state(frozenset({"IDLE", "PLANNED"})), node_state(frozenset({"DOWN", "DRAIN"}))
    ('planned', 'drained')
    """
    # Only idle nodes differ in some states: a busy node that is marked for a reboot or a power-down
    # still runs its jobs, and that is what users look for.
    idle = frozenset[str]() if states & _BUSY else states
    # A node that Slurm is powering up or down does not answer, but nothing is wrong.
    silent = {"NOT_RESPONDING"} if states & _POWER else frozenset[str]()
    judged = (
        ("rebooting", idle & {"REBOOT_ISSUED", "REBOOT"}),  # takes precedence until it answers
        ("drained", idle & _DRAIN),  # as in sinfo, even if it is powered off
        ("draining", states & _DRAIN),
        ("down", states & _DOWN - silent),
        ("maintenance", states & _MAINTENANCE),
        ("rebooting", idle & _REBOOT),
        ("powered_down", idle & _POWER),
        ("blocked", idle & _BLOCKED),
    )
    base = "ALLOCATED MIXED COMPLETING RESERVED PLANNED IDLE".split()
    words = [word for word, causes in judged if causes]
    words += [state.lower() for state in base if state in states]
    return words[0] if words else "unknown"


@dataclass(frozen=True)
class Partition:
    """One partition and its limits."""

    name: str
    state: str = "UP"  # DOWN takes jobs and starts none, DRAIN takes none, INACTIVE does neither
    default: bool = False
    nodes: tuple[str, ...] = ()
    total_nodes: int = 0
    max_seconds: int | None = None
    default_seconds: int | None = None  # None: max_seconds
    min_nodes: int = 0  # per job
    max_nodes: int | None = None
    max_cpus_per_node: int | None = None
    max_memory_per_node_mib: int | None = None
    max_memory_per_cpu_mib: int | None = None
    default_memory_per_node_mib: int | None = None
    default_memory_per_cpu_mib: int | None = None
    allow_accounts: tuple[str, ...] | None = None
    deny_accounts: tuple[str, ...] = ()
    allow_qos: tuple[str, ...] | None = None
    deny_qos: tuple[str, ...] = ()
    allow_groups: tuple[str, ...] | None = None
    exclusive: bool = False  # jobs get whole nodes (OverSubscribe=EXCLUSIVE)
    preemption: str = ""  # PreemptMode of its jobs
    priority_tier: int = 1  # jobs of a higher one may preempt those of this partition
    grace_seconds: int = 0  # between the warning and the end of a preempted job
    qos: str = ""  # the partition's own
    root_only: bool = False
    reservation_only: bool = False


@dataclass(frozen=True)
class ClusterLimits:
    """Limits of the whole cluster, from `scontrol show config`."""

    version: tuple[int, ...] = ()  # such as (22, 5, 8)
    cluster: str = ""
    max_array_size: int = 1001  # one more than the largest array index
    max_script_bytes: int = 4 * 1024 * 1024
    max_tasks_per_node: int = 512  # of one step
    enforce_partition_limits: str = "NO"  # NO (jobs over a limit wait), ANY or ALL
    accounting: bool = False  # whether there is a slurmdbd
    accounting_enforce: frozenset[str] = frozenset()  # associations, limits, qos, safe, ...
    memory_consumable: bool = True  # whether memory is counted at all
    whole_nodes: bool = False  # select/linear
    default_memory_per_node_mib: int | None = None
    default_memory_per_cpu_mib: int | None = None
    max_memory_per_node_mib: int | None = None
    max_memory_per_cpu_mib: int | None = None
    tmp_fs: str = "/tmp"  # noqa: S108 - Slurm's default
    job_requeue: bool | None = None  # default for jobs without the option; None: unknown
    preemption: str = ""  # PreemptMode if jobs are preempted at all, such as REQUEUE
    submit_plugins: tuple[str, ...] = ()  # job_submit plugins; their rules are unknown


@dataclass(frozen=True)
class Association:
    """What one user may do with one account; TRES such as `{"gres/gpu": 8, "mem": 64000}`."""

    account: str
    partition: str = ""  # the only one it applies to; empty for all
    default: bool = False  # jobs without an account are charged to it
    qos: tuple[str, ...] = ()
    default_qos: str = ""
    max_seconds: int | None = None
    max_tres_per_job: Mapping[str, int] = field(default_factory=dict)
    max_tres_minutes_per_job: Mapping[str, int] = field(default_factory=dict)
    max_tres_per_node: Mapping[str, int] = field(default_factory=dict)
    max_tres_per_user: Mapping[str, int] = field(default_factory=dict)  # `job`: running at once
    group_tres: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Qos:
    """One quality of service and its limits; TRES as in `Association`."""

    name: str
    flags: frozenset[str] = frozenset()  # such as DenyOnLimit: a job over a limit is refused
    max_seconds: int | None = None
    min_tres_per_job: Mapping[str, int] = field(default_factory=dict)
    max_tres_per_job: Mapping[str, int] = field(default_factory=dict)
    max_tres_minutes_per_job: Mapping[str, int] = field(default_factory=dict)
    max_tres_per_node: Mapping[str, int] = field(default_factory=dict)
    max_tres_per_user: Mapping[str, int] = field(default_factory=dict)
    group_tres: Mapping[str, int] = field(default_factory=dict)


# Slurm's own plugins that choose neither account nor partition
_ONLY_JUDGE = frozenset("all_partitions cray_aries logging pbs require_timelimit throttle".split())


@dataclass(frozen=True)
class Cluster:
    """A whole cluster, as one user sees it at one moment."""

    limits: ClusterLimits = ClusterLimits()
    partitions: tuple[Partition, ...] = ()
    nodes: tuple[Node, ...] = ()
    user: str = ""  # whose associations these are
    groups: tuple[str, ...] = ()
    associations: tuple[Association, ...] | None = None
    qos: tuple[Qos, ...] | None = None

    @property
    def may_rewrite_jobs(self) -> bool:
        """Whether a site's job_submit plugin may change a job's account or partition."""
        return not _ONLY_JUDGE.issuperset(self.limits.submit_plugins)

    def partition(self, name: str) -> Partition | None:
        """The partition with that name, if there is one."""
        return next((partition for partition in self.partitions if partition.name == name), None)

    @property
    def hidden(self) -> tuple[str, ...]:
        """What the site hides (PrivateData): `partitions`, `nodes`, or both."""
        return tuple(kind for kind in ("partitions", "nodes") if not getattr(self, kind))

    @property
    def default_partition(self) -> Partition | None:
        """The partition of jobs that request none."""
        return next((partition for partition in self.partitions if partition.default), None)

    def nodes_of(self, partition: Partition) -> tuple[Node, ...]:
        """The nodes of a partition."""
        names = set(partition.nodes)
        return tuple(node for node in self.nodes if node.name in names)
