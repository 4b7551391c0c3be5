"""What the user wants of the cluster, and the configuration files that follow from it."""

from __future__ import annotations

import os
import random
import secrets
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from _errors import DevclusterError
from _machines import AMD, Machine

if TYPE_CHECKING:
    from collections.abc import Iterable

GPU_TYPE = "a100"
MAX_NODES = 64
_FIRST_USER_PORT = 1024
_SOCKET_PATH_MAX = 107  # bytes in a sockaddr_un, less the closing zero
_FIRST_NODE_OFFSET = 3  # after the controller's, slurmdbd's and MariaDB's port


@dataclass(frozen=True)
class Settings:
    """The options of `up`."""

    box: Path
    nodes: int = 2
    cpus: int = 4
    gpus: int = 2
    memory: int = 16000
    tmp_size: int = 512
    accounting: bool = True
    port_base: int | None = None
    kill_wait: int = 5
    grace_time: int = 0
    over_time_limit: int = 0
    job_comment: bool = False
    machine: Machine | None = None  # what the nodes look like; has their CPUs and GPUs
    shares: tuple[Path, ...] = ()
    slurm_conf: tuple[str, ...] = ()  # lines laid over those written here

    @property
    def gpu_type(self) -> str:
        """Slurm's name of the GPUs."""
        return self.machine.gpu_type if self.machine else GPU_TYPE

    @property
    def node_names(self) -> tuple[str, ...]:
        """The nodes' names, which are their host names too."""
        return tuple(f"node{number}" for number in range(1, self.nodes + 1))

    def check(self) -> None:
        """Raises for values that cannot work."""
        if not 1 <= self.nodes <= MAX_NODES:
            raise DevclusterError(f"--nodes must be from 1 to {MAX_NODES}")
        for name, least in (("cpus", 1), ("gpus", 0), ("memory", 1), ("tmp_size", 1)):
            if getattr(self, name) < least:
                raise DevclusterError(f"--{name.replace('_', '-')} must be at least {least}")
        for name in ("kill_wait", "grace_time", "over_time_limit"):
            if not 0 <= getattr(self, name) < 2**16:
                raise DevclusterError(f"--{name.replace('_', '-')} must be from 0 to 65535")
        if any(letter.isspace() or letter in "#,%\\\"'=()[]" for letter in str(self.box)):
            raise DevclusterError(f"Slurm cannot take this as a part of a path: {self.box}")
        if len(os.fsencode(Layout(self.box).munge_socket)) > _SOCKET_PATH_MAX:
            raise DevclusterError(f"the path is too long for the sockets in it: {self.box}")
        for share in self.shares:
            if not share.is_dir():
                raise DevclusterError(f"--share needs a folder, and this is none: {share}")


@dataclass(frozen=True)
class Layout:
    """Where things lie in the box."""

    box: Path

    @property
    def slurm_conf(self) -> Path:
        """The configuration for daemons and commands alike."""
        return self.box / "etc" / "slurm.conf"

    @property
    def hosts(self) -> Path:
        """The nodes' /etc/hosts."""
        return self.box / "etc" / "hosts"

    @property
    def task_prolog(self) -> Path:
        """What runs before each task, where nodes look like another machine."""
        return self.box / "etc" / "task-prolog"

    @property
    def munge_socket(self) -> Path:
        """Where munged answers."""
        return self.box / "run" / "munge.socket"

    @property
    def mysql_socket(self) -> Path:
        """Where MariaDB answers its administrator."""
        return self.box / "mysql" / "m.sock"

    def log(self, daemon: str) -> Path:
        """The file a daemon logs to; what it prints goes there as well."""
        return self.box / "log" / f"{daemon}.log"


@dataclass(frozen=True)
class Ports:
    """The ports of one cluster: a row of them from a base on, all on loopback."""

    base: int

    @property
    def controller(self) -> int:
        """Of slurmctld."""
        return self.base

    @property
    def database_daemon(self) -> int:
        """Of slurmdbd."""
        return self.base + 1

    @property
    def database(self) -> int:
        """Of MariaDB."""
        return self.base + 2

    def node(self, index: int) -> int:
        """Of the slurmd of one node, counted from 0."""
        return self.base + _FIRST_NODE_OFFSET + index

    @classmethod
    def pick(cls, settings: Settings) -> Ports:
        """Takes the base asked for, or finds one with all its ports free."""
        count = _FIRST_NODE_OFFSET + settings.nodes
        if settings.port_base is not None:
            if not _FIRST_USER_PORT <= settings.port_base <= 65536 - count:
                raise DevclusterError(
                    f"--port-base must be from {_FIRST_USER_PORT} to {65536 - count}"
                )
            used = [p for p in range(settings.port_base, settings.port_base + count) if _used(p)]
            if used:
                raise DevclusterError(f"port {used[0]} is in use; choose another --port-base")
            return cls(settings.port_base)
        # Below the ports that the kernel gives to outgoing connections. Random, so that clusters
        # that boot at the same time hardly ever look at the same ones.
        for _ in range(200):
            base = random.randrange(12000, 32000 - count)
            if not any(_used(port) for port in range(base, base + count)):
                return cls(base)
        raise DevclusterError("found no row of free ports; choose one by --port-base")


def _used(port: int) -> bool:
    with socket.socket() as probe:
        # As the daemons do it: a port whose last connections still time out counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))  # noqa: S104 - closed at once, never listens
        except OSError:
            return True
    return False


def short_name() -> str:
    """Gives the machine's name as Slurm's daemons compare it."""
    return socket.gethostname().split(".")[0]


def node_address(index: int) -> str:
    """Gives each node a separate loopback address."""
    return f"127.0.17.{index + 1}"


@dataclass(frozen=True)
class Files:
    """Writes the configuration of one cluster."""

    settings: Settings
    ports: Ports
    layout: Layout
    database_password: str = field(default_factory=lambda: secrets.token_hex(16), repr=False)

    def write(self) -> None:
        """Puts all files in place."""
        etc = self.layout.box / "etc"
        self._write_slurm_conf("NoCtldInAddrAny,NoInAddrAny")
        (etc / "gres.conf").write_text(self.gres_conf(), encoding="utf-8")
        (etc / "cgroup.conf").write_text("CgroupAutomount=no\n", encoding="utf-8")
        (etc / "hosts").write_text(self.hosts(), encoding="utf-8")
        _write_secret(etc / "munge.key", secrets.token_bytes(1024))
        if self.settings.accounting:
            # slurmdbd refuses a file that others may read.
            _write_secret(etc / "slurmdbd.conf", self.slurmdbd_conf().encode())
        for number in range(max(map(_gpu_count, self._gpus().values()), default=0)):
            # A device file, or Slurm leaves CUDA_VISIBLE_DEVICES empty. A link to /dev/null is
            # one, needs no right to make devices and never opens a real GPU.
            (self.layout.box / "dev" / f"nvidia{number}").symlink_to("/dev/null")

    def open_for_commands(self) -> None:
        """Lifts the order to bind to the host's own address once all daemons have followed it.

        In a daemon it keeps the daemon off the network. In an srun it is fatal: srun would wait at
        the address of its host name, but the nodes answer to the one its message came from, which
        the kernel makes 127.0.0.1. And a job cannot have another file than its slurmd.
        """
        self._write_slurm_conf("NoCtldInAddrAny")

    def _write_slurm_conf(self, communication: str) -> None:
        path = self.layout.slurm_conf
        draft = path.with_suffix(".new")
        text = f"{self.slurm_conf()}CommunicationParameters={communication}\n"
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)

    def hosts(self) -> str:
        """Lists the cluster's names first, then what the machine itself knows."""
        lines = [
            f"{node_address(index)} {name}" for index, name in enumerate(self.settings.node_names)
        ]
        # The machine's name may stand for a network address, and the controller binds to it.
        lines += ["127.0.0.1 localhost", f"127.0.0.1 {socket.gethostname()} {short_name()}"]
        try:
            own = Path("/etc/hosts").read_text(encoding="utf-8")
        except OSError:
            own = ""
        return "\n".join(lines) + "\n" + own

    def slurm_conf(self) -> str:
        """Gives slurm.conf but for the line that changes, see open_for_commands."""
        box, want, ports = self.layout.box, self.settings, self.ports
        lines = [
            "ClusterName=devcluster",
            f"SlurmctldHost={short_name()}(127.0.0.1)",
            f"SlurmctldPort={ports.controller}",
            "SlurmUser=root",
            "SlurmdUser=root",
            "AuthType=auth/munge",
            # A requeued job waits until its old credential has ended: 2 minutes by default.
            f"AuthInfo=socket={self.layout.munge_socket},cred_expire=5",
            "CredType=cred/munge",
            f"StateSaveLocation={box}/state",
            f"SlurmdSpoolDir={box}/spool/%n",
            f"SlurmctldPidFile={box}/run/slurmctld.pid",
            f"SlurmdPidFile={box}/run/slurmd-%n.pid",
            f"SlurmctldLogFile={self.layout.log('slurmctld')}",
            f"SlurmdLogFile={box}/log/%n.log",
            "SlurmctldDebug=info",
            "SlurmdDebug=info",
            # The file changes after the daemons have read it, see open_for_commands.
            "DebugFlags=NO_CONF_HASH",
            "MailProg=/bin/true",
            "ReturnToService=2",
            # A node has the CPUs written here, whatever the machine has.
            "SlurmdParameters=config_overrides",
            *self._task_lines(),
            "ProctrackType=proctrack/linuxproc",
            "JobAcctGatherType=jobacct_gather/linux",
            "JobAcctGatherFrequency=task=2",
            "SwitchType=switch/none",
            "MpiDefault=none",
            "SlurmdTimeout=300",
            f"KillWait={want.kill_wait}",
            f"OverTimeLimit={want.over_time_limit}",
            "MinJobAge=300",
            "JobRequeue=1",
            "SelectType=select/cons_tres",
            "SelectTypeParameters=CR_Core_Memory",
            # Without it a job takes all memory of its nodes, and no second job fits there.
            f"DefMemPerCPU={max(1, want.memory // want.cpus)}",
            "SchedulerType=sched/backfill",
            "SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0",
            "PreemptType=preempt/partition_prio",
            "PreemptMode=REQUEUE",
            "SlurmctldParameters=preempt_send_user_signal",
            *self._accounting_lines(),
            *self._node_lines(),
            "PartitionName=main Nodes=ALL PriorityTier=10 Default=YES",
            f"PartitionName=low Nodes=ALL PriorityTier=1 GraceTime={want.grace_time}",
        ]
        return "\n".join(overlaid(lines, want.slurm_conf)) + "\n"

    def _task_lines(self) -> list[str]:
        if self.settings.machine is None:
            return ["TaskPlugin=task/none"]  # these CPUs may not be there, so nothing is bound
        return ["TaskPlugin=task/affinity", f"TaskProlog={self.layout.task_prolog}"]

    def _accounting_lines(self) -> list[str]:
        if not self.settings.accounting:
            return ["AccountingStorageType=accounting_storage/none"]
        lines = [
            "AccountingStorageType=accounting_storage/slurmdbd",
            "AccountingStorageHost=127.0.0.1",
            f"AccountingStoragePort={self.ports.database_daemon}",
            f"AccountingStoragePass={self.layout.munge_socket}",
        ]
        if self.settings.gpus:
            lines.append(f"AccountingStorageTRES=gres/gpu,gres/gpu:{self.settings.gpu_type}")
        if self.settings.job_comment:
            lines.append("AccountingStoreFlags=job_comment")
        return lines

    def _node_lines(self) -> list[str]:
        want = self.settings
        gres = f" Gres=gpu:{want.gpu_type}:{want.gpus}" if want.gpus else ""
        lines = ["GresTypes=gpu"] if want.gpus else []
        machine = want.machine
        sockets, cores, threads = (
            (machine.sockets, machine.cores_per_socket, machine.threads)
            if machine
            else (1, want.cpus, 1)
        )
        for index, name in enumerate(want.node_names):
            lines.append(
                f"NodeName={name} NodeHostname={name} NodeAddr={node_address(index)}"
                f" Port={self.ports.node(index)} CPUs={want.cpus} Boards=1"
                f" SocketsPerBoard={sockets} CoresPerSocket={cores} ThreadsPerCore={threads}"
                f" RealMemory={want.memory}"
                f"{gres} State=UNKNOWN"
            )
        return lines

    def _gpus(self) -> dict[str, list[tuple[str, int]]]:
        """Gives the types and numbers of each node's GPUs from its line in slurm.conf."""
        lines = [line for line in self.slurm_conf().splitlines() if line.startswith("NodeName=")]
        words = [dict(word.split("=", 1) for word in line.split()) for line in lines]
        return {one["NodeName"]: _gpus_of(one.get("Gres", "")) for one in words}

    def gres_conf(self) -> str:
        """Gives gres.conf, with the GPUs' device files."""
        lines = ["AutoDetect=off"]
        for node, gpus in self._gpus().items():
            first = 0
            for kind, count in gpus:
                last = first + count - 1
                numbers = str(first) if count == 1 else f"[{first}-{last}]"
                files = [(numbers, "")]
                if self.settings.machine is not None:
                    files = [(str(one), self._near(one)) for one in range(first, last + 1)]
                lines += [
                    f"NodeName={node} Name=gpu Type={kind}"
                    f" File={self.layout.box}/dev/nvidia{numbers}{near}"
                    for numbers, near in files
                ]
                first = last + 1
        return "\n".join(lines) + "\n"

    def _near(self, number: int) -> str:
        """Says which cores are near a GPU of the machine, and whose GPU it is.

        Those of its whole socket: Slurm counts by sockets, and 24.11 refuses any other range.
        """
        machine = self.settings.machine
        if machine is None or number >= len(machine.gpus):
            return ""
        gpu = machine.gpus[number]
        size = machine.cores_per_socket
        first = machine.domain_cores(gpu.domain)[0] // size * size
        flags = " Flags=amd_gpu_env" if gpu.vendor == AMD else ""
        return f" Cores={first}-{first + size - 1}{flags}"

    def slurmdbd_conf(self) -> str:
        """Gives slurmdbd.conf."""
        lines = [
            "DbdHost=localhost",
            "DbdAddr=127.0.0.1",
            f"DbdPort={self.ports.database_daemon}",
            "SlurmUser=root",
            "AuthType=auth/munge",
            f"AuthInfo=socket={self.layout.munge_socket}",
            "StorageType=accounting_storage/mysql",
            "StorageHost=127.0.0.1",
            f"StoragePort={self.ports.database}",
            "StorageUser=slurm",
            f"StoragePass={self.database_password}",
            "StorageLoc=slurm_acct_db",
            f"LogFile={self.layout.log('slurmdbd')}",
            f"PidFile={self.layout.box}/run/slurmdbd.pid",
            "CommunicationParameters=NoInAddrAny",
            "DebugLevel=info",
        ]
        return "\n".join(lines) + "\n"


def overlaid(lines: list[str], own: Iterable[str]) -> list[str]:
    """Lays lines of one's own over those of slurm.conf.

    A setting replaces the one of the same name. PartitionName lines replace all of ours. Words of
    a NodeName line replace those of the same name in that node's line; an empty one removes it.
    """
    added = [line.strip() for line in own if line.strip() and not line.lstrip().startswith("#")]
    if any(_key(line) == "partitionname" for line in added):
        lines = [line for line in lines if _key(line) != "partitionname"]
    result = list(lines)
    for line in added:
        places = [
            index
            for index, other in enumerate(result)
            if _key(other) == _key(line)
            and (_key(line) != "nodename" or other.split()[0] == line.split()[0])
        ]
        if not places or _key(line) == "partitionname":
            result.append(line)
        elif _key(line) == "nodename":
            words = dict(word.split("=", 1) for word in f"{result[places[0]]} {line}".split())
            result[places[0]] = " ".join(f"{k}={v}" for k, v in words.items() if v)
        else:
            result[places[0]] = line
    return result


def _key(line: str) -> str:
    return line.split("=", 1)[0].strip().lower()


def _gpus_of(gres: str) -> list[tuple[str, int]]:
    """Reads `gpu:a100:2,gpu:1g.10gb:3` of a node's line."""
    parts = [part.split(":") for part in gres.split(",") if part.startswith("gpu:")]
    return [(part[1], int(part[2])) for part in parts]


def _gpu_count(gpus: list[tuple[str, int]]) -> int:
    return sum(count for _, count in gpus)


def _write_secret(path: Path, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
