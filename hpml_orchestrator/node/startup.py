"""The start of a job: claim the run, wait for the nodes, and choose a rendezvous."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import (
    BindingError,
    HpmlError,
    InputError,
    NotFoundError,
    StagingError,
    counted,
)
from hpml_orchestrator.node.environment import ELSEWHERE, node_name
from hpml_orchestrator.placement.verify import plan_lines
from hpml_orchestrator.records import feed
from hpml_orchestrator.records.files import read_json, read_text, write_json, write_text
from hpml_orchestrator.records.job import NodeJob
from hpml_orchestrator.records.process import read_stat
from hpml_orchestrator.records.run import Attempt, Run, task_output
from hpml_orchestrator.records.submission import RUN_TABLE, Submission

if TYPE_CHECKING:
    from hpml_orchestrator.records.schema import Marker, NextRecord

EXIT_DUPLICATE = 75
"""Exit status of a job whose run is claimed by another job."""

_CLAIM_SECONDS = 30.0
_FIRST_POLL_SECONDS, _LONGEST_POLL_SECONDS = 0.05, 1.0
_NOTICE_SECONDS = 30.0
_LOW_PORT, _HIGH_PORT = 10_000, 32_000
_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def claim(submission: str) -> int:
    """Claim this start of the run and print the attempt's directory.

    The submission's table contains the run for `$SLURM_ARRAY_TASK_ID` (0 without an array). A
    script submitted by hand has no table and uses `runs/<job id>` below its directory, or
    `runs/<array id>_<index>` for an array task. A claim is a single `mkdir`: of two jobs only one
    succeeds, even on NFS.

    Returns:
        0, or 75 if another job has claimed the run: this one is a duplicate and must end.

    Raises:
        InputError: this is not inside a job.
        RecordError: `agent.json` is missing or damaged.
        NotFoundError: the table has no such index.
    """
    job_id = os.environ.get("SLURM_JOB_ID", "")
    if not job_id:
        raise InputError(
            "not inside a job: SLURM_JOB_ID is not set",
            hint="give the script to sbatch, or run the job file with `hpml run --local`",
        )
    NodeJob.read(Path(submission))  # before recording anything: without it no node can start
    run = Run(_run_directory(Path(submission), job_id))
    restart = os.environ.get("SLURM_RESTART_COUNT") or "0"
    array = os.environ.get("SLURM_ARRAY_JOB_ID", "")
    # Number attempts by the previous ones, not by SLURM_RESTART_COUNT: a continuation is another
    # job, which starts at 0 again.
    attempts = run.attempts()
    number = attempts[-1].number if attempts else 0
    again = False
    if attempts and (attempts[-1].directory / "started").is_dir():
        last = attempts[-1]
        claimant = _claimant(last)
        again = claimant == job_id and (last.restart or "0") == restart
        if not again and not _may_follow(last, claimant, job_id, array or job_id):
            return _duplicate(last, job_id)
        number += not again
    attempt = Attempt(run.directory / "attempts" / str(number))
    for name in ("nodes", "events", "binding", "plan"):
        (attempt.directory / name).mkdir(parents=True, exist_ok=True)
    started = attempt.directory / "started"
    if again:
        # The script was restarted without a requeue, so the files of its nodes are outdated.
        _forget(attempt)
    else:
        try:
            # mkdir is atomic, also on NFS: of two simultaneous jobs only one succeeds.
            started.mkdir()
        except FileExistsError:
            # The winner is unknown until it has written its id. Wait for it, for the message.
            _claimant(attempt)
            return _duplicate(attempt, job_id)
    # Create it now: NFS caches missing names for a while, and agents on other nodes would see a
    # stop request too late.
    write_text(attempt.directory / "stop", "")
    write_text(started / "restart", f"{restart}\n")
    if array:  # before job_id, which completes the claim: readers of that file need both
        write_text(started / "array_job_id", f"{array}\n")
    write_text(started / "job_id", f"{job_id}\n")
    output = task_output(Path(submission), os.environ.get("SLURM_ARRAY_TASK_ID", ""))
    link = run.directory / "output.log"
    if output.exists() and not os.path.lexists(link):  # an earlier attempt may have created it
        link.symlink_to(os.path.relpath(output, run.directory))
    node = node_name()
    names = [
        name
        for name in dict.fromkeys([node, socket.getfqdn(), socket.gethostname()])
        if name.partition(".")[0] != "localhost"  # every node would resolve it to itself
    ]
    write_json(
        attempt.directory / "head.json",
        # All attempts append to the same output; this attempt's part begins at this offset.
        {
            "node": node,
            "names": names,
            "cluster": os.environ.get("SLURM_CLUSTER_NAME", ""),
            "output_bytes": os.fstat(2).st_size,
        },
    )
    log = attempt.directory / "events" / "batch.jsonl"
    queued = Submission(Path(submission)).started_at()
    if number == 0 and queued is not None:
        feed.append(log, "queued", node="batch", now=queued)
    feed.append(
        log,
        "started",
        node="batch",
        job_id=job_id,
        attempt=number,
        head=node,
        nodes=os.environ.get("SLURM_JOB_NODELIST", ""),
        node_count=int(os.environ.get("SLURM_NNODES") or 1),
        partition=os.environ.get("SLURM_JOB_PARTITION", ""),
        **allocation(os.environ),
    )
    sys.stdout.write(f"{attempt.directory}\n")
    return 0


def allocation(environment: Mapping[str, str]) -> dict[str, int]:
    """Return the total numbers of CPUs and GPUs of a job, without unknown ones.

    Jobs request GPUs per node, so each node has as many as the first one.

    >>> allocation({"SLURM_JOB_CPUS_PER_NODE": "72(x2),36", "SLURM_NNODES": "3"})
    {'cpus': 180}
    """
    known = {}
    parts = re.fullmatch(
        r"\d+(\(x\d+\))?(,\d+(\(x\d+\))?)*", environment.get("SLURM_JOB_CPUS_PER_NODE", "")
    )
    if parts is not None:
        pairs = re.findall(r"(\d+)(?:\(x(\d+)\))?", parts[0])
        known["cpus"] = sum(int(cpus) * int(times or 1) for cpus, times in pairs)
    gpus = environment.get("SLURM_GPUS_ON_NODE", "")
    if gpus.isdecimal():
        known["gpus"] = int(gpus) * int(environment.get("SLURM_NNODES") or 1)
    return known


def _claimant(attempt: Attempt) -> str:
    """Return the id of the job that claimed an attempt; empty without one.

    The claiming job writes its id right after its mkdir, so wait a while for it.
    """
    deadline = time.monotonic() + _CLAIM_SECONDS
    while True:
        job_id = attempt.job_id
        if job_id or not (attempt.directory / "started").is_dir():
            return job_id
        if time.monotonic() >= deadline:
            return ""
        time.sleep(0.1)


def _may_follow(last: Attempt, claimant: str, job_id: str, submitted_id: str) -> bool:
    """Return whether a job may start the next attempt.

    After a requeue the same job may, unless the run continues in another job. If the run continues,
    another job may; when the id of the continuation is recorded, only that job.
    """
    following: NextRecord = last.next or {}
    if following.get("how") == "continuation":
        return submitted_id == str(following.get("job_id"))
    if claimant in ("", job_id):
        return bool(claimant) or os.environ.get("SLURM_RESTART_COUNT", "0") not in ("", "0")
    if following.get("how") == "requeue":
        return False
    return last.goes_on or last.newest_start() is not None


def _forget(attempt: Attempt) -> None:
    for name in ("nodes", "plan", "binding", "chain"):
        for path in (attempt.directory / name).glob("*"):
            if path.is_file():
                path.unlink(missing_ok=True)
    # An old `over` would end the new agents at once, and the other files describe the end of the
    # earlier start.
    for name in ("over", "ended.json", "next.json"):
        (attempt.directory / name).unlink(missing_ok=True)


def _run_directory(submission: Path, job_id: str) -> Path:
    index = int(os.environ.get("SLURM_ARRAY_TASK_ID") or 0)
    try:
        table = read_text(submission / RUN_TABLE)
        read_json(submission / "submit.json")
    except NotFoundError:
        array = os.environ.get("SLURM_ARRAY_JOB_ID", "")
        return submission / "runs" / (f"{array}_{index}" if array else job_id)
    for line in table.splitlines():
        number, _, rid = line.partition("\t")
        if number == str(index):
            return submission.parent.parent / "runs" / rid
    raise NotFoundError(f"{submission / RUN_TABLE} has no run of index {index}")


def _duplicate(attempt: Attempt, job_id: str) -> int:
    sys.stderr.write(
        f"hpml: this run belongs to job {attempt.job_id or 'unknown'}; "
        f"job {job_id} is a duplicate and ends here\n"
    )
    return EXIT_DUPLICATE


def wait_ready(
    attempt: str,
    nodes: str,
    agent_pid: str,
    *,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Wait until all nodes are ready, print the paths of their data as shell lines, and return 0.

    Args:
        attempt: the attempt's directory.
        nodes: number of nodes of the job.
        agent_pid: process ID of the step with the agents, a sibling of this process.
        sleep: function to wait.
        clock: seconds, monotonic.

    Raises:
        StagingError: a node failed; the message contains the reason.
        BindingError: a node cannot bind its ranks, and the job has `verify: strict`.
        HpmlError: the agents ended without a reason.
    """
    directory = Attempt(Path(attempt))
    wanted = int(nodes)
    pause = _FIRST_POLL_SECONDS
    noticed = clock()
    while True:
        # Check this before the markers: if the agents have ended, all their files exist.
        agents = read_stat(agent_pid)
        failed = directory.markers("failed")
        if failed:
            message = "; ".join(
                f"{marker.get('node')}: {marker.get('message')}" for marker in failed
            )
            hint = next((str(marker["hint"]) for marker in failed if marker.get("hint")), "")
            codes = {marker.get("exit_code") for marker in failed}
            kind = BindingError if codes == {BindingError.exit_code} else StagingError
            raise kind(message, hint=hint)
        ready = directory.markers("ready")
        if len(ready) >= wanted:
            _report_ready(ready)
            lines = (f"export {name}={shlex.quote(one)}\n" for name, one in _paths(ready).items())
            sys.stdout.write("".join(lines))
            return 0
        if agents is None or agents.ended:
            raise HpmlError(
                f"the node agents ended before all nodes were ready ({len(ready)} of {wanted} are)",
                hint="see the messages of srun and the agents above, in this output",
            )
        if clock() - noticed >= _NOTICE_SECONDS:
            noticed = clock()
            sys.stderr.write(f"hpml: {len(ready)} of {wanted} nodes are ready\n")
        sleep(pause)
        pause = min(pause * 1.5, _LONGEST_POLL_SECONDS)


def _paths(ready: list[Marker]) -> dict[str, str]:
    """Return the variable `HPML_STAGE_NAME` of each entry: the path of the data on the first node.

    The path differs on a node where another job uses damaged kept data or is copying them.
    hpml-bind then replaces it by the node's own path from `HPML_STAGE_ELSEWHERE`.
    """
    places: dict[str, str] = {}
    elsewhere: dict[str, dict[str, str]] = {}
    for marker in ready:
        stages = marker.get("stages")
        for stage in stages if isinstance(stages, list) else []:
            path, first = stage["path"], places.setdefault(stage["name"], stage["path"])
            if path != first:
                elsewhere.setdefault(str(marker.get("node")), {})[first] = path
    variables = {f"HPML_STAGE_{name.upper()}": path for name, path in places.items()}
    if elsewhere:
        variables[ELSEWHERE] = json.dumps(elsewhere)
    return variables


def _report_ready(ready: list[Marker]) -> None:
    size = sum(int(marker.get("bytes", 0)) for marker in ready)
    files = sum(int(marker.get("files", 0)) for marker in ready)
    slowest = max(float(marker.get("seconds", 0.0)) for marker in ready)
    staged = ""
    if files:
        staged = f", staged {counted(files, 'file')}, {size} bytes, slowest {slowest:.2f} s"
    placed = [(str(marker["node"]), marker["placed"]) for marker in ready if "placed" in marker]
    lines = [f"{counted(len(ready), 'node')} ready{staged}", *plan_lines(placed)]
    sys.stderr.write("".join(f"hpml: {line}\n" for line in lines))


def rendezvous(attempt: str) -> int:
    """Print `ADDRESS PORT` for the ranks of this attempt; runs on the head node.

    Raises:
        HpmlError: a node cannot resolve the head node's name, or no port is free.
    """
    directory = Path(attempt)
    nodes = int(os.environ.get("SLURM_NNODES") or 1)
    address = "127.0.0.1" if nodes == 1 else _common_name(directory)
    # The port is bound only when the ranks start, so two jobs should start searching at different
    # ports. The key is not the job id: local job ids start at 1 in every HPML_HOME.
    sys.stdout.write(f"{address} {free_port(str(directory.resolve()))}\n")
    return 0


def free_port(key: str) -> int:
    """Return a free port on all addresses of this node; the key determines the order of the search.

    Raises:
        HpmlError: no port is free.
    """
    for port in candidate_ports(key, ephemeral_range()):
        if _is_free(port):
            return port
    raise HpmlError(f"no port between {_LOW_PORT} and {_HIGH_PORT} is free on this node")


def resolve(names: list[str]) -> dict[str, str]:
    """Return the addresses of the names that this node can resolve."""
    addresses = {}
    for name in names:
        try:
            addresses[name] = str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
        except (OSError, UnicodeError):
            continue
    return addresses


def candidate_ports(key: str, ephemeral: tuple[int, int]) -> Iterator[int]:
    """Yield ports from 10000 to 31999 in an order that depends on a key, ephemeral ports last.

    The kernel may assign an ephemeral port to any connection, but if all candidates are ephemeral,
    a free one is better than none.

    >>> next(candidate_ports("/r/17", (32768, 60999))) == next(candidate_ports("/r/17", (32768, 1)))
    True
    """
    span = _HIGH_PORT - _LOW_PORT
    digest = hashlib.sha256(key.encode()).digest()
    start = int.from_bytes(digest[:8], "big") % span
    stride = 7919  # a prime that does not divide the span, so that every port occurs once
    ports = [_LOW_PORT + (start + step * stride) % span for step in range(span)]
    yield from sorted(ports, key=lambda port: ephemeral[0] <= port <= ephemeral[1])


def ephemeral_range() -> tuple[int, int]:
    """Return the first and last ephemeral port, used for outgoing connections."""
    try:
        low, high = _PORT_RANGE.read_text("ascii").split()
        return int(low), int(high)
    except (OSError, ValueError):
        return 32_768, 60_999


def _is_free(port: int) -> bool:
    try:
        # A single socket for IPv4 and IPv6, which fails if the port is in use with either.
        family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
        with socket.create_server(
            ("", port),
            family=family,
            dualstack_ipv6=family == socket.AF_INET6,
        ):
            return True
    except OSError:
        return False


def _common_name(attempt: Path) -> str:
    """Return the first name of the head node that every node resolves."""
    names: list[str] = read_json(attempt / "head.json")["names"]
    known = {
        str(marker["node"]): set(marker["resolves"]) for marker in Attempt(attempt).markers("ready")
    }
    for name in names:
        if all(name in resolved for resolved in known.values()):
            return name
    missing = "; ".join(
        f"{node} resolves {', '.join(sorted(resolved)) or 'none'}"
        for node, resolved in known.items()
        if resolved != set(names)
    )
    raise HpmlError(
        f"no name of the head node ({', '.join(names)}) is known to all nodes: {missing}",
        hint="the nodes' /etc/hosts or DNS must know each other's names",
    )
