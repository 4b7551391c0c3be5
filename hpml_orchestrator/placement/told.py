"""What people are told: before ranks begin how they are bound, then only of what is wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpml_orchestrator.errors import counted
from hpml_orchestrator.placement.cpulist import cpu_list

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hpml_orchestrator.placement.model import Plan
    from hpml_orchestrator.placement.proof import NodeProof, RankProof

__all__ = [
    "COLUMNS",
    "by_sentence",
    "node_line",
    "plan_figures",
    "plan_lines",
    "ranks_text",
    "table",
    "wrong_rows",
]

COLUMNS = ("RANK", "NODE", "GPU", "CPUS", "NUMA", "WRONG")
_ROWS_MAX = 64
_CELL_CHARS = 40
_WARNINGS_MAX = 20


def plan_figures(plan: Plan, *, sets_threads: bool) -> dict[str, Any]:
    """Return what is told of a node's plan before its ranks begin, as plain data.

    Args:
        plan: the plan.
        sets_threads: whether hpml-bind sets OMP_NUM_THREADS.
    """
    return {
        "policy": plan.policy,
        "ranks": len(plan.ranks),
        "cores": sorted({len(one.cores) for one in plan.ranks}),
        "threads": sorted({one.threads for one in plan.ranks}) if sets_threads else [],
        "warnings": list(plan.warnings),
    }


def plan_lines(figures: Sequence[tuple[str, dict[str, Any]]]) -> list[str]:
    """Return the line about how the ranks of all nodes are bound, and the nodes' warnings.

    Args:
        figures: node and `plan_figures` of each.
    """
    lines = []
    bound = [one for _, one in figures if one["policy"] != "none"]
    if bound:
        each = _each(
            (count for one in bound for count in one["cores"]),
            [count for one in bound for count in one["threads"]],
        )
        policies = ", ".join(dict.fromkeys(str(one["policy"]) for one in bound))
        ranks = sum(int(one["ranks"]) for one in bound)
        lines.append(f"{counted(ranks, 'rank')} bound ({policies}), {each}")
    warnings = by_sentence((node, one["warnings"]) for node, one in figures)
    lines += [f"warning: {one}" for one in warnings[:_WARNINGS_MAX]]
    if len(warnings) > _WARNINGS_MAX:
        lines.append(f"… and {len(warnings) - _WARNINGS_MAX} more warnings: `hpml show` has them")
    return lines


def by_sentence(said: Iterable[tuple[str, Iterable[str]]]) -> list[str]:
    """Return each sentence once, behind the node that says it, or how many do.

    >>> by_sentence([("n1", ["odd", "far"]), ("n2", ["far"])])
    ['n1: odd', 'n1 and 1 more: far']
    """
    nodes: dict[str, list[str]] = {}
    for node, sentences in said:
        for sentence in dict.fromkeys(sentences):
            nodes.setdefault(sentence, []).append(node)
    return [
        f"{where[0]}{f' and {len(where) - 1} more' * (len(where) > 1)}: {sentence}"
        for sentence, where in nodes.items()
    ]


def ranks_text(numbers: Sequence[int]) -> str:
    """Return ranks in words, such as `rank 3` or `ranks 0-2`."""
    return f"rank{'s' if len(numbers) > 1 else ''} {cpu_list(numbers)}"


def node_line(proof: NodeProof) -> str:
    """Return the line about a node of which some ranks are wrong."""
    ranks = proof.ranks
    count = counted(len(ranks), "rank")
    if len(ranks) != proof.expected:
        count = f"{len(ranks)} of {proof.expected} ranks"
    wrong = sum(bool(one.wrong) for one in ranks)
    threads = [one.threads for one in ranks if one.threads]
    each = _each((one.cores for one in ranks), threads if len(threads) == len(ranks) else ())
    return f"{proof.node}: {count} bound ({proof.policy}), {each}, {wrong} wrong"


def wrong_rows(proof: NodeProof) -> list[tuple[str, ...]]:
    """Return a row per fault of a node, its cells as in `COLUMNS`; a rank is named once."""
    rows: list[tuple[str, ...]] = []
    for one in proof.ranks:
        for place, sentence in enumerate(one.wrong):
            cells = _cells(proof.node, one) if place == 0 else ("",) * 5
            rows.append((*cells, sentence))
    rows += [("-", proof.node, "-", "-", "-", sentence) for sentence in proof.wrong]
    return rows


def table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return the lines of the table of who is wrong."""
    shown = rows[:_ROWS_MAX]
    full = [COLUMNS, *shown]
    widths = [max(len(row[place]) for row in full) for place in range(len(COLUMNS) - 1)]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths)), row[-1]])
        for row in full
    ]
    if len(rows) > len(shown):
        lines.append(f"… and {len(rows) - len(shown)} more")
    return lines


def _cells(node: str, one: RankProof) -> tuple[str, ...]:
    return (
        str(one.rank),
        node,
        one.gpu or "-",
        _short(one.cpus) or "-",
        cpu_list(one.numa) or "-",
    )


def _short(text: str) -> str:
    return text if len(text) <= _CELL_CHARS else f"{text[: _CELL_CHARS - 1]}…"


def _each(cores: Iterable[int], threads: Sequence[int]) -> str:
    """What each rank has; nothing of threads where they are not known."""
    held = _span(cores, "core")
    return f"{held} and {_span(threads, 'thread')} each" if threads else f"{held} each"


def _span(numbers: Iterable[int], word: str) -> str:
    found = sorted(set(numbers)) or [0]
    span = str(found[0]) if len(found) == 1 else f"{found[0]}-{found[-1]}"
    return f"{span} {word}{'' if found == [1] else 's'}"
