"""The environment of a node's agent and ranks: variables, options, CPU affinity and memory."""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import socket
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hpml_orchestrator.records.job import NodeJob, SiteLimits
from hpml_orchestrator.topology.model import format_list, parse_list

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hpml_orchestrator.records.job import Job, Stage

ELSEWHERE = "HPML_STAGE_ELSEWHERE"
"""Variable with JSON: by node, the paths of staged data that differ from the first node's."""

_RANGE = r"\d{1,9}(?:-\d{1,9})?"


def node_name(environment: Mapping[str, str] = os.environ) -> str:
    """Return this node's name in Slurm; without Slurm the short host name."""
    return environment.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]


def job_key(environment: Mapping[str, str]) -> str:
    """Return `<cluster>-<job id>`, which the batch script sets as HPML_JOB_KEY."""
    cluster = environment.get("SLURM_CLUSTER_NAME") or "slurm"
    return environment.get("HPML_JOB_KEY") or f"{cluster}-{environment.get('SLURM_JOB_ID', '0')}"


def integer(environment: Mapping[str, str], name: str, default: int) -> int:
    """Return a variable as a number; the default if it is not set or not a number."""
    text = environment.get(name, "")
    return int(text) if text.isdecimal() else default


def node_index(environment: Mapping[str, str]) -> tuple[int, int]:
    """Return this node's index in the job and the number of nodes."""
    nodes = integer(environment, "SLURM_NNODES", 1)
    return integer(environment, "SLURM_NODEID", 0), max(1, nodes)


def node_names(text: str) -> list[str]:
    """Return the names in a job's node list; empty if it cannot be read.

    Does not use `scheduler`, which needs a library: nodes may have only Python.

    >>> node_names("n[08-10,12],login"), node_names("n[1-"), node_names("")
    (['n08', 'n09', 'n10', 'n12', 'login'], [], [])
    """
    names: list[str] = []
    for entry in re.findall(r"(?:[^,\[\]]|\[[^\]]*\]?)+", text):
        match = re.fullmatch(rf"([^\[\]]*)(?:\[({_RANGE}(?:,{_RANGE})*)\])?([^\[\]]*)", entry)
        if match is None:
            return []
        prefix, ranges, suffix = match.groups()
        if ranges is None:
            names.append(prefix)
            continue
        for part in ranges.split(","):
            first, _, last = part.partition("-")
            numbers = range(int(first), int(last or first) + 1)
            names += [f"{prefix}{number:0{len(first)}d}{suffix}" for number in numbers]
    return names


# The options of an agent: from `agent.json` and from the batch script's shell.


@dataclass(frozen=True)
class AgentOptions:
    """The options of an agent."""

    attempt: Path  # the attempt's directory
    job: Job
    site: SiteLimits = field(default_factory=SiteLimits)
    bases: Mapping[str, str] = field(default_factory=dict)  # directories for `shm` and `local`
    job_directories: Sequence[str] = ()  # those in which the job gets an empty directory
    # Source and target of each result to copy back, most important first
    collect: Sequence[tuple[str, str]] = ()

    def at_its_directory(self, stage: Stage) -> Stage:
        """Return an entry of `stage` with `shm` or `local` replaced by this node's directory."""
        return replace(stage, target=self.bases.get(stage.target, stage.target))


def parse_options(argv: Sequence[str]) -> AgentOptions:
    """Return the options in `agent ATTEMPT SUBMISSION …`; the help of each describes it.

    Raises:
        RecordError: the submission's `agent.json` cannot be read.
    """
    parser = argparse.ArgumentParser(prog="hpml-node.pyz agent", allow_abbrev=False)
    parser.add_argument("attempt", type=Path, help="the attempt's directory")
    parser.add_argument("submission", type=Path, help="the directory of agent.json")
    for name in ("shm", "local"):
        parser.add_argument(f"--{name}", metavar="DIRECTORY", help=f"what target {name} means here")
    parser.add_argument(
        "--job-directory",
        choices=("shm", "local"),
        action="append",
        default=[],
        help="make an empty directory of the job there",
    )
    parser.add_argument(
        "--collect",
        metavar=("SOURCE", "TARGET"),
        nargs=2,
        action="append",
        default=[],
        help="copy a result back",
    )
    given = parser.parse_args(argv)
    read = NodeJob.read(given.submission)
    bases = {name: path for name in ("shm", "local") if (path := getattr(given, name))}
    collect = [(source, target) for source, target in given.collect]
    return AgentOptions(given.attempt, read.job, read.site, bases, given.job_directory, collect)


# CPU affinity and memory policy of a rank, set and read back with system calls.

_PREFERRED = 1  # MPOL_PREFERRED: use memory of that domain while available
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237, "riscv64": 237, "ppc64le": 261}
_WORD_BITS = 64


def set_cpus(cpus: str) -> str:
    """Set this process's CPU affinity and read it back.

    The kernel silently ignores CPUs outside the cpuset. If a rank would get only some of its CPUs,
    possibly far too few, it keeps its initial affinity.

    Args:
        cpus: in the kernel's list format.

    Returns:
        An error message; empty on success.
    """
    wanted = frozenset(parse_list(cpus))
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, wanted)
        actual = os.sched_getaffinity(0)
        if actual == wanted:
            return ""
        os.sched_setaffinity(0, before)
        refused = f"allows only {format_list(actual)}"
    except (OSError, ValueError, OverflowError) as error:
        refused = f"refuses them: {getattr(error, 'strerror', None) or error}"
    started = f"the rank was started with {format_list(before)}"
    return f"the plan assigns CPUs {cpus or 'none'}, the kernel {refused}; {started}"


def prefer_memory(domain: int) -> str:
    """Prefer the memory of a NUMA domain, for this process and its children.

    Prefer instead of bind: a process bound to memory outside its cpuset is killed.

    Returns:
        An error message, empty on success: the domain is not in the job's cpuset (EINVAL), or a
        container's seccomp filter refuses the call (EPERM, ENOSYS).
    """
    machine = os.uname().machine
    if machine not in _SET_MEMPOLICY:
        return f"memory policy on {machine}: its system call is not known"
    words = domain // _WORD_BITS + 1
    mask = (1 << domain).to_bytes(words * _WORD_BITS // 8, "little")
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    # The kernel reads one bit less than the given length.
    if syscall(_SET_MEMPOLICY[machine], _PREFERRED, mask, words * _WORD_BITS + 1) == 0:
        return ""
    reason = os.strerror(ctypes.get_errno())
    return f"memory of NUMA domain {domain} cannot be preferred: {reason}"


def memory_policy() -> str | None:
    """Return this process's memory policy as in numa_maps, such as `default` or `prefer:3`.

    None if it cannot be read. The first line of numa_maps is for the interpreter's program file,
    which has no policy of its own, so the line shows the policy of the process.
    """
    try:
        with open("/proc/self/numa_maps", "rb", buffering=0) as stream:
            return stream.read(256).decode("ascii", "replace").split()[1]
    except (OSError, IndexError):
        return None


def child_cpus() -> frozenset[int]:
    """Return the CPUs allowed to a forked child.

    Raises:
        OSError: fork failed.
        ValueError: the child ended without an answer.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(writer, format_list(os.sched_getaffinity(0)).encode())
        finally:
            # No clean-up in the child: buffers and exit handlers belong to the parent.
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as stream:
        answer = stream.read()
    os.waitpid(child, 0)
    if not answer:
        raise ValueError("a forked child reported no CPUs")
    return frozenset(parse_list(answer.decode()))
