"""The start of a node: its software, its GPUs' health, and the barrier."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpml_orchestrator.errors import (
    BindingError,
    HpmlError,
    InputError,
    NotFoundError,
    RecordError,
    StagingError,
    counted,
)
from hpml_orchestrator.node.environment import ELSEWHERE, node_name
from hpml_orchestrator.placement.verify import plan_lines
from hpml_orchestrator.records import feed
from hpml_orchestrator.records.files import read_json, read_text, write_json, write_text
from hpml_orchestrator.records.job import NodeJob
from hpml_orchestrator.records.process import read_stat
from hpml_orchestrator.records.run import SOFTWARE, Attempt, Run, task_output
from hpml_orchestrator.records.submission import RUN_TABLE, Submission
from hpml_orchestrator.records.torch_build import READ_BUILD, read_vectors

if TYPE_CHECKING:
    from hpml_orchestrator.records.schema import Marker, NextRecord

EXIT_DUPLICATE = 75
"""Exit status of a job that found its run claimed by another job."""

_CLAIM_SECONDS = 30.0
_FIRST_POLL_SECONDS, _LONGEST_POLL_SECONDS = 0.05, 1.0
_NOTICE_SECONDS = 30.0
_LOW_PORT, _HIGH_PORT = 10_000, 32_000
_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def claim(submission: str) -> int:
    """Claim this start of the run and print the attempt's directory.

    The run is the one that the submission's table gives for `$SLURM_ARRAY_TASK_ID` (0 without an
    array); a script started by hand, without a table, gets `runs/<job id>` below its directory,
    a task of an array `runs/<array's id>_<index>`.
    Claiming is one `mkdir`: of two jobs only one succeeds, even on NFS.

    Returns:
        0, or 75 when another job has claimed the run: this one is a duplicate and must end.

    Raises:
        InputError: not inside a job.
        RecordError: `agent.json` is missing or damaged.
        NotFoundError: the table has no such index.
    """
    job_id = os.environ.get("SLURM_JOB_ID", "")
    if not job_id:
        raise InputError(
            "not inside a job: SLURM_JOB_ID is not set",
            hint="give the script to sbatch, or run the job file with `hpml run --local`",
        )
    NodeJob.read(Path(submission))  # before anything is recorded: without it no node can start
    run = Run(_run_directory(Path(submission), job_id))
    restart = os.environ.get("SLURM_RESTART_COUNT") or "0"
    array = os.environ.get("SLURM_ARRAY_JOB_ID", "")
    # Attempts count on from the last one, not from SLURM_RESTART_COUNT: a continuation is another
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
        # The script was restarted without a requeue, so the files of its nodes are out of date.
        _forget(attempt)
    else:
        try:
            # mkdir is atomic on NFS as well: of two jobs that start at the same moment, one makes
            # it.
            started.mkdir()
        except FileExistsError:
            # Between its mkdir and its id the winner is unknown. Wait, so that the message can name
            # it.
            _claimant(attempt)
            return _duplicate(attempt, job_id)
    # Create it now: NFS caches for a while that a file does not exist, and agents of other nodes
    # would see a stop request too late.
    write_text(attempt.directory / "stop", "")
    write_text(started / "restart", f"{restart}\n")
    if array:  # before job_id, which completes the claim: a reader of that file needs both
        write_text(started / "array_job_id", f"{array}\n")
    write_text(started / "job_id", f"{job_id}\n")
    output = task_output(Path(submission), os.environ.get("SLURM_ARRAY_TASK_ID", ""))
    link = run.directory / "output.log"
    if output.exists() and not os.path.lexists(link):  # an earlier attempt may have made it
        link.symlink_to(os.path.relpath(output, run.directory))
    node = node_name()
    names = [
        name
        for name in dict.fromkeys([node, socket.getfqdn(), socket.gethostname()])
        if name.partition(".")[0] != "localhost"  # every node would resolve it to itself
    ]
    write_json(
        attempt.directory / "head.json",
        # All attempts append to the same output; this offset is where the part of this one begins.
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
    """Return the number of CPUs and GPUs of a job on all its nodes; unknown ones are left out.

    Jobs ask for GPUs per node, so each node has as many as the first one.

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
    """Return the id of the job that claimed an attempt; empty if none has.

    The claiming job writes its id right after its mkdir, so this waits a while for the id.
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
    """Return whether a job may make the next attempt.

    The same job may after a requeue, unless the run continues in another job. Another job may if
    the run continues, and only the continuation itself once its id is recorded.
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
    # Left in place, `over` would end the new agents at once, and the others would describe the
    # earlier start as the end.
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
    """Return 0 once all nodes are ready; print where they have the data, as lines for the shell.

    Args:
        attempt: the attempt's directory.
        nodes: how many nodes the job has.
        agent_pid: process id of the step that holds the agents, a sibling of this process.
        sleep: how to wait.
        clock: seconds, monotonic.

    Raises:
        StagingError: a node failed; its reason is in the message.
        BindingError: a node cannot place its ranks, and the job wants proof.
        HpmlError: the agents ended and left no reason.
    """
    directory = Attempt(Path(attempt))
    wanted = int(nodes)
    pause = _FIRST_POLL_SECONDS
    noticed = clock()
    while True:
        # Before the markers: if the agents have ended, all that they wrote is there by now.
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
    """Return the variable `HPML_STAGE_NAME` of each entry: where the first node has the data.

    A node has them elsewhere if another job uses damaged kept data there, or is copying them.
    hpml-bind puts the node's own path in place, by `HPML_STAGE_ELSEWHERE`.
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
    # The port is bound only when the ranks start, so two jobs must not begin their search at the
    # same one. The key is not the job id: local jobs count from 1 in every HPML_HOME.
    sys.stdout.write(f"{address} {free_port(str(directory.resolve()))}\n")
    return 0


def free_port(key: str) -> int:
    """Return a port that is free on all addresses of this node; the search starts at the key's.

    Raises:
        HpmlError: none is free.
    """
    for port in candidate_ports(key, ephemeral_range()):
        if _is_free(port):
            return port
    raise HpmlError(f"no port between {_LOW_PORT} and {_HIGH_PORT} is free on this node")


def resolve(names: list[str]) -> dict[str, str]:
    """Return the address of each name that this node can resolve."""
    addresses = {}
    for name in names:
        try:
            addresses[name] = str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
        except (OSError, UnicodeError):
            continue
    return addresses


def candidate_ports(key: str, ephemeral: tuple[int, int]) -> Iterator[int]:
    """Yield ports from 10000 to 31999 in an order that depends on a key, ephemeral ports last.

    The kernel may give an ephemeral port to any connection. If all candidates are ephemeral, one
    that is free now is better than none.

    >>> next(candidate_ports("/r/17", (32768, 60999))) == next(candidate_ports("/r/17", (32768, 1)))
    True
    """
    span = _HIGH_PORT - _LOW_PORT
    digest = hashlib.sha256(key.encode()).digest()
    start = int.from_bytes(digest[:8], "big") % span
    stride = 7919  # a prime that does not divide the span: every port comes up once
    ports = [_LOW_PORT + (start + step * stride) % span for step in range(span)]
    yield from sorted(ports, key=lambda port: ephemeral[0] <= port <= ephemeral[1])


def ephemeral_range() -> tuple[int, int]:
    """Return the first and last ephemeral port, which outgoing connections get."""
    try:
        low, high = _PORT_RANGE.read_text("ascii").split()
        return int(low), int(high)
    except (OSError, ValueError):
        return 32_768, 60_999


def _is_free(port: int) -> bool:
    try:
        # One socket for IPv4 and IPv6, which fails if the port is in use with either.
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


# What a program runs in: its Python's packages, PyTorch's build, modules and the GPU driver.
#
# The agent of the job's first node starts this once per attempt, for a rank there, in a process of
# its own: neither a slow file system nor a driver that hangs may delay the job. The process ends
# itself.

_LIST_SECONDS = 10.0
_END_SECONDS = 20.0  # the system ends this process, whatever it waits for
_KILL_SECONDS = 1.0
_WORDS = 8
_MOST_BYTES = 16 * 1024**2
_PYTHON = re.compile(r"python[\d.]*")
_CODE = """\
import sys
sys.path.append(sys.argv.pop(1))
from hpml_orchestrator.node.startup import main
main(*sys.argv[1:])
"""
_READ_VERSION = "import json, platform; print(json.dumps(platform.python_version()))"
_LIST_PACKAGES = """\
import importlib.metadata, json
found = {}
for one in importlib.metadata.distributions():
    try:
        found.setdefault(one.metadata["Name"], one.version)
    except Exception:  # damaged metadata of one package
        pass
found.pop(None, None)
print(json.dumps(found))
"""


def start(attempt: Path, pid: int, program: str) -> subprocess.Popen[bytes] | None:
    """Start a process that records the software of a rank; None if it cannot be started.

    Args:
        attempt: the attempt's directory.
        pid: process of the rank.
        program: the first word of the rank's command.
    """
    root = str(Path(__file__).parents[2])  # a directory, or hpml-node.pyz
    words = [sys.executable, "-I", "-S", "-c", _CODE, root, str(attempt), str(pid), program]
    nothing = subprocess.DEVNULL
    try:
        return subprocess.Popen(
            words, stdin=nothing, stdout=nothing, stderr=nothing, start_new_session=True
        )
    except OSError:
        return None


def end(recorder: subprocess.Popen[bytes]) -> None:
    """End the process and the Python that it asks; what a driver holds is left to the system."""
    if recorder.poll() is None:  # else its number may be another process's by now
        os.killpg(recorder.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        recorder.wait(_KILL_SECONDS)


def main(attempt: str, pid: str, program: str) -> None:
    """Record the software of a rank, and end after some seconds at the latest."""
    signal.setitimer(signal.ITIMER_REAL, _END_SECONDS)  # SIGALRM ends the process
    record(Path(attempt), f"/proc/{pid}", program)


def record(attempt: Path, process: str, program: str) -> None:
    """Write what a rank runs in, first without the driver's versions: a call of it may hang.

    Args:
        attempt: the attempt's directory.
        process: the rank's directory below `/proc`.
        program: the first word of the rank's command.
    """
    environment = _environment(process)
    python = "" if _is_in_container(process) else python_of(program, environment)
    found: dict[str, object] = {
        "node": node_name(),
        "python": python or None,
        "python_version": _ask(python, _READ_VERSION, environment) if python else None,
        "packages": installed(python, environment) if python else None,
        "modules": [*filter(None, environment.get("LOADEDMODULES", "").split(":"))],
        "files": digests(process),
        "torch": _ask(python, READ_BUILD, environment) if python else None,
        "vectors": read_vectors(environment),
        "has_gpus": bool(environment.get("CUDA_VISIBLE_DEVICES")),
    }
    with contextlib.suppress(RecordError):
        write_json(attempt / SOFTWARE, found)
        if versions := nvidia_versions():
            write_json(attempt / SOFTWARE, {**found, **versions})


def _is_in_container(process: str) -> bool:
    """Whether a process has another file system: then its Python cannot be started from outside."""
    try:
        return not os.path.samefile(f"{process}/root", "/")
    except OSError:  # it has ended
        return False


def _environment(process: str) -> dict[str, str]:
    """Return the variables that a process was started with; empty if it has ended."""
    try:
        text = Path(process, "environ").read_bytes().decode("utf-8", "surrogateescape")
    except OSError:
        return {}
    return dict(pair.split("=", 1) for pair in text.split("\0") if "=" in pair)


def digests(process: str) -> dict[str, str]:
    """Return the SHA-256 of small files that a process's first words name, such as its script."""
    found = {}
    with contextlib.suppress(OSError):
        words = os.fsdecode(Path(process, "cmdline").read_bytes()).split("\0")[1:_WORDS]
        for path in (word for word in words if os.path.isabs(word)):
            with contextlib.suppress(OSError):
                if os.path.isfile(path) and os.path.getsize(path) <= _MOST_BYTES:
                    found[path] = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    return found


def python_of(program: str, environment: Mapping[str, str]) -> str:
    """Return the path of the Python that a program runs in; empty if it is not known.

    It is the program itself, or the one that its first line names. For any other program, such as
    a shell, it is the `python` on its PATH.

    Args:
        program: the first word of a command.
        environment: of the process.
    """
    search = environment.get("PATH", "")
    path = shutil.which(program, path=search) or ""
    if path and not _PYTHON.fullmatch(os.path.basename(path)):
        with contextlib.suppress(OSError), open(path, "rb") as stream:
            first = os.fsdecode(stream.readline(4096)).rstrip()
            path = (first[2:].split() or [""])[0] if first.startswith("#!") else ""
    if path and _PYTHON.fullmatch(os.path.basename(path)):
        return path
    return shutil.which("python", path=search) or shutil.which("python3", path=search) or ""


def installed(python: str, environment: Mapping[str, str]) -> dict[str, str] | None:
    """Return name and version of a Python's packages, as it lists them; None if it cannot.

    Args:
        python: its path.
        environment: of the process.
    """
    packages: dict[str, str] | None = _ask(python, _LIST_PACKAGES, environment)
    if packages is None:
        return None
    return dict(sorted(packages.items(), key=lambda pair: pair[0].lower()))


def _ask(python: str, code: str, environment: Mapping[str, str]) -> Any:
    """Return what a Python's answer in JSON says; None if it gives none."""
    try:
        answered = subprocess.run(
            [python, "-c", code],
            cwd="/",  # the current directory is on the path of `-c`
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_LIST_SECONDS,
            check=True,
        )
        return json.loads(answered.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def nvidia_versions() -> dict[str, str]:
    """Return the version of NVIDIA's driver, and the newest CUDA that it supports."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2():
            return {}
        text, number = ctypes.create_string_buffer(96), ctypes.c_int()
        versions = {}
        if not nvml.nvmlSystemGetDriverVersion(text, len(text)):
            versions["nvidia_driver"] = text.value.decode("ascii", "replace")
        if not nvml.nvmlSystemGetCudaDriverVersion(ctypes.byref(number)):
            versions["cuda"] = f"{number.value // 1000}.{number.value % 1000 // 10}"
        nvml.nvmlShutdown()
    except (OSError, AttributeError):
        return {}
    return versions
