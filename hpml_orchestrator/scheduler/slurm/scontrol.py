r"""What `scontrol show` prints, as records: names and values, nothing interpreted.

    NodeName=node1 Arch=x86_64 CoresPerSocket=8        a record begins in the first column
       CPUAlloc=2 CPUEfctv=16 CPUTot=16                 three blanks: more fields of it
       OS=Linux 6.1.0 #1 SMP                            free text takes the rest of its line
         Nodes=node1 CPU_IDs=0-1 Mem=2000 GRES=         five blanks: a detail of it (`show job -d`)

With `-o` the same stands on one line. There free text ends where the next name in capitals and an
equals sign begin, which a comment can feign; readers of ours ask for the long form.
`scontrol show config` has lines `Name = value` instead.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Record", "parse_config", "parse_records"]

# What begins a record; `NodeName` begins a detail of a reservation, but not in the first column.
_START = re.compile(
    r"(?:NodeName|PartitionName|ReservationName|JobId|StepId|LicenseName|FrontendName)=", re.ASCII
)
_KEY = re.compile(r"(?:(?<=\s)|^)([A-Za-z][A-Za-z0-9_/:.\-\[\]]*)=", re.ASCII)
_CAPITAL = re.compile(r"(?<=\s)([A-Z][A-Za-z0-9_/:.\-\[\]]*)=", re.ASCII)
_DETAIL_INDENT = 5
# Text that users or systems write. Each is the last of its line, most are alone on it.
_FREE_LINES = frozenset(
    "OS Reason Comment AdminComment SystemComment Extra Command SubmitLine WorkDir StdErr StdIn "
    "StdOut".split()
)
_FREE_ANYWHERE = frozenset({"JobName"})
_DETAILS = {"Nodes": "CPU_IDs", "NodeName": "CoreIDs"}  # first name of a detail, and its second


@dataclass(frozen=True)
class Record:
    """One node, partition, reservation or job.

    Attributes:
        fields: values by name, as printed; the first, where a name comes twice.
        details: the same for each detail line, in order.
    """

    fields: Mapping[str, str]
    details: tuple[Mapping[str, str], ...] = field(default=())

    def __getitem__(self, name: str) -> str:
        return self.fields.get(name, "")


def parse_records(text: str) -> list[Record]:
    """Return the records of `scontrol show node` and its like; what is no record is left out."""
    chunks: list[list[str]] = []
    for line in text.splitlines():
        if _START.match(line):
            chunks.append([line])
        elif chunks:
            chunks[-1].append(line)
    return [_one_line(chunk[0]) if _is_one(chunk) else _many_lines(chunk) for chunk in chunks]


def parse_config(text: str) -> dict[str, str]:
    r"""Return the values of `scontrol show config`; the first, where a name comes twice.

    >>> parse_config("Configuration data as of now\nMaxArraySize    = 1001\n")
    {'MaxArraySize': '1001'}
    """
    found: dict[str, str] = {}
    for line in text.splitlines():
        name, equals, value = line.partition("=")
        name = name.strip()
        if equals and name and not re.search(r"\s", name):
            found.setdefault(name, value.strip())
    return found


def _is_one(chunk: list[str]) -> bool:
    return not any(line.strip() for line in chunk[1:])


def _many_lines(lines: list[str]) -> Record:
    fields: dict[str, str] = {}
    details: list[dict[str, str]] = []
    last = ""
    for line in lines:
        words = line.lstrip()
        if not words:
            continue
        # A line that begins with no name, or where none can be, goes on with the text above it.
        if not _KEY.match(words) or (line is not lines[0] and words == line):
            if last:
                fields[last] += f"\n{words.rstrip()}"
            continue
        indent = len(line) - len(words)
        found = _pairs(words)
        if indent >= _DETAIL_INDENT:
            details.append(dict(found))
            continue
        for name, value in found:
            fields.setdefault(name, value)
        last = found[-1][0]
    return Record(fields, tuple(details))


def _pairs(line: str) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    at = 0
    while match := _KEY.search(line, at):
        name = match[1]
        free = (name in _FREE_LINES and match.start() == 0) or name in _FREE_ANYWHERE
        following = None if free else _KEY.search(line, match.end())
        end = following.start() if following else len(line)
        found.append((name, line[match.end() : end].strip()))
        at = end
    return found


def _one_line(line: str) -> Record:
    starts = list(_CAPITAL.finditer(f" {line}"))
    pairs = []
    for match, following in zip(starts, [*starts[1:], None], strict=True):
        end = following.start() if following else len(line) + 1
        pairs.append((match[1], f" {line}"[match.end() : end].strip()))
    fields: dict[str, str] = {}
    details: list[dict[str, str]] = []
    inside = False
    for index, (name, value) in enumerate(pairs):
        after = pairs[index + 1][0] if index + 1 < len(pairs) else ""
        if name in _DETAILS and after == _DETAILS[name]:
            details.append({name: value})
            inside = True
        elif inside and name in {"CPU_IDs", "Mem", "GRES", "CoreIDs"}:
            details[-1][name] = value
        else:
            inside = False
            fields.setdefault(name, value)
    return Record(fields, tuple(details))
