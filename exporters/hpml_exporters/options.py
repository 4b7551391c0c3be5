"""Options of a node's exporter: a frozen object, sent to its process as JSON."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

from hpml_exporters.jobs.board import LOCAL_CLUSTER, JobFacts, JobsBoard, facts_of
from hpml_orchestrator.errors import InputError, did_you_mean

COLLECTORS = {
    "gpu": "gpu.collector",
    "jobs": "jobs.collector",
    "processes": "jobs.processes",
    "shm": "node.shm",
    "disks": "node.disks",
    "infiniband": "node.infiniband",
    "nfs": "node.nfs",
    "lustre": "node.lustre",
    "health": "node.health",
    "training": "training.collector",
}
"""Collectors that can be switched off, and the module of each."""

SECONDS_MIN = 0.1
"""Between two readings: more frequent ones cost more than they are worth."""
SECONDS_MAX = 3600.0

_SLURM_CONFS = ("/run/slurm/conf/slurm.conf", "/etc/slurm/slurm.conf")
_INTERVALS = ("gpu_interval", "job_interval", "process_interval", "node_interval")


@dataclass(frozen=True)
class Roots:
    """Mount points of what is read.

    Attributes:
        proc: procfs.
        sys: sysfs.
        cgroup: of the control groups: the unified hierarchy, or the directory that holds one
            directory per controller of version 1.
        run: where the prolog leaves its map (`{run}/jobs/<jobid>.json`).
        shm: the RAM file system that jobs stage to.
    """

    proc: str = "/proc"
    sys: str = "/sys"
    cgroup: str = "/sys/fs/cgroup"
    run: str = "/run/hpml"
    shm: str = "/dev/shm"  # noqa: S108 - the mount point itself


@dataclass(frozen=True)
class NodeOptions:
    """How a node is exported.

    Attributes:
        listen: ADDRESS:PORT; port 0 takes a free one.
        any_port: take a free port if that of `listen` is in use, as several jobs of a node
            may want one port.
        web_config: file in Prometheus' web-config format (TLS, users); empty: none.
        without: names of disabled collectors.
        gpu_interval: seconds between two readings of GPUs.
        job_interval: seconds between two readings of the jobs' control groups.
        process_interval: seconds between two looks at processes.
        node_interval: seconds between two readings of disks and networks.
        stuck_seconds: after which an unfinished reading counts as stuck and its series disappear.
        exit_seconds: after which a stuck reading ends the process for its supervisor.
        cluster: name of the cluster, for the label of that name; empty: no label.
        node: name of this node; empty: that of the machine, up to the first dot.
        job: set by the node agent: only this job is exported.
        address_file: receives the address once the server listens; empty: none.
        once: print one reading instead of serving.
        summary_file: receives the job's figures, regularly and at the end; empty: none.
        feed_fd: inherited descriptor (a Unix datagram socket) with the ranks' messages; -1: none.
        parent_pid: the exporter ends when it has another parent; 0: never.
        roots: mount points of the kernel's file systems.
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
    cluster: str = ""
    node: str = ""
    job: JobFacts | None = None
    address_file: str = ""
    once: bool = False
    summary_file: str = ""
    feed_fd: int = -1
    parent_pid: int = 0
    roots: Roots = field(default_factory=Roots)

    @property
    def node_name(self) -> str:
        """Name of this node."""
        return self.node or socket.gethostname().partition(".")[0]

    def to_json(self) -> str:
        """Return the options as one line of JSON, for `from_json`."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> NodeOptions:
        """Return the options in a line of JSON.

        Raises:
            ValueError: it is not an object of options.
        """
        data = json.loads(text)
        unknown = set(data) - {one.name for one in fields(cls)}
        if unknown:
            raise ValueError(f"unknown: {', '.join(sorted(unknown))}")
        data["without"] = tuple(data.get("without", ()))
        data["roots"] = Roots(**data.get("roots", {}))
        if data.get("job") is not None:
            data["job"] = facts_of(data["job"])
            if LOCAL_CLUSTER.fullmatch(data.get("cluster", "")):  # perhaps on a node of a real one
                data["job"] = replace(data["job"], cluster=data["cluster"])
                data["cluster"] = cluster_name()
        return cls(**data)


@dataclass(frozen=True)
class Context:
    """What the collectors of one exporter share.

    Attributes:
        options: of the exporter.
        jobs: the jobs of the node; the collector `jobs` posts them, others read them.
    """

    options: NodeOptions
    jobs: JobsBoard = field(default_factory=JobsBoard)


def check(options: NodeOptions) -> None:
    """Raise an error if an option is invalid.

    Raises:
        InputError: one of them is wrong; its field is the option's name.
    """
    from hpml_exporters.web.config import split  # noqa: PLC0415 - not for collectors

    split(options.listen)
    for name in options.without:
        if name not in COLLECTORS:
            raise InputError(
                "unknown collector",
                field="without",
                value=name,
                hint=did_you_mean(str(name), COLLECTORS) or f"there are: {', '.join(COLLECTORS)}",
            )
    for name in _INTERVALS:
        _check_seconds(options, name, SECONDS_MIN, SECONDS_MAX)
    _check_seconds(options, "stuck_seconds", 1.0, SECONDS_MAX)
    _check_seconds(options, "exit_seconds", 1.0, 24 * SECONDS_MAX)
    if options.exit_seconds <= options.stuck_seconds:
        raise InputError(
            f"must be more than the {options.stuck_seconds:g} s after which a reading is stuck",
            field="exit_seconds",
            value=options.exit_seconds,
        )


def cluster_name() -> str:
    """Return the ClusterName in this node's slurm.conf, as in SLURM_CLUSTER_NAME."""
    for path in (os.environ.get("SLURM_CONF"), *_SLURM_CONFS):
        with contextlib.suppress(OSError):
            text = Path(path or "").read_text("utf-8", "replace")
            match = re.search(r"^\s*ClusterName\s*=\s*(\S+)", text, re.MULTILINE | re.IGNORECASE)
            if match:
                # Slurm itself uses the name in lower case.
                return match[1].lower()
    return ""


def _check_seconds(options: NodeOptions, name: str, least: float, most: float) -> None:
    value = getattr(options, name)
    if not least <= value <= most:  # so is NaN
        raise InputError(f"must be {least:g} to {most:g} seconds", field=name, value=value)
