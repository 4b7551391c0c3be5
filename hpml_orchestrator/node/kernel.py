"""What a process asks the kernel about where it runs: affinity and memory policy.

Every rank's start pays for what is imported here: `os`, and `_ctypes` to set a memory policy, for
which Python has no function. `import ctypes` costs ten times as much, and is for interpreters whose
`_ctypes` is another.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["child_cpus", "memory_policy", "prefer_memory", "start_ticks"]

_PREFERRED = 1  # MPOL_PREFERRED: from there while it has some, else from elsewhere
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237, "riscv64": 237, "ppc64le": 261}
_WORD_BITS = 64
_WORD_BYTES = 8
_STAT_START = 19  # field 22 of /proc/PID/stat, counted after the name in parentheses
_READ_BYTES = 65_536  # a list of all 8192 CPUs that a kernel can have is shorter


def prefer_memory(domain: int) -> str:
    """Prefer the memory of a NUMA domain, for this process and its children.

    Preferred and not bound: a process that is bound to memory outside of its cpuset is killed.

    Returns:
        The empty text, or why it could not be done: the domain is not in the job's cpuset (EINVAL),
        or a container's seccomp filter refuses the call (EPERM, ENOSYS).
    """
    number = _SET_MEMPOLICY.get(os.uname().machine)
    if number is None or sys.maxsize < 1 << (_WORD_BITS - 2):
        return f"memory policy on {os.uname().machine}: its system call is not known"
    words = domain // _WORD_BITS + 1
    mask = (1 << domain).to_bytes(words * _WORD_BYTES, "little")
    try:
        call, error_number = _system_call()
        # The kernel looks at one bit less than it is told of.
        if call(number, _PREFERRED, mask, words * _WORD_BITS + 1) == 0:
            return ""
        reason = os.strerror(error_number())
    except (ImportError, AttributeError, OSError) as error:
        reason = str(error)
    return f"memory of NUMA domain {domain} cannot be preferred: {reason}"


def _system_call() -> tuple[Callable[..., int], Callable[[], int]]:
    """Return the C library's `syscall`, and what returns `errno` after it."""
    try:
        import _ctypes  # noqa: PLC0415

        class Function(_ctypes.CFuncPtr):
            """A function of C that returns an int and keeps errno."""

            _flags_ = _ctypes.FUNCFLAG_CDECL | _ctypes.FUNCFLAG_USE_ERRNO

        program = _ctypes.dlopen(None, 0)  # type: ignore[arg-type] # as ctypes.CDLL(None) does
        return Function(_ctypes.dlsym(program, "syscall")), _ctypes.get_errno
    except (ImportError, AttributeError, TypeError):
        import ctypes  # noqa: PLC0415

        return ctypes.CDLL(None, use_errno=True).syscall, ctypes.get_errno


def memory_policy() -> str | None:
    """Return this process's memory policy in the kernel's words, such as `default` or `prefer:3`.

    None where it is not told. The first line of numa_maps names the policy of the process, since no
    page of the interpreter's program file has one of its own.
    """
    try:
        words = _read("/proc/self/numa_maps", 256).split()  # so short a read makes one line
    except OSError:
        return None
    return words[1] if len(words) > 1 else None


def start_ticks() -> int | None:
    """Return when this process started, in clock ticks since boot; None where it is not told.

    Process id and start together name a process for good: execs change neither.
    """
    try:
        return int(_read("/proc/self/stat", 4096).rpartition(")")[2].split()[_STAT_START])
    except (OSError, ValueError, IndexError):
        return None


def child_cpus() -> frozenset[int]:
    """Return the CPUs that a child may use which this process forks now.

    Raises:
        OSError: no child can be forked.
        ValueError: the child ended before it told.
    """
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(theirs, " ".join(map(str, os.sched_getaffinity(0))).encode())
        finally:
            os._exit(0)
    os.close(theirs)
    told = b""
    while True:
        part = os.read(ours, _READ_BYTES)
        if not part:
            break
        told += part
    os.close(ours)
    os.waitpid(child, 0)
    if not told:
        raise ValueError("a forked child told no CPUs")
    return frozenset(map(int, told.split()))


def _read(path: str, size: int) -> str:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, size).decode("ascii", "replace")
    finally:
        os.close(descriptor)
