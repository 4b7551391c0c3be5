"""A cluster as squeue, sinfo and sdiag show it: explicit fields, separated by control characters.

The only free text is a node's reason, the last field.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import socket
from threading import Lock
from typing import NamedTuple, Protocol, TypeAlias

from hpml_orchestrator.errors import SchedulerUnavailable
from hpml_orchestrator.records.units import read_gres
from hpml_orchestrator.scheduler.cluster import node_state, takes_jobs
from hpml_orchestrator.scheduler.command import Runner, SubprocessRunner
from hpml_orchestrator.scheduler.slurm.client import ask, slurm_error
from hpml_orchestrator.scheduler.slurm.records import (
    node_states,
    parse_records,
    parse_rows,
    parse_time,
)

# A cluster at one moment, independent of the source.

ENDED = frozenset(
    "BOOT_FAIL CANCELLED COMPLETED DEADLINE FAILED LAUNCH_FAILED NODE_FAIL OUT_OF_MEMORY "
    "PREEMPTED RECONFIG_FAIL REVOKED TIMEOUT".split()
)
"""States of jobs that have ended, as squeue names them."""


class QueueRow(NamedTuple):
    """One row of the queue: a job, an array task, or all pending tasks of an array.

    Attributes:
        id: `25`, `25_3` or `25_[4-9]`.
        partitions: in which it waits or runs.
        tasks: jobs in this row.
        eligible, start, end: seconds since the epoch; 0 if not known yet.
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
        """Its states as one word; see `node_state`."""
        return node_state(self.states)

    @property
    def free_state(self) -> str:
        """State of its unallocated CPUs and GPUs; Slurm starts nodes that it powered down."""
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
    """A source of views."""

    name: str

    def read(self) -> View:
        """Query Slurm once.

        Raises:
            SchedulerUnavailable: it gave no usable answer.
        """
        ...


_LOG = logging.getLogger(__name__)
_UNIT, _RECORD = "\x1f", "\x1e"
_JOB_FIELDS = (
    "JobArrayID State Reason Partition QOS UserName EligibleTime StartTime EndTime".split()
)
_NODE_FIELDS = "NodeHost NodeAddr StateComplete Partition CPUsState Gres GresUsed Reason".split()
_SHARE_FIELDS = "Account,User,FairShare"
_TIMEOUT_SECONDS = 60.0
Rare: TypeAlias = tuple[
    dict[str, tuple[int, int]], tuple[Reservation, ...], dict[tuple[str, str], float]
]
_RARE = 10  # refreshes between two queries of licences, reservations and fairshare

_RANGE = re.compile(r"(\d+)(?:-(\d+))?(?::(\d+))?", re.ASCII)
_node_states = lru_cache(maxsize=1024)(node_states)
_DECIMAL = re.compile(r"\d+(\.\d+)?", re.ASCII)
_HEX = re.compile(r"0x([0-9A-Fa-f]+)", re.ASCII)
_SDIAG = {
    "Server thread count": "server_thread_count",
    "Agent queue size": "agent_queue_size",
    "DBD Agent queue size": "dbd_agent_queue_size",
    "main Last cycle": "schedule_cycle_last",
    "backfill Last cycle": "backfill_cycle_last",
}
_SDIAG_LINE = re.compile(r"^\s*([A-Z][^:]*):\s+(\d+)\s*$", re.ASCII)


def _format(names: list[str]) -> str:
    return f":0{_UNIT},".join(names) + f":0{_RECORD}"


class Commands:
    """Reads a cluster with Slurm's commands: three per refresh, up to six at every tenth."""

    name = "commands"

    def __init__(self, runner: Runner | None = None, *, shares: bool = False) -> None:
        """Prepare.

        Args:
            runner: starts the commands.
            shares: read the fairshare of users and accounts, too.
        """
        self._runner = runner or SubprocessRunner()
        self._shares = shares
        self._refreshes = 0
        self._warned: set[str] = set()
        self._rare: Rare = ({}, (), {})

    def read(self) -> View:
        """Query Slurm once; see `ViewSource`."""
        # Text, not JSON, which costs Slurm and us 4 KB and 60 KB of memory per job: 6 GB for
        # 100,000 jobs.
        squeue = ("squeue", "--all", "--noheader", "--states=all", "-O", _format(_JOB_FIELDS))
        jobs = list(_jobs_of(self._output(*squeue)))
        return View(jobs, self.nodes(), _sdiag_of(self._optional("sdiag")), *self.rare())

    def nodes(self) -> list[ClusterNode]:
        """Return only the nodes."""
        sinfo = ("sinfo", "--all", "--noheader", "--Node", "-O", _format(_NODE_FIELDS))
        return _nodes_of(self._output(*sinfo))

    def rare(self) -> Rare:
        """Return licences, reservations and fairshares, refreshed less often."""
        if self._refreshes % _RARE == 0:
            show = ("scontrol", "--oneliner", "show")
            licenses = _licenses(self._optional(*show, "licenses"))
            reservations = _reservations(self._optional(*show, "reservations"))
            sshare = ("sshare", "-a", "-P", "-h", "-o", _SHARE_FIELDS)
            shares = _fairshares(self._optional(*sshare)) if self._shares else {}
            self._rare = licenses, reservations, shares
        self._refreshes += 1
        return self._rare

    def _output(self, *argv: str) -> str:
        done = ask(self._runner, argv, timeout=_TIMEOUT_SECONDS)
        if done.returncode != 0:
            raise slurm_error(argv[0], done)
        return done.stdout

    def _optional(self, *argv: str) -> str:
        """Return the output of a command that may be missing or denied; log that once."""
        try:
            return self._output(*argv)
        except SchedulerUnavailable as error:
            if argv[0] not in self._warned:
                self._warned.add(argv[0])
                _LOG.warning("metrics left out: %s", error)
            return ""


def _jobs_of(text: str) -> Iterator[QueueRow]:
    for fields in _rows(text, len(_JOB_FIELDS), "squeue"):
        job_id, state, reason, partition, qos, user, eligible, start, end = fields
        pending = state == "PENDING"
        yield QueueRow(
            job_id,
            state.partition(" ")[0],
            head_of_reason(reason) if pending else "",
            tuple(partition.split(",")),
            qos,
            user,
            count_tasks(job_id) if "[" in job_id else 1,
            _seconds(eligible),
            # A pending job's start is the scheduler's estimate.
            0 if pending else _seconds(start),
            _seconds(end),
        )


def _nodes_of(text: str) -> list[ClusterNode]:
    partitions: dict[str, list[str]] = {}
    first: dict[str, list[str]] = {}
    for fields in _rows(text, len(_NODE_FIELDS), "sinfo"):
        # `sinfo --Node` has a line for each partition of a node: count the node once.
        partitions.setdefault(fields[0], []).append(fields[3].rstrip("*"))
        first.setdefault(fields[0], fields)
    nodes = []
    for name, row in first.items():
        _, address, states, _, cpus, gres, used, reason = row
        counts = [_number(part) for part in cpus.split("/")]  # allocated/idle/other/total
        nodes.append(
            ClusterNode(
                name=name,
                address=address,
                states=_node_states(states),
                reason="" if reason in {"none", "(null)"} else reason,
                partitions=tuple(dict.fromkeys(filter(None, partitions[name]))),
                cpus=counts[-1],
                cpus_allocated=counts[0],
                gpus=_gpus(gres),
                gpus_allocated=_gpus(used),
            )
        )
    return nodes


def _sdiag_of(text: str) -> dict[str, float]:
    """Return the numbers of sdiag under pyslurm's names."""
    statistics: dict[str, float] = {}
    section = ""
    for line in text.splitlines():
        if line.startswith(("Main schedule", "Backfilling")):
            section = "main " if line[0] == "M" else "backfill "
        elif line.startswith("Remote Procedure"):
            break
        elif match := _SDIAG_LINE.match(line):
            name = _SDIAG.get(section + match[1])
            if name:
                statistics[name] = int(match[2])
    return statistics


@lru_cache(maxsize=1024)
def head_of_reason(text: str) -> str:
    """Return a job's reason without its details; empty for none.

    >>> head_of_reason("ReqNodeNotAvail, UnavailableNodes:node[1-4]"), head_of_reason("None")
    ('ReqNodeNotAvail', '')
    """
    match = re.match(r"\(?(\w+)", text, re.ASCII)
    return "" if match is None or match[1].lower() in {"none", "null"} else match[1]


def count_tasks(job_id: str) -> int:
    """Return the number of tasks in an array's row.

    >>> count_tasks("3_[2-3%2]"), count_tasks("3_[1,5-9:2]"), count_tasks("10_[0x248%1]")
    (2, 4, 3)
    """
    tasks = job_id.partition("[")[2].partition("]")[0].partition("%")[0]
    bits = _HEX.fullmatch(tasks)
    if bits:
        return int(bits[1], 16).bit_count()
    total = 0
    for part in tasks.split(","):
        match = _RANGE.fullmatch(part)
        if match:
            first, last, step = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
            total += len(range(first, last + 1, step or 1))
    return max(total, 1)


def _rows(text: str, width: int, command: str) -> Iterator[list[str]]:
    rows = text.split(_RECORD)
    # Each record ends with a separator. Text after the last one means a truncated answer, whose
    # counts would be too low.
    if rows.pop().strip():
        raise SchedulerUnavailable(f"{command}: its answer is cut off")
    for row in rows:
        fields = [_known(field.strip()) for field in row.split(_UNIT, width - 1)]
        if len(fields) == width:
            yield fields


def _known(field: str) -> str:
    return "" if field in {"(null)", "N/A"} else field


def _seconds(text: str) -> int:
    """Return seconds since the epoch, 0 if unknown."""
    return int(parse_time(text) or 0)


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() else 0


@lru_cache(maxsize=1024)
def _gpus(text: str) -> Mapping[str, int]:
    counts: dict[str, int] = {}
    for name, kind, count in read_gres(text):
        if name == "gpu":
            counts[kind] = counts.get(kind, 0) + count
    return counts


def _licenses(text: str) -> dict[str, tuple[int, int]]:
    rows = parse_records(text)
    return {row["LicenseName"]: (_number(row["Total"]), _number(row["Used"])) for row in rows}


def _reservations(text: str) -> tuple[Reservation, ...]:
    return tuple(
        Reservation(
            row["ReservationName"],
            row["State"].lower(),
            _number(row["NodeCnt"]),
            _seconds(row["StartTime"]),
            _seconds(row["EndTime"]),
        )
        for row in parse_records(text)
    )


def _fairshares(text: str) -> dict[tuple[str, str], float]:
    rows = parse_rows(text, _SHARE_FIELDS)
    return {
        (row["Account"], row["User"]): float(row["FairShare"])
        for row in rows
        if row["User"] and _DECIMAL.fullmatch(row["FairShare"])
    }


# The node exporters of a cluster in the format of Prometheus' file_sd and http_sd.

_CACHE_SECONDS = 60.0
_CLIENT_SECONDS = 10.0
_AWAY = frozenset({"down", "drained", "powered_down"})


def targets(nodes: Iterable[ClusterNode], port: int, *, only_up: bool = False) -> str:
    """Return JSON with a target per node and its labels.

    Args:
        nodes: of the cluster.
        port: of the node exporters.
        only_up: leave out nodes that are down, drained or powered down.
    """
    groups = [
        {
            "targets": [f"{node.address or node.name}:{port}"],
            "labels": {
                "node": node.name,
                "__meta_slurm_state": node.state,
                "__meta_slurm_partitions": f",{','.join(node.partitions)},",
                "__meta_slurm_gpu_types": f",{','.join(sorted(filter(None, node.gpus)))},",
                "__meta_slurm_gpus": str(sum(node.gpus.values())),
            },
        }
        for node in nodes
        if not (only_up and node.state in _AWAY)
    ]
    return json.dumps(groups, indent=1) + "\n"


class TargetServer(ThreadingHTTPServer):
    """Serves /targets for http_sd; queries Slurm at most once a minute."""

    daemon_threads = True

    def __init__(self, listener: socket, source: Commands, port: int, *, only_up: bool) -> None:
        """Serve on a socket that listens; see `targets` for the other arguments."""
        super().__init__(("", 0), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.server_name, self.server_port = self.socket.getsockname()[:2]
        self._source, self._port, self._only_up = source, port, only_up
        self._lock = Lock()
        self._body = b""
        self._due = 0.0

    def body(self) -> bytes:
        """Return the list of targets; the previous one while Slurm does not answer.

        Raises:
            SchedulerUnavailable: Slurm gave none yet.
        """
        with self._lock:
            # Query under the lock: many clients at once cause one request.
            if time.monotonic() >= self._due:
                try:
                    text = targets(self._source.nodes(), self._port, only_up=self._only_up)
                    self._body = text.encode("utf-8", "replace")
                except SchedulerUnavailable:
                    if not self._body:
                        raise
                # Also after a failure: do not query a failing controller more often.
                self._due = time.monotonic() + _CACHE_SECONDS
            return self._body


class _Handler(BaseHTTPRequestHandler):
    server: TargetServer
    timeout = _CLIENT_SECONDS

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != "/targets":
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        try:
            body = self.server.body()
        except SchedulerUnavailable as error:
            self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, explain=str(error))
            return
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - as http.server's
        pass
