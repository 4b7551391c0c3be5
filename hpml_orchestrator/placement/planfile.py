"""The plan file: one line per local rank, which hpml-bind finds and parses quickly.

    file    = header, rank lines, warnings
    header  = "hpml-plan 1 ranks=" N " policy=" TEXT { " " KEY "=" VALUE } NEWLINE
    rank    = "rank " N { " " KEY "=" VALUE } NEWLINE
    warning = "warning " TEXT NEWLINE

The number after `hpml-plan` is the version of this grammar. Rank lines are in order from 0. Readers
skip unknown keys, so new keys need no new version. Values contain no white space: `%` and two
hexadecimal digits encode a byte of UTF-8, and `-` means a missing value. CPUs, cores and domains
are in the kernel's list format. With `bind=no` hpml-bind sets neither affinity nor memory policy.
The other values in the header are the agent's settings for hpml-bind (`verify`, `allowed`,
`visible`, `omp`, `channel`, `sigterm`, `recorder`, `gloo`, `peak`, `peak_bf16`).

Only `read` imports the classes of a plan: hpml-bind starts once per rank and does not need them.
"""

from __future__ import annotations

from hpml_orchestrator.topology.cpulist import format_list, parse_list

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpml_orchestrator.placement.model import Plan

VERSION = "1"


def write(plan: Plan, more: Mapping[str, str] | None = None) -> str:
    """Return the text of a plan's file.

    Args:
        plan: the node's plan.
        more: more header values by key; an empty value is written as `-`.
    """
    head = {
        "ranks": len(plan.ranks),
        "policy": plan.policy,
        **{key: value or None for key, value in (more or {}).items()},
    }
    lines = [f"hpml-plan {VERSION} {_pairs(head)}"]
    for rank in plan.ranks:
        values = {
            # A rank without CPUs keeps Slurm's binding; the kernel would refuse an empty mask.
            "bind": "no" if plan.policy == "none" or not rank.cpus else "yes",
            "gpu": rank.gpu,
            "index": rank.gpu_index,
            "uuid": rank.gpu_uuid or None,
            "cpus": format_list(rank.cpus) or None,
            "cores": format_list(rank.cores) or None,
            "numa": format_list(rank.numa) or None,
            "mem": rank.memory,
            "nic": rank.nic,
            "threads": rank.threads,
            "workers": rank.loader_workers,
            "distance": rank.distance,
        }
        lines.append(f"rank {rank.local_rank} {_pairs(values)}")
    lines += [f"warning {_escaped(warning)}" for warning in plan.warnings]
    return "\n".join(lines) + "\n"


def find(text: str, local_rank: int) -> dict[str, str]:
    """Return the values in a rank's line by key, without missing ones.

    Raises:
        ValueError: this is not a plan file of this version, or it lacks the rank.
    """
    header(text)
    # Searching is faster than splitting all lines, and every rank does this when it starts.
    begin = text.find(f"\nrank {local_rank} ")
    end = text.find("\n", begin + 1)
    if begin < 0 or end < 0:
        raise ValueError(f"the plan has no rank {local_rank}")
    return _values(text[begin + 1 : end].split(" ")[2:])


def header(text: str) -> dict[str, str]:
    """Return the values in the first line by key, without missing ones.

    Raises:
        ValueError: this is not a plan file of this version.
    """
    words = text.partition("\n")[0].split(" ")
    if words[0] != "hpml-plan":
        raise ValueError("not a plan file of hpml")
    if words[1:2] != [VERSION]:
        raise ValueError(f"a plan file of another version than {VERSION}: {' '.join(words[1:2])}")
    values = _values(words[2:])
    if not {"ranks", "policy"} <= set(values) or not values["ranks"].isdecimal():
        raise ValueError("the plan file's first line is damaged")
    return values


def read(text: str) -> Plan:
    """Return the plan in a plan file.

    Raises:
        ValueError: this is not a plan file of this version, or a line cannot be read.
    """
    from hpml_orchestrator.placement.model import Plan, RankPlan  # noqa: PLC0415 - see above

    head = header(text)
    ranks = []
    for rank in range(int(head["ranks"])):
        values = find(text, rank)
        numbers = {key: int(values[key]) for key in ("index", "mem", "distance") if key in values}
        ranks.append(
            RankPlan(
                local_rank=rank,
                gpu=values.get("gpu"),
                gpu_index=numbers.get("index"),
                gpu_uuid=values.get("uuid", ""),
                cpus=parse_list(values.get("cpus", "")),
                cores=parse_list(values.get("cores", "")),
                numa=parse_list(values.get("numa", "")),
                memory=numbers.get("mem"),
                nic=values.get("nic"),
                threads=int(values.get("threads", "1")),
                loader_workers=int(values.get("workers", "0")),
                distance=numbers.get("distance"),
            )
        )
    warnings = [line.partition(" ")[2] for line in text.split("\n") if line.startswith("warning ")]
    return Plan(tuple(ranks), head["policy"], tuple(map(_unescaped, warnings)))


def _pairs(values: Mapping[str, object]) -> str:
    return " ".join(
        f"{key}={'-' if value is None else _escaped(str(value))}" for key, value in values.items()
    )


def _values(pairs: list[str]) -> dict[str, str]:
    values = {}
    for pair in pairs:
        key, _, value = pair.partition("=")
        if value != "-":
            values[key] = _unescaped(value)
    return values


def _escaped(value: str) -> str:
    """Encode white space, control characters and non-ASCII characters of a value."""
    if value == "-":
        return "%2d"
    return "".join(
        letter
        if "!" <= letter <= "~" and letter != "%"
        else "".join(f"%{byte:02x}" for byte in letter.encode("utf-8", "surrogatepass"))
        for letter in value
    )


def _unescaped(value: str) -> str:
    first, *rest = value.split("%")
    try:
        data = first.encode()
        for part in rest:
            data += bytes((int(part[:2], 16),)) + part[2:].encode()
    except ValueError:
        raise ValueError(f"a damaged value: {value!r}") from None
    return data.decode("utf-8", "surrogatepass")
