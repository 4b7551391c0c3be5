"""Times, sizes and lists as text for people."""

from __future__ import annotations

import re
import signal
import time
from datetime import datetime
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

ENDING_WORDS = {
    "TIMEOUT": "time limit",
    "PREEMPTED": "preempted",
    "REQUEUED": "requeued",
    "NODE_FAIL": "a node failed",
    "OUT_OF_MEMORY": "out of memory",
}
"""The end of an attempt in words, by state in Slurm."""

# `slurmstepd: error: StepId=19.1 exceeded memory limit (3319001088 > 3232759808), being killed`
# and `slurmstepd: error: Detected 1 oom_kill event in StepId=5.0`, up to 22.05 with a hyphen. If
# several slurmd run on a machine, the program name contains the node.
_MEMORY = re.compile(
    r"slurmstepd(?:-(?P<node>\S{1,255}))?: error: "
    r"(?:Detected \d{1,9} oom[-_]kill event\S{0,9} in )?"
    r"(?:StepId=|JobId=|Step |Job )(?P<job>\d{1,12})\b\S{0,32}"
    r"(?: exceeded memory limit \((?P<used>\d{1,18}) > (?P<limit>\d{1,18})\))?"
)
_MINUTE, _HOUR, _DAY = 60, 3600, 86_400
_KIBI = 1024
_PREFIXES = ("", "k", "M", "G", "T", "P")
_RATE_STEP = 999.5  # larger values would be rounded to 1000


def seconds_text(seconds: float) -> str:
    """Return a duration for people.

    >>> seconds_text(3725), seconds_text(4)
    ('1:02:05', '4 s')
    """
    whole = int(seconds)
    if whole < _MINUTE:
        return f"{whole} s"
    days, rest = divmod(whole, _DAY)
    hours, rest = divmod(rest, _HOUR)
    minutes, rest = divmod(rest, _MINUTE)
    clock = f"{hours}:{minutes:02d}:{rest:02d}" if hours or days else f"{minutes}:{rest:02d}"
    return f"{days} d {clock}" if days else clock


def duration_text(seconds: float) -> str:
    """Return a duration with three digits below a minute.

    >>> duration_text(0.0123), duration_text(5.6), duration_text(75)
    ('12.3 ms', '5.6 s', '1:15')
    """
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    return f"{seconds:.3g} s" if seconds < _MINUTE else seconds_text(seconds)


def age_text(seconds: float) -> str:
    """Return an age in whole units of the largest suitable unit.

    >>> age_text(90000), age_text(7200), age_text(0)
    ('1 day', '2 hours', '0 seconds')
    """
    units = {"day": _DAY, "hour": _HOUR, "minute": _MINUTE}
    fitting = [(name, unit) for name, unit in units.items() if seconds >= unit]
    name, unit = fitting[0] if fitting else ("second", 1)
    return counted(int(seconds // unit), name)


def elapsed_text(started: float | None, ended: float | None) -> str:
    """Return the time between two moments, by default until now; `-` without a start."""
    if not started:
        return "-"
    return seconds_text(max(0, (ended or time.time()) - started))


def clock_text(seconds: float) -> str:
    """Return a moment, in seconds since the epoch, as local date and time."""
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def zoned_text(seconds: float) -> str:
    """Return a moment, in seconds since the epoch, as local date and time with the zone."""
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")


def human_bytes(count: float) -> str:
    """Return a size in bytes in a suitable unit.

    >>> human_bytes(1536), human_bytes(99.6)
    ('1.5 KiB', '100 bytes')
    """
    if count < _KIBI:
        return f"{count:.0f} bytes"
    size = float(count)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        size /= _KIBI
        if size < _KIBI:
            return f"{size:.1f} {unit}"
    return f"{size / _KIBI:.1f} PiB"


def rate_text(value: float, unit: str) -> str:
    """Return a rate with three digits and a decimal prefix.

    >>> rate_text(4.5e12, "FLOP/s"), rate_text(20, "FLOP/s"), rate_text(9219.7, "1/s")
    ('4.5 TFLOP/s', '20 FLOP/s', '9.22 k/s')
    """
    steps = 0
    while value >= _RATE_STEP and steps < len(_PREFIXES) - 1:
        value, steps = value / 1000, steps + 1
    return f"{value:.3g} {_PREFIXES[steps]}{unit.removeprefix('1')}".rstrip()


def exact_bytes(count: int) -> str:
    """Return a size in a suitable unit and in bytes.

    >>> exact_bytes(1536), exact_bytes(12)
    ('1.5 KiB (1536 bytes)', '12 bytes')
    """
    return f"{human_bytes(count)} ({count} bytes)" if count >= _KIBI else human_bytes(count)


def first_few(names: Sequence[str], most: int = 8, *, none: str = "none") -> str:
    """Return names as part of a sentence, at most the first few.

    >>> first_few(["a", "b", "c"]), first_few(["a", "b", "c"], 1), first_few([])
    ('a, b and c', 'a and 2 more', 'none')
    """
    if not names:
        return none
    shown = [*names[:most]]
    if len(names) > most:
        shown.append(f"{len(names) - most} more")
    return " and ".join(filter(None, (", ".join(shown[:-1]), shown[-1])))


def printable(text: str) -> str:
    r"""Return a text on one line, without control characters for a terminal.

    >>> printable("a\x1b[31mb\nc")
    'a[31mb c'
    """
    return "".join(char for char in re.sub(r"\s", " ", text) if char.isprintable())


def printable_lines(text: str) -> str:
    """Return text with `printable` lines, so that names in it cannot control a terminal."""
    return "\n".join(map(printable, text.split("\n")))


def memory_fault(output: str, job_id: str) -> str:
    """Return a sentence if a job's output shows that Slurm ended it out of memory, else empty.

    >>> line = "slurmstepd-n2: error: StepId=5.1 exceeded memory limit (3072 > 2048), being killed"
    >>> memory_fault(line, "5")
    'out of memory on n2, 3.0 KiB of at most 2.0 KiB'
    """
    for match in _MEMORY.finditer(output):
        node, used, limit = match["node"], int(match["used"] or 0), int(match["limit"] or 0)
        if match["job"] == job_id and (limit or "Detected" in match[0]):
            figures = f", {human_bytes(used)} of at most {human_bytes(limit)}" if limit else ""
            return f"{ENDING_WORDS['OUT_OF_MEMORY']}{f' on {node}' if node else ''}{figures}"
    return ""


def signal_name(number: int) -> str:
    """Return the name of a signal; for most real-time signals the number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
