"""Reads small files of procfs, sysfs and cgroupfs."""

from __future__ import annotations

import os
from typing import NamedTuple

_FLAGS = os.O_RDONLY | os.O_CLOEXEC
_READ_BYTES = 1 << 16
_LONGEST = 4 << 20
_PIECE = 4000


def read(path: str) -> bytes:
    """Return the content of a file, up to 4 MiB.

    Raises:
        PermissionError: the file exists, but this user may not read it.
        OSError: the file, or the process or group behind it, is gone.
    """
    descriptor = os.open(path, _FLAGS)
    try:
        data = part = os.read(descriptor, _READ_BYTES)
        # The kernel returns a long file in pieces, each filling a page up to the last record.
        while len(part) >= _PIECE and len(data) < _LONGEST:
            part = os.read(descriptor, _READ_BYTES)
            data += part
        return data
    finally:
        os.close(descriptor)


def read_or_empty(path: str) -> bytes:
    """Return the content of a file; empty if it is gone or may not be read."""
    try:
        return read(path)
    except OSError:
        return b""


def text(path: str) -> str:
    """Return the content of a file without white space around it; empty if it cannot be read."""
    return read_or_empty(path).decode("utf-8", "replace").strip()


def subdirectories(path: str) -> list[str]:
    """Return the names of the directories in a directory; empty if it cannot be read."""
    try:
        with os.scandir(path) as entries:
            return sorted(one.name for one in entries if one.is_dir(follow_symlinks=False))
    except OSError:
        return []


def process_ids(proc: str) -> frozenset[int]:
    """Return the ids of all processes; empty without procfs."""
    try:
        return frozenset(int(name) for name in os.listdir(proc) if name.isdigit())
    except OSError:
        return frozenset()


def processes_in(group: str) -> list[int] | None:
    """Return the process ids in a control group; None if it is gone.

    A process outside of the reader's process-id namespace is 0.
    """
    try:
        return [int(word) for word in read(f"{group}/cgroup.procs").split()]
    except OSError:
        return None


class Stat(NamedTuple):
    """Fields of /proc/PID/stat; times in clock ticks (`os.sysconf("SC_CLK_TCK")` per second).

    Attributes:
        state: one letter, such as D for uninterruptible sleep.
        parent: process id of the parent.
        user: time in user mode, with that of ended children that were waited for.
        system: the same in the kernel.
        threads: number of threads.
        start: time between boot and start; with the process id it names one process.
    """

    state: str
    parent: int
    user: int
    system: int
    threads: int
    start: int


def stat(proc: str, pid: int) -> Stat | None:
    """Return the fields of /proc/PID/stat of a process; None if it is gone or hidden."""
    try:
        data = read(f"{proc}/{pid}/stat")
        # The second field may hold blanks and brackets.
        fields = data[data.rindex(b")") + 2 :].split(None, 20)
        # proc(5) numbers the fields from 1 and has the parent as the fourth.
        return Stat(
            state=fields[0].decode(),
            parent=int(fields[1]),
            user=int(fields[11]) + int(fields[13]),
            system=int(fields[12]) + int(fields[14]),
            threads=int(fields[17]),
            start=int(fields[19]),
        )
    except (OSError, ValueError, IndexError):
        return None


def uid(proc: str, pid: int) -> int:
    """Return the real user of a process; -1 if it is gone.

    The owner of /proc/PID is not used: it is root for a process that may not dump core.
    """
    _, _, rest = text(f"{proc}/{pid}/status").partition("\nUid:")
    words = rest.split(None, 1)
    return int(words[0]) if words else -1


def environment(proc: str, pid: int) -> dict[str, str]:
    """Return the environment a process was started with; empty if it may not be read."""
    data = read_or_empty(f"{proc}/{pid}/environ").decode("utf-8", "replace")
    pairs = (one.partition("=") for one in data.split("\0"))
    return {name: value for name, equals, value in pairs if equals}
