"""Which process a command works for: the shell or script that called it, and not a helper of that.

`data=$(hpml stage …)` and `timeout 600 hpml stage …` put a process in between that is gone when
the command is. What was staged shall last as long as the script does.
"""

from __future__ import annotations

import os

__all__ = ["calling_process"]

_SHELLS = frozenset({"ash", "bash", "busybox", "dash", "ksh", "mksh", "sh", "zsh"})
_WRAPPERS = frozenset(
    "chrt doas env find flock ionice nice nohup numactl runuser setsid stdbuf strace su sudo "
    "taskset time timeout xargs".split()
)
_PARENT_AFTER_NAME = 1  # field 4 of /proc/<pid>/stat, counted after "pid (name)"


def calling_process(pid: int | None = None, *, proc_root: str = "/proc") -> int:
    """Return the process that a process works for.

    Args:
        pid: its parent; that of this process when left out.
        proc_root: where to look for processes.
    """
    found = os.getppid() if pid is None else pid
    while True:
        above = _parent(found, proc_root)
        if above <= 1:
            return found
        if not (_name(found, proc_root) in _WRAPPERS or _is_subshell(found, above, proc_root)):
            return found
        found = above


def _is_subshell(pid: int, above: int, proc_root: str) -> bool:
    """Say whether a process is a fork of the shell above it: the same program and words."""
    if _name(pid, proc_root) not in _SHELLS:
        return False
    words = _bytes(f"{proc_root}/{pid}/cmdline")
    return bool(words) and words == _bytes(f"{proc_root}/{above}/cmdline")


def _name(pid: int, proc_root: str) -> str:
    try:
        return os.path.basename(os.readlink(f"{proc_root}/{pid}/exe"))
    except OSError:  # of another user: the kernel's own name for it
        return os.fsdecode(_bytes(f"{proc_root}/{pid}/comm").strip())


def _parent(pid: int, proc_root: str) -> int:
    _, _, rest = _bytes(f"{proc_root}/{pid}/stat").rpartition(b")")
    fields = rest.split()
    try:
        return int(fields[_PARENT_AFTER_NAME])
    except (IndexError, ValueError):
        return 0


def _bytes(path: str) -> bytes:
    try:
        with open(path, "rb") as stream:
            return stream.read()
    except OSError:
        return b""
