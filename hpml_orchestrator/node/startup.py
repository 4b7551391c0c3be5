"""The first act of a job: claim the attempt."""

from __future__ import annotations

import hashlib
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hpml_orchestrator.errors import (
    BindingError,
    HpmlError,
    InputError,
    NotFoundError,
    StagingError,
)
from hpml_orchestrator.placement.told import plan_lines
from hpml_orchestrator.records import events
from hpml_orchestrator.records.files import read_json, read_text, write_json, write_text
from hpml_orchestrator.records.run import task_output
from hpml_orchestrator.records.store import RUN_TABLE, Attempt, Run, Submission

__all__ = [
    "EXIT_DUPLICATE",
    "candidate_ports",
    "claim",
    "ephemeral_range",
    "node_name",
    "rendezvous",
    "resolve",
    "wait_ready",
]

_CLAIM_SECONDS = 30.0
EXIT_DUPLICATE = 75
"""Exit status of a job that found its run claimed by another job."""


def node_name(environment: Mapping[str, str] | None = None) -> str:
    """Return Slurm's name of this node; the host's short name without Slurm."""
    env = os.environ if environment is None else environment
    return env.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]


def claim(submission: str) -> int:
    """Claim this start of the run and print the attempt's directory.

    The run is the one that the submission's table gives for `$SLURM_ARRAY_TASK_ID` (0 without an
    array); a script started by hand, without a table, gets `runs/<job id>` below its directory,
    a task of an array `runs/<array's id>_<index>`.
    Claiming is one `mkdir`, which one of two jobs wins even on NFS.

    Returns:
        0, or 75 when another job has claimed the run: this one is a duplicate and must end.

    Raises:
        InputError: not inside a job.
        NotFoundError: the table has no such index.
    """
    job_id = os.environ.get("SLURM_JOB_ID", "")
    if not job_id:
        raise InputError(
            "not inside a job: SLURM_JOB_ID is not set",
            hint="give the script to sbatch, or run the job file with `hpml run --local`",
        )
    run = Run(_run_directory(Path(submission), job_id))
    number = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
    for earlier in run.attempts():
        if _claimant(earlier) not in ("", job_id):
            return _duplicate(earlier, job_id)
    attempt = Attempt(run.directory / "attempts" / str(number))
    for name in ("nodes", "events", "binding", "plan"):
        (attempt.directory / name).mkdir(parents=True, exist_ok=True)
    started = attempt.directory / "started"
    try:
        started.mkdir()
    except FileExistsError:
        if _claimant(attempt) != job_id:
            return _duplicate(attempt, job_id)
        # Same job, same attempt: the script was started again without a requeue. What its nodes
        # said before does not hold any more.
        _forget(attempt)
    array = os.environ.get("SLURM_ARRAY_JOB_ID", "")
    if array:  # before the id that completes the claim: whoever reads that one finds both
        write_text(started / "array_job_id", f"{array}\n")
    write_text(started / "job_id", f"{job_id}\n")
    output = task_output(Path(submission), os.environ.get("SLURM_ARRAY_TASK_ID", ""))
    link = run.directory / "output.log"
    if output.exists() and not os.path.lexists(link):  # of a task: an earlier attempt may have it
        link.symlink_to(os.path.relpath(output, run.directory))
    node = node_name()
    names = [
        name
        for name in dict.fromkeys([node, socket.getfqdn(), socket.gethostname()])
        if name.partition(".")[0] != "localhost"  # every node would find itself
    ]
    write_json(
        attempt.directory / "head.json",
        # the output grows with each attempt: here begins what this one's Slurm and launcher say
        {"node": node, "names": names, "output_bytes": os.fstat(2).st_size},
    )
    log = attempt.directory / "events" / "batch.jsonl"
    queued = Submission(Path(submission)).started_at()
    if number == 0 and queued is not None:
        events.append(log, "queued", node="batch", now=queued)
    events.append(
        log,
        "started",
        node="batch",
        job_id=job_id,
        attempt=number,
        head=node,
        nodes=os.environ.get("SLURM_JOB_NODELIST", ""),
        node_count=int(os.environ.get("SLURM_NNODES") or 1),
    )
    sys.stdout.write(f"{attempt.directory}\n")
    return 0


def _claimant(attempt: Attempt) -> str:
    """Return the id of the job that claimed an attempt; empty when none has, or never will say.

    A winner writes its id right after the mkdir: it is given a moment.
    """
    deadline = time.monotonic() + _CLAIM_SECONDS
    while True:
        job_id = attempt.job_id
        if job_id or not (attempt.directory / "started").is_dir():
            return job_id
        if time.monotonic() >= deadline:
            return ""
        time.sleep(0.1)


def _forget(attempt: Attempt) -> None:
    """Remove the markers of an earlier start of the same attempt."""
    markers = [
        path
        for name in ("nodes", "plan", "binding", "chain")
        for path in (attempt.directory / name).glob("*")
        if path.is_file()
    ]
    for path in (*markers, attempt.directory / "over", attempt.directory / "ended.json"):
        path.unlink(missing_ok=True)


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


_FIRST_POLL_SECONDS = 0.05
_LONGEST_POLL_SECONDS = 1.0
_NOTICE_SECONDS = 30.0


def wait_ready(
    attempt: str,
    nodes: str,
    agent_pid: str,
    *,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Return 0 once all nodes are ready.

    Args:
        attempt: the attempt's directory.
        nodes: how many nodes the job has.
        agent_pid: process id of the step that holds the agents, a sibling of this process.
        sleep: how to wait.
        clock: seconds, monotonic.

    Raises:
        StagingError: a node failed; its reason is in the message.
        BindingError: a node cannot place its ranks, and the job wants proof.
        HpmlError: the agents ended without a word.
    """
    directory = Path(attempt)
    wanted = int(nodes)
    pause = _FIRST_POLL_SECONDS
    noticed = clock()
    while True:
        ended = not _alive(int(agent_pid))  # before looking: what it wrote last is then there
        failed = Attempt(directory).markers("failed")
        if failed:
            told = [f"{one.get('node')}: {one.get('message')}" for one in failed]
            hint = next((str(one["hint"]) for one in failed if one.get("hint")), "")
            codes = {one.get("exit_code") for one in failed}
            kind = BindingError if codes == {BindingError.exit_code} else StagingError
            raise kind("; ".join(told), hint=hint)
        ready = Attempt(directory).markers("ready")
        if len(ready) >= wanted:
            _tell(ready)
            return 0
        if ended:
            raise HpmlError(
                f"the node agents ended before all nodes were ready ({len(ready)} of {wanted} are)",
                hint="what srun and the agents said stands above, in this output",
            )
        if clock() - noticed >= _NOTICE_SECONDS:
            noticed = clock()
            sys.stderr.write(f"hpml: {len(ready)} of {wanted} nodes are ready\n")
        sleep(pause)
        pause = min(pause * 1.5, _LONGEST_POLL_SECONDS)


def _tell(ready: list[dict[str, Any]]) -> None:
    total = sum(int(one.get("bytes", 0)) for one in ready)
    files = sum(int(one.get("files", 0)) for one in ready)
    slowest = max(float(one.get("seconds", 0.0)) for one in ready)
    staged = (
        f", staged {files} file{'s' * (files != 1)}, {total} bytes, slowest {slowest:.2f} s"
        if files
        else ""
    )
    placed = [
        (str(one.get("node")), one["placed"])
        for one in ready
        if isinstance(one.get("placed"), dict)
    ]
    lines = [f"{len(ready)} node{'s' * (len(ready) > 1)} ready{staged}", *plan_lines(placed)]
    sys.stderr.write("".join(f"hpml: {line}\n" for line in lines))


def _alive(pid: int) -> bool:
    """Whether a process runs; one that ended and was not waited for counts as gone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as stream:
            return stream.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except FileNotFoundError:
        return False
    except OSError:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        return True


_LOW, _HIGH = 10_000, 32_000


def rendezvous(attempt: str) -> int:
    """Print `ADDRESS PORT` for the ranks of this attempt; runs on the head node.

    Raises:
        HpmlError: a node cannot resolve the head node's name, or no port is free.
    """
    directory = Path(attempt)
    nodes = int(os.environ.get("SLURM_NNODES") or 1)
    address = "127.0.0.1" if nodes == 1 else _common_name(directory)
    # A port is free until its job's ranks have started: two jobs must not begin at the same one.
    # Job ids do not tell jobs of the local backend apart, which count from 1 in every HPML_HOME.
    for port in candidate_ports(str(directory.resolve()), ephemeral_range()):
        if _free(port):
            sys.stdout.write(f"{address} {port}\n")
            return 0
    raise HpmlError(f"no port between {_LOW} and {_HIGH} is free on this node")


def resolve(names: list[str]) -> dict[str, str]:
    """Return the address of each name that this node can resolve."""
    found = {}
    for name in names:
        try:
            found[name] = str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
        except (OSError, UnicodeError):
            continue
    return found


def candidate_ports(key: str, ephemeral: tuple[int, int]) -> Iterator[int]:
    """Yield ports from 10000 to 31999 in an order made from a key, those outside a range first.

    The kernel gives ports of the ephemeral range to anybody's connections; on nodes where it was
    widened over all of these, a port in it that is free now is better than none.

    >>> next(candidate_ports("/r/17", (32768, 60999))) == next(candidate_ports("/r/17", (32768, 1)))
    True
    """
    span = _HIGH - _LOW
    digest = hashlib.sha256(key.encode()).digest()
    start = int.from_bytes(digest[:8], "big") % span
    stride = 7919  # a prime that does not divide the span: every port comes up once
    for wanted in (False, True):
        for step in range(span):
            port = _LOW + (start + step * stride) % span
            if (ephemeral[0] <= port <= ephemeral[1]) is wanted:
                yield port


def ephemeral_range(path: str = "/proc/sys/net/ipv4/ip_local_port_range") -> tuple[int, int]:
    """Return the first and last port that the kernel gives to outgoing connections."""
    try:
        with open(path, encoding="ascii") as stream:
            low, high = stream.read().split()
        return int(low), int(high)
    except (OSError, ValueError):
        return 32_768, 60_999


def _free(port: int) -> bool:
    for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):  # noqa: S104
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind((address, port))
        except OSError as error:
            if family == socket.AF_INET6 and error.errno != 98:  # noqa: PLR2004 - EADDRINUSE
                continue  # no IPv6 here
            return False
    return True


def _common_name(attempt: Path) -> str:
    """Return the first name of the head node that every node resolves."""
    head: dict[str, Any] = read_json(attempt / "head.json")
    ready = Attempt(attempt).markers("ready")
    for name in head["names"]:
        if all(name in one.get("resolves", {}) for one in ready):
            return str(name)
    lost = [
        str(one.get("node"))
        for one in ready
        if not set(head["names"]) & set(one.get("resolves", {}))
    ]
    if not lost:
        known = "; ".join(
            f"{one.get('node')} knows {', '.join(one['resolves'])}"
            for one in ready
            if set(one["resolves"]) != set(head["names"])
        )
        raise HpmlError(
            f"no one name of the head node is known to all nodes: {known}",
            hint="the nodes' /etc/hosts or DNS must know each other's names",
        )
    raise HpmlError(
        f"node{'s' * (len(lost) > 1)} {', '.join(lost)} cannot resolve the head node "
        f"({', '.join(head['names'])})",
        hint="the nodes' /etc/hosts or DNS must know each other's names",
    )
