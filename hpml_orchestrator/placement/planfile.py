"""The plan file: one line for each local rank, which hpml-bind finds and reads at little cost.

    file    = header, rank lines, warnings
    header  = "hpml-plan 1 ranks=" N " policy=" TEXT " whole=" ("yes" | "no") { " " KEY "=" VALUE }
              NEWLINE
    rank    = "rank " N { " " KEY "=" VALUE } NEWLINE
    warning = "warning " TEXT NEWLINE

Rank lines stand in order from 0 and have the keys of `KEYS`; readers pass over keys that they do
not know, so that one may be added without a new version. A value is text without white space, in
which `%` and two hexadecimal digits stand for a byte of UTF-8; `-` alone means that there is none.
CPUs, cores and domains are in the kernel's list format; `bind=no` means that no affinity and no
memory policy is to be set. What else the header holds is what the agent tells hpml-bind (`verify`,
`allowed`, `visible`, `omp`, `channel`, `parts`). The number after `hpml-plan` is this grammar's
version.

Importing this module imports nothing but `cpulist`; only `read` needs the plan's own classes.
"""

from __future__ import annotations

from hpml_orchestrator.placement.cpulist import cpu_list, cpu_numbers

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Optional

    from hpml_orchestrator.placement.model import Plan

__all__ = ["KEYS", "VERSION", "find", "header", "read", "write"]

VERSION = "1"
KEYS = (
    "bind",
    "gpu",
    "index",
    "uuid",
    "cpus",
    "cores",
    "numa",
    "mem",
    "nic",
    "threads",
    "workers",
    "distance",
)


def write(plan: Plan, more: Optional[Mapping[str, str]] = None) -> str:  # noqa: UP045
    """Return the text of a plan's file.

    Args:
        plan: the node's plan.
        more: what else the header tells, by key; an empty value is written as `-`.
    """
    whole = "yes" if plan.whole else "no"
    told = "".join(f" {key}={_text(value or None)}" for key, value in (more or {}).items())
    head = f"hpml-plan {VERSION} ranks={len(plan.ranks)} policy={_text(plan.policy)} whole={whole}"
    lines = [head + told]
    for one in plan.ranks:
        values = (
            "no" if plan.policy == "none" or not one.cpus else "yes",
            _text(one.gpu),
            _number(one.gpu_index),
            _text(one.gpu_uuid or None),
            cpu_list(one.cpus) or "-",
            cpu_list(one.cores) or "-",
            cpu_list(one.numa) or "-",
            _number(one.memory),
            _text(one.nic),
            str(one.threads),
            str(one.loader_workers),
            _number(one.distance),
        )
        pairs = " ".join(f"{key}={value}" for key, value in zip(KEYS, values))
        lines.append(f"rank {one.local_rank} {pairs}")
    lines += [f"warning {_text(one)}" for one in plan.warnings]
    return "\n".join(lines) + "\n"


def find(text: str, local_rank: int) -> dict[str, str]:
    """Return the values of one rank's line by key; those that are `-` are left out.

    Raises:
        ValueError: when this is no plan file of this version, or the rank is not in it.
    """
    header(text)
    begin = text.find(f"\nrank {local_rank} ")
    end = text.find("\n", begin + 1)
    if begin < 0 or end < 0:
        raise ValueError(f"the plan has no rank {local_rank}")
    found: dict[str, str] = {}
    for pair in text[begin + 1 : end].split(" ")[2:]:
        key, _, value = pair.partition("=")
        if value != "-":
            found[key] = _plain(value)
    return found


def read(text: str) -> Plan:
    """Return the plan that a file holds.

    Raises:
        ValueError: when it is no plan file of this version, or a line cannot be read.
    """
    from hpml_orchestrator.placement.model import Plan, RankPlan  # noqa: PLC0415 - see above

    head = header(text)
    ranks = []
    for rank in range(int(head["ranks"])):
        held = find(text, rank)
        ranks.append(
            RankPlan(
                local_rank=rank,
                gpu=held.get("gpu"),
                gpu_index=_optional(held, "index"),
                gpu_uuid=held.get("uuid", ""),
                cpus=cpu_numbers(held.get("cpus", "")),
                cores=cpu_numbers(held.get("cores", "")),
                numa=cpu_numbers(held.get("numa", "")),
                memory=_optional(held, "mem"),
                nic=held.get("nic"),
                threads=int(held.get("threads", "1")),
                loader_workers=int(held.get("workers", "0")),
                distance=_optional(held, "distance"),
            )
        )
    warnings = tuple(
        _plain(line.partition(" ")[2]) for line in text.split("\n") if line.startswith("warning ")
    )
    return Plan(tuple(ranks), head["policy"], head["whole"] == "yes", warnings)


def header(text: str) -> dict[str, str]:
    """Return the values of the first line by key; those that are `-` are left out.

    Raises:
        ValueError: when this is no plan file of this version.
    """
    words = text.partition("\n")[0].split(" ")
    if words[0] != "hpml-plan":
        raise ValueError("not a plan file of hpml")
    if len(words) < 2 or words[1] != VERSION:  # noqa: PLR2004 - the word and its version
        raise ValueError(f"a plan file of another version than {VERSION}: {' '.join(words[1:2])}")
    found = dict(pair.partition("=")[::2] for pair in words[2:])
    if not {"ranks", "policy", "whole"} <= set(found) or not found["ranks"].isdecimal():
        raise ValueError("the plan file's first line is damaged")
    return {key: _plain(value) for key, value in found.items() if value != "-"}


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)


def _optional(held: dict[str, str], key: str) -> int | None:
    return int(held[key]) if key in held else None


def _text(value: str | None) -> str:
    """A value without white space, control characters or anything that is not ASCII."""
    if value is None:
        return "-"
    if value == "-":
        return "%2d"
    return "".join(
        one
        if "!" <= one <= "~" and one != "%"
        else "".join(f"%{byte:02x}" for byte in one.encode("utf-8", "surrogatepass"))
        for one in value
    )


def _plain(value: str) -> str:
    """The opposite of `_text`."""
    if "%" not in value:
        return value
    first, *rest = value.split("%")
    try:
        found = first.encode()
        for part in rest:
            found += bytes((int(part[:2], 16),)) + part[2:].encode()
    except ValueError:
        raise ValueError(f"a damaged value: {value!r}") from None
    return found.decode("utf-8", "surrogatepass")
