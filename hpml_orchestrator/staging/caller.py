"""Find the process that a command works for: the job step, script or shell, never a wrapper.

`data=$(hpml stage …)`, `timeout 600 hpml stage …` and `sh -c "hpml stage …; true"` put a process in
between that ends with the command. Staged data should last as long as the script, and the ranks of
a Slurm step, each with its own shell, should share one copy.
"""

from __future__ import annotations

import os

from hpml_orchestrator.records.owner import this_owner
from hpml_orchestrator.records.process import read_stat

_SHELLS = frozenset({"ash", "bash", "busybox", "dash", "ksh", "mksh", "sh", "zsh"})
_RUNNERS = frozenset({"conda", "mamba", "micromamba"})  # their command is a shell script
_WRAPPERS = _RUNNERS | frozenset(
    "chrt doas env find flock hatch ionice nice nohup numactl pdm pipenv pixi poetry runuser "
    "stdbuf strace su sudo taskset time timeout uv uvx xargs".split()
)
_STEP = "slurmstepd"
_SIGHUP_BIT = 1


def calling_process(pid: int | None = None, *, proc_root: str = "/proc") -> int:
    """Return the process that a process works for.

    In a Slurm job this is the step's daemon on this node, which all ranks have in common.

    Args:
        pid: its parent; that of this process when left out.
        proc_root: where to look for processes.
    """
    found = above = os.getppid() if pid is None else pid
    # All ranks of a step have its daemon among their ancestors, each below a shell of its own.
    # Taking the daemon gives them one key, so they share one copy.
    while above > 1:
        if _name(above, proc_root).startswith(_STEP):
            return above
        above = _parent(above, proc_root)
    while (above := _parent(found, proc_root)) > 1 and _helps(found, above, proc_root):
        found = above
    return found


def shell_key(pid: int) -> str:
    """Return the job key for data that a shell or batch script stages with `hpml stage`.

    A process has one key for everything it stages; a later process with the same pid has another.
    """
    return f"shell-{pid}-{this_owner('', pid).start_ticks}"


def _helps(pid: int, above: int, proc_root: str) -> bool:
    """Return whether a process only works for its parent and ends before it."""
    if _tool(pid, proc_root) in _WRAPPERS:
        return True
    if _name(pid, proc_root) not in _SHELLS:
        return False
    # A shell that forks a subshell does not call exec, so both have the same arguments.
    words = _words(pid, proc_root)
    if words and words == _words(above, proc_root):
        return True
    if _tool(above, proc_root) in _RUNNERS:
        return True
    is_command = len(words) > 1 and words[1][:1] == b"-" and words[1][-1:] == b"c"
    return is_command and not _outlives(pid, proc_root)


def _outlives(pid: int, proc_root: str) -> bool:
    stat = read_stat(pid, proc_root)
    # A command under `setsid` or `nohup` (SIGHUP ignored) is meant to survive the shell above it:
    # the data belongs to it, not to that shell.
    if stat is not None and stat.session == pid:
        return True
    for line in _bytes(f"{proc_root}/{pid}/status").splitlines():
        if line.startswith(b"SigIgn:"):
            return bool(int(line.split()[1], 16) & _SIGHUP_BIT)
    return False


def _tool(pid: int, proc_root: str) -> str:
    name = _name(pid, proc_root)
    words = _words(pid, proc_root)
    if name.startswith("python") and len(words) > 1:
        return os.fsdecode(os.path.basename(words[1]))
    return name


def _name(pid: int, proc_root: str) -> str:
    try:
        return os.path.basename(os.readlink(f"{proc_root}/{pid}/exe"))
    except OSError:  # of another user: the kernel's own name for it
        return os.fsdecode(_bytes(f"{proc_root}/{pid}/comm").strip())


def _words(pid: int, proc_root: str) -> list[bytes]:
    return _bytes(f"{proc_root}/{pid}/cmdline").split(b"\0")[:-1]


def _parent(pid: int, proc_root: str) -> int:
    stat = read_stat(pid, proc_root)
    return 0 if stat is None else stat.parent


def _bytes(path: str) -> bytes:
    try:
        with open(path, "rb") as stream:
            return stream.read()
    except OSError:
        return b""
