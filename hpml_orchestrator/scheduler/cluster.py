"""The cluster as its controller tells it: nodes, partitions, limits, accounts.

Standard library only. `None` as a limit means that there is none; `None` as a list means that
nobody could be asked. Sizes are in MiB, as Slurm counts memory; times are in seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = [
    "Association",
    "Cluster",
    "Gres",
    "Limits",
    "Node",
    "Partition",
    "Qos",
    "Reservation",
]


@dataclass(frozen=True, order=True)
class Gres:
    """Generic resources of one kind on one node.

    Attributes:
        name: such as `gpu`, `mps`, `shard`.
        kind: the type, such as `a100` or a MIG profile `1g.10gb`; empty where none is configured.
        count: how many.
    """

    name: str
    kind: str
    count: int


@dataclass(frozen=True)
class Node:
    """One node.

    Attributes:
        name: Slurm's name of it.
        states: base state and flags, upper case, such as `{"IDLE", "DRAIN"}`.
        partitions: names of the partitions that it is in.
        sockets, cores_per_socket, threads_per_core: as configured.
        cpus: CPUs that jobs can have (without specialised ones).
        memory_mib: memory that jobs can have.
        tmp_disk_mib: size of the local disk, 0 where it is not configured.
        gres: generic resources, GPUs among them.
        features: available features.
        reason: why it is down or drained; may be empty.
    """

    name: str
    states: frozenset[str] = frozenset()
    partitions: tuple[str, ...] = ()
    sockets: int = 1
    cores_per_socket: int = 1
    threads_per_core: int = 1
    cpus: int = 1
    memory_mib: int = 1
    tmp_disk_mib: int = 0
    gres: tuple[Gres, ...] = ()
    features: frozenset[str] = frozenset()
    reason: str = ""

    @property
    def up(self) -> bool:
        """Whether jobs can start on it now or when its jobs end."""
        return not self.states & _OUT_OF_SERVICE

    def gpus(self, kind: str = "") -> int:
        """GPUs of that type; of all types when none is given."""
        return sum(one.count for one in self.gres if one.name == "gpu" and kind in ("", one.kind))


_OUT_OF_SERVICE = frozenset(
    {
        "DOWN",
        "DRAIN",
        "DRAINED",
        "DRAINING",
        "FAIL",
        "FAILING",
        "ERROR",
        "UNKNOWN",
        "FUTURE",
        "NOT_RESPONDING",
        "INVAL",
        "INVALID_REG",
        "MAINTENANCE",
        "MAINT",
    }
)


@dataclass(frozen=True)
class Partition:
    """One partition and its limits.

    Attributes:
        name: the partition.
        state: `UP`, `DOWN` (takes jobs, starts none), `DRAIN` (takes none), `INACTIVE` (neither).
        default: whether jobs that name no partition go there.
        nodes: names of its nodes.
        total_nodes, total_cpus: of all its nodes.
        max_seconds: longest time limit; None for none.
        default_seconds: time limit of jobs that ask for none; None where `max_seconds` applies.
        min_nodes, max_nodes: nodes per job.
        max_cpus_per_node: CPUs that jobs can have of each node.
        max_memory_per_node_mib, max_memory_per_cpu_mib: most memory that a job may ask for.
        default_memory_per_node_mib, default_memory_per_cpu_mib: for jobs that ask for none.
        allow_accounts, allow_qos, allow_groups: who may use it; None for everybody.
        deny_accounts, deny_qos: who may not.
        exclusive: whether jobs get whole nodes (`OverSubscribe=EXCLUSIVE`).
        qos: the partition's own QOS; may be empty.
        root_only, reservation_only: whether only root, or only jobs in a reservation, may use it.
    """

    name: str
    state: str = "UP"
    default: bool = False
    nodes: tuple[str, ...] = ()
    total_nodes: int = 0
    total_cpus: int = 0
    max_seconds: int | None = None
    default_seconds: int | None = None
    min_nodes: int = 0
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
    exclusive: bool = False
    qos: str = ""
    root_only: bool = False
    reservation_only: bool = False


@dataclass(frozen=True)
class Limits:
    """What holds for the whole cluster, from `scontrol show config`.

    Attributes:
        version: of Slurm, such as `(22, 5, 8)`.
        cluster: its name.
        max_array_size: one more than the largest array index.
        max_script_bytes: longest batch script.
        max_tasks_per_node: of one step.
        enforce_partition_limits: `NO` (jobs over a limit are taken and wait), `ANY` or `ALL`.
        accounting: whether there is a slurmdbd.
        accounting_enforce: of `associations`, `limits`, `qos`, `safe`, `wckeys`, `nojobs`,
            `nosteps`; what is missing is not enforced.
        memory_consumable: whether memory is counted at all.
        whole_nodes: whether jobs always get whole nodes (`select/linear`).
        default_memory_per_node_mib, default_memory_per_cpu_mib: for jobs that ask for none.
        max_memory_per_node_mib, max_memory_per_cpu_mib: most that a job may ask for.
        tmp_fs: directory of the nodes' local disk.
        gres_names: kinds of generic resources that are configured.
        submit_plugins: job_submit plugins, whose rules nobody can know beforehand.
    """

    version: tuple[int, ...] = ()
    cluster: str = ""
    max_array_size: int = 1001
    max_script_bytes: int = 4 * 1024 * 1024
    max_tasks_per_node: int = 512
    enforce_partition_limits: str = "NO"
    accounting: bool = False
    accounting_enforce: frozenset[str] = frozenset()
    memory_consumable: bool = True
    whole_nodes: bool = False
    default_memory_per_node_mib: int | None = None
    default_memory_per_cpu_mib: int | None = None
    max_memory_per_node_mib: int | None = None
    max_memory_per_cpu_mib: int | None = None
    tmp_fs: str = "/tmp"  # noqa: S108 - Slurm's default
    gres_names: tuple[str, ...] = ()
    submit_plugins: tuple[str, ...] = ()


@dataclass(frozen=True)
class Association:
    """What one user may do on one account (and, where given, in one partition).

    Attributes:
        account: the account.
        partition: the only partition it holds for; empty for all.
        default: whether jobs that name no account are charged to it.
        qos: names of the QOS that may be used.
        default_qos: of jobs that name none; may be empty.
        max_seconds: longest time limit.
        max_submit_jobs: most jobs in the queue at once.
        max_tres_per_job, max_tres_per_node, group_tres: limits such as `{"gres/gpu": 8}`, memory
            (`mem`) in MiB.
    """

    account: str
    partition: str = ""
    default: bool = False
    qos: tuple[str, ...] = ()
    default_qos: str = ""
    max_seconds: int | None = None
    max_submit_jobs: int | None = None
    max_tres_per_job: Mapping[str, int] = field(default_factory=dict)
    max_tres_per_node: Mapping[str, int] = field(default_factory=dict)
    group_tres: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Qos:
    """One quality of service and its limits; TRES as in `Association`.

    Attributes:
        name: the QOS.
        flags: such as `DenyOnLimit` (a job over a limit is refused, not kept waiting).
        max_seconds: longest time limit.
        max_submit_jobs_per_user: most jobs in the queue at once.
        min_tres_per_job: least that a job must ask for.
        max_tres_per_job, max_tres_per_node, max_tres_per_user, group_tres: most it may ask for.
    """

    name: str
    flags: frozenset[str] = frozenset()
    max_seconds: int | None = None
    max_submit_jobs_per_user: int | None = None
    min_tres_per_job: Mapping[str, int] = field(default_factory=dict)
    max_tres_per_job: Mapping[str, int] = field(default_factory=dict)
    max_tres_per_node: Mapping[str, int] = field(default_factory=dict)
    max_tres_per_user: Mapping[str, int] = field(default_factory=dict)
    group_tres: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Reservation:
    """One reservation: who may use it (None for everybody), and when (seconds since the epoch)."""

    name: str
    users: tuple[str, ...] | None = None
    accounts: tuple[str, ...] | None = None
    partition: str = ""
    nodes: tuple[str, ...] = ()
    started: float | None = None
    ended: float | None = None


@dataclass(frozen=True)
class Cluster:
    """A whole cluster, seen by one user at one moment.

    Attributes:
        limits: what holds everywhere.
        partitions, nodes, reservations: those that the user can see.
        user: whose associations these are.
        groups: names of the user's groups.
        associations: None where accounting cannot be asked.
        qos: all QOS; None where accounting cannot be asked.
    """

    limits: Limits = Limits()
    partitions: tuple[Partition, ...] = ()
    nodes: tuple[Node, ...] = ()
    reservations: tuple[Reservation, ...] = ()
    user: str = ""
    groups: tuple[str, ...] = ()
    associations: tuple[Association, ...] | None = None
    qos: tuple[Qos, ...] | None = None

    def partition(self, name: str) -> Partition | None:
        """The partition of that name."""
        return next((one for one in self.partitions if one.name == name), None)

    @property
    def hidden(self) -> tuple[str, ...]:
        """What nothing was shown of, as PrivateData has it: `partitions`, `nodes`, or both."""
        return tuple(kind for kind in ("partitions", "nodes") if not getattr(self, kind))

    @property
    def default_partition(self) -> Partition | None:
        """Where jobs go that name no partition."""
        return next((one for one in self.partitions if one.default), None)

    def nodes_of(self, partition: Partition) -> tuple[Node, ...]:
        """The nodes of a partition."""
        names = set(partition.nodes)
        return tuple(node for node in self.nodes if node.name in names)
