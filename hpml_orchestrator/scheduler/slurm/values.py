"""Values as Slurm prints them: counts, sizes, times, TRES, GRES, states of nodes.

    memory      62.50G  1000M  16000 (MiB)  1000Mc  1000Mn  16?
    duration    1-02:03:04  1-02:03  1-02  02:03:04  03:04  04.123  30 (a bare number: see there)
    TRES        cpu=16,mem=62.50G,node=1,gres/gpu=4,gres/gpu:a100=4
    GRES        gpu:a100:4(S:0-1),gpu:1g.10gb:7(IDX:0,2-6),craynetwork:no_consume:4K
    state       IDLE+DRAIN  DOWN*  idle~  MIXED+CLOUD+POWERING_UP#

For "nothing" and "no limit" Slurm has many words, all of which are None here. What cannot be read
is None, or left out: no reader of these is stopped by a word that a later version has invented.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from hpml_orchestrator.scheduler.cluster import Gres

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "names",
    "node_states",
    "nothing",
    "parse_bytes",
    "parse_count",
    "parse_duration",
    "parse_gres",
    "parse_memory",
    "parse_tres",
    "parse_version",
    "plain",
    "split_outside",
]

_NOTHING = frozenset(
    "(null) null none n/a n/s unknown unlimited infinite infinity invalid not_set partition_limit "
    "-1 notset".split()
)
_UNSET = 2**63  # NO_VAL64 and INFINITE64 lie just below 2**64; NO_VAL and INFINITE below 2**32
_UNSET_32 = frozenset({2**32 - 1, 2**32 - 2})
_SIZE = re.compile(r"(\d{1,20}(?:\.\d{1,20})?)([KMGTPE]?)(?:i?B)?[cn?]?", re.ASCII | re.IGNORECASE)
_COUNT = re.compile(r"(\d{1,20})(?:\.\d{1,20})?([KMGTPE]?)", re.ASCII | re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5, "E": 6}
_MIB = 1024 * 1024
_CLOCK = re.compile(
    r"(?:(\d{1,9})-)?(\d{1,12})(?::(\d{1,9}))?(?::(\d{1,9}))?(\.\d{1,9})?", re.ASCII
)
_DAY, _HOUR, _MINUTE = 86_400, 3_600, 60
_MARKS = {
    "*": "NOT_RESPONDING",
    "~": "POWERED_DOWN",
    "#": "POWERING_UP",
    "!": "POWER_DOWN",
    "%": "POWERING_DOWN",
    "$": "MAINTENANCE",
    "@": "REBOOT_REQUESTED",
    "^": "REBOOT_ISSUED",
    "-": "PLANNED",
}


def nothing(text: str) -> bool:
    """Return whether that is one of Slurm's words for nothing, or for no limit."""
    text = text.strip().lower()
    return not text or text in _NOTHING


def plain(text: str) -> str:
    """Return the text, empty where it is one of Slurm's words for nothing."""
    return "" if nothing(text) else text.strip()


def names(text: str) -> tuple[str, ...]:
    """Return the names of a comma-separated list; none for a word for nothing."""
    return tuple(name.strip() for name in plain(text).split(",") if name.strip())


def parse_count(text: str) -> int | None:
    """Return a number, None for no limit and for what is no number; K is 1024.

    >>> parse_count("4K"), parse_count("UNLIMITED"), parse_count("4294967295")
    (4096, None, None)
    """
    found = _COUNT.fullmatch(text.strip())
    if not found:
        return None
    count = int(found[1])
    if count >= _UNSET or count in _UNSET_32:
        return None
    return count * int(1024 ** _POWERS[found[2].upper()])


def parse_bytes(text: str, unit: str = "M") -> int | None:
    """Return bytes of a size; `unit` is that of a bare number, empty for bytes.

    >>> parse_bytes("1.5K"), parse_bytes("2"), parse_bytes("0", ""), parse_bytes("n/a")
    (1536, 2097152, 0, None)
    """
    found = _SIZE.fullmatch(text.strip())
    if not found:
        return None
    value = float(found[1])
    if value >= _UNSET or int(value) in _UNSET_32:
        return None
    return int(value * 1024 ** _POWERS[(found[2] or unit).upper()])


def parse_memory(text: str) -> int | None:
    """Return MiB of a size; None for no limit and for what is no size.

    >>> parse_memory("62.50G"), parse_memory("1000Mc"), parse_memory("16000")
    (64000, 1000, 16000)
    """
    size = parse_bytes(text)
    return None if size is None else size // _MIB


def parse_duration(text: str, *, bare: int = _MINUTE) -> float | None:
    """Return seconds of a time span; None for no limit and for what is no time span.

    Args:
        text: such as `1-02:03:04`.
        bare: seconds that a number without any colon counts for.

    >>> parse_duration("1-00:00:00"), parse_duration("30:00"), parse_duration("UNLIMITED")
    (86400.0, 1800.0, None)
    >>> parse_duration("00:01.250"), parse_duration("7", bare=1)
    (1.25, 7.0)
    """
    found = _CLOCK.fullmatch(text.strip())
    if not found:
        return None
    days, *fields, fraction = found.groups()
    first, second, third = (int(field or 0) for field in fields)
    if days is not None:
        seconds = int(days) * _DAY + first * _HOUR + second * _MINUTE + third
    elif fields[2] is not None:
        seconds = first * _HOUR + second * _MINUTE + third
    elif fields[1] is not None:
        seconds = first * _MINUTE + second
    else:
        if first in _UNSET_32:
            return None
        seconds = first * (1 if fraction else bare)
    return seconds + float(fraction or 0)


def parse_tres(text: str) -> dict[str, int]:
    """Return counts by kind, memory in MiB; what has no limit, or no number, is left out.

    >>> parse_tres("cpu=16,mem=62.50G,gres/gpu:a100=4")
    {'cpu': 16, 'mem': 64000, 'gres/gpu:a100': 4}
    """
    found: dict[str, int] = {}
    for part in text.split(","):
        kind, equals, value = part.strip().rpartition("=")
        count = parse_memory(value) if kind == "mem" else parse_count(value)
        if equals and kind and count is not None:
            found[kind] = count
    return found


def split_outside(text: str) -> Iterator[str]:
    """Yield the parts between commas that are in no brackets.

    >>> list(split_outside("gpu:2(IDX:0,3),node[1,3]"))
    ['gpu:2(IDX:0,3)', 'node[1,3]']
    """
    depth, part = 0, ""
    for char in text:
        if char in "([":
            depth += 1
        elif char in ")]":
            depth = max(depth - 1, 0)
        if char == "," and not depth:
            yield part
            part = ""
        else:
            part += char
    yield part


def parse_gres(text: str) -> tuple[Gres, ...]:
    """Return generic resources of one node; what is configured twice is added up.

    >>> parse_gres("gpu:a100:4(S:0-1),gpu:2")
    (Gres(name='gpu', kind='a100', count=4), Gres(name='gpu', kind='', count=2))
    """
    found: dict[tuple[str, str], int] = {}
    for part in split_outside(text):
        name, *words = part.partition("(")[0].strip().removeprefix("gres/").split(":")
        if nothing(name):
            continue
        words = [word for word in words if word != "no_consume"]
        last = parse_count(words[-1]) if words else None
        count = 1 if last is None else last
        kind = ":".join(words if last is None else words[:-1])
        found[name, kind] = found.get((name, kind), 0) + count
    return tuple(Gres(name, kind, count) for (name, kind), count in found.items())


def node_states(text: str) -> frozenset[str]:
    """Return base state and flags of a node, upper case; its marks as the flags they stand for.

    >>> sorted(node_states("DOWN*+CLOUD")), sorted(node_states("idle~"))
    (['CLOUD', 'DOWN', 'NOT_RESPONDING'], ['IDLE', 'POWERED_DOWN'])
    """
    found: set[str] = set()
    for part in re.split(r"[+,\s]+", text.strip().upper()):
        word = part.rstrip("".join(_MARKS))
        found |= {_MARKS[mark] for mark in part[len(word) :]}
        if word:
            found.add(word)
    return frozenset(found)


def parse_version(text: str) -> tuple[int, ...]:
    """Return the version in such as `slurm-wlm 22.05.8` or `26.05.0-0rc1`; () where there is none.

    >>> parse_version("slurm 24.11.5-1.el9")
    (24, 11, 5)
    """
    found = re.search(r"\d{2}\.\d{1,2}(?:\.\d{1,4})?", text, re.ASCII)
    return tuple(int(part) for part in found[0].split(".")) if found else ()
