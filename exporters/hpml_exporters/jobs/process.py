"""One process as procfs shows it: who it belongs to, since when it runs, what it is called."""

from __future__ import annotations

import os
from typing import NamedTuple

from hpml_exporters.jobs import raw

__all__ = ["Stat", "environment", "parse_stat", "stat", "stepd", "uid"]

_STEPD = b"slurmstepd: ["
_ENVIRONMENT_LIMIT = 1 << 18


class Stat(NamedTuple):
    """What /proc/PID/stat says; times in clock ticks (`os.sysconf("SC_CLK_TCK")` a second).

    Attributes:
        state: one letter; Z: ended, and its parent has not asked for its status yet.
        parent: process id of the parent.
        user: in user mode, its ended children that were waited for included.
        system: the same in the kernel.
        threads: number of them.
        start: after boot, when it began: tells apart two processes of one id.
    """

    state: str
    parent: int
    user: int
    system: int
    threads: int
    start: int


def parse_stat(data: bytes) -> Stat:
    """Return the fields of /proc/PID/stat, whose second one may hold blanks and brackets.

    Raises:
        ValueError: it is no such line.
    """
    fields = data[data.rindex(b")") + 2 :].split(None, 20)
    # Numbered as in proc(5), which counts the state as the third.
    return Stat(
        state=chr(fields[0][0]),
        parent=int(fields[1]),
        user=int(fields[11]) + int(fields[13]),
        system=int(fields[12]) + int(fields[14]),
        threads=int(fields[17]),
        start=int(fields[19]),
    )


def stat(proc: str, pid: int) -> Stat | None:
    """Return a process's fields of /proc/PID/stat; None when it is gone or hidden."""
    try:
        data = raw.read_once(f"{proc}/{pid}/stat")
        return parse_stat(data) if data else None
    except (PermissionError, ValueError, IndexError):
        return None


def uid(proc: str, pid: int) -> int | None:
    """Return the real user of a process; None when it is gone.

    The owner of /proc/PID would be root for a process that may not be dumped.
    """
    try:
        data = raw.read(f"{proc}/{pid}/status") or b""
    except PermissionError:
        return None
    at = data.find(b"\nUid:")
    words = data[at + 5 : at + 60].split(None, 1) if at >= 0 else []
    return int(words[0]) if words and words[0].isdigit() else None


def stepd(proc: str, pid: int) -> tuple[str, str] | None:
    """Return job id and step of a slurmstepd by its title, None for any other process.

    Slurm writes `slurmstepd: [<jobid>.<step>]` since long before 20.11; the job id is the job's
    own number also where the control group is named by SLUID (26.05 and later).
    """
    try:
        data = raw.read(f"{proc}/{pid}/cmdline") or b""
    except PermissionError:
        return None
    if not data.startswith(_STEPD):
        return None
    inside, bracket, _ = data[len(_STEPD) : 256].partition(b"]")
    jobid, dot, step = inside.partition(b".")
    if not bracket or not dot or not jobid.isdigit():
        return None
    return jobid.decode("ascii"), step.decode("ascii", "replace")


def environment(proc: str, pid: int) -> dict[bytes, bytes] | None:
    """Return the environment a process was started with; None where we may not read it."""
    try:
        descriptor = os.open(f"{proc}/{pid}/environ", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        data = b""
        while len(data) < _ENVIRONMENT_LIMIT:
            part = os.read(descriptor, _ENVIRONMENT_LIMIT)
            if not part:
                break
            data += part
    except OSError:
        return None
    finally:
        os.close(descriptor)
    pairs = (one.partition(b"=") for one in data.split(b"\0"))
    return {name: value for name, equals, value in pairs if equals}
