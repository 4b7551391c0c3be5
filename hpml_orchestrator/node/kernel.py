"""CPU affinity and memory policy of a rank, set and read back with system calls.

A separate module with few imports, because hpml-bind loads it once per rank.
"""

from __future__ import annotations

import ctypes
import os

from hpml_orchestrator.topology.cpulist import format_list, parse_list

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
