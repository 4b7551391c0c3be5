"""Text about plans and proofs: how ranks are bound, and which are not bound as planned."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

from hpml_orchestrator.errors import counted
from hpml_orchestrator.topology.cpulist import format_list

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hpml_orchestrator.placement.model import Plan
    from hpml_orchestrator.placement.proof import NodeProof

COLUMNS = ("RANK", "NODE", "GPU", "CPUS", "NUMA", "WRONG")
_ROWS_MAX = 64
_CELL_CHARS = 40
_WARNINGS_MAX = 20


class PlanFigures(TypedDict):
    """The figures of a node's plan that `plan_lines` prints."""

    policy: str
    ranks: int  # how many the plan has
    cores: list[int]  # the different counts of cores per rank, ascending
    threads: list[int]  # the different values of OMP_NUM_THREADS; empty if hpml does not set it
    warnings: list[str]


def plan_figures(plan: Plan, *, sets_threads: bool) -> PlanFigures:
    """Return the figures of a node's plan that `plan_lines` prints, as plain data."""
    return {
        "policy": plan.policy,
        "ranks": len(plan.ranks),
        "cores": sorted({len(rank.cores) for rank in plan.ranks}),
        "threads": sorted({rank.threads for rank in plan.ranks}) if sets_threads else [],
        "warnings": list(plan.warnings),
    }


def plan_lines(figures: Sequence[tuple[str, PlanFigures]]) -> list[str]:
    """Return a line about how the ranks of all nodes are bound, and the nodes' warnings."""
    lines = []
    bound = [plan for _, plan in figures if plan["policy"] != "none"]
    if bound:
        cores = [count for plan in bound for count in plan["cores"]]
        threads = [count for plan in bound for count in plan["threads"]]
        policies = ", ".join(dict.fromkeys(plan["policy"] for plan in bound))
        ranks = sum(plan["ranks"] for plan in bound)
        lines.append(f"{counted(ranks, 'rank')} bound ({policies}), {_each(cores, threads)}")
    warnings = by_sentence((node, plan["warnings"]) for node, plan in figures)
    lines += [f"warning: {warning}" for warning in warnings[:_WARNINGS_MAX]]
    if len(warnings) > _WARNINGS_MAX:
        lines.append(f"… and {len(warnings) - _WARNINGS_MAX} more warnings: `hpml show` has them")
    return lines


def by_sentence(warnings: Iterable[tuple[str, Iterable[str]]]) -> list[str]:
    """Return each sentence once, behind its node, or its first and how many more.

    >>> by_sentence([("n1", ["odd", "far"]), ("n2", ["far"])])
    ['n1: odd', 'n1 and 1 more: far']
    """
    nodes: dict[str, list[str]] = {}
    for node, sentences in warnings:
        for sentence in dict.fromkeys(sentences):
            nodes.setdefault(sentence, []).append(node)
    lines = []
    for sentence, where in nodes.items():
        more = f" and {len(where) - 1} more" if len(where) > 1 else ""
        lines.append(f"{where[0]}{more}: {sentence}")
    return lines


def ranks_text(numbers: Sequence[int]) -> str:
    """Return ranks as text, such as `rank 3` or `ranks 0-2`."""
    return f"rank{'s' if len(numbers) > 1 else ''} {format_list(numbers)}"


def node_line(proof: NodeProof) -> str:
    """Return the line about a node on which some ranks are wrong."""
    count = counted(len(proof.ranks), "rank")
    if len(proof.ranks) != proof.expected:
        count = f"{len(proof.ranks)} of {proof.expected} ranks"
    wrong = sum(bool(rank.wrong) for rank in proof.ranks)
    threads = [rank.threads or 0 for rank in proof.ranks]
    each = _each([rank.cores for rank in proof.ranks], threads if all(threads) else [])
    return f"{proof.node}: {count} bound ({proof.policy}), {each}, {wrong} wrong"


def wrong_rows(proof: NodeProof) -> list[tuple[str, ...]]:
    """Return a row per fault of a node, its cells as in `COLUMNS`; a rank is named once."""
    rows: list[tuple[str, ...]] = []
    for rank in proof.ranks:
        cpus = rank.cpus if len(rank.cpus) <= _CELL_CHARS else f"{rank.cpus[: _CELL_CHARS - 1]}…"
        numa = format_list(rank.numa)
        cells = (str(rank.rank), proof.node, rank.gpu or "-", cpus or "-", numa or "-")
        for place, sentence in enumerate(rank.wrong):
            rows.append((*(cells if place == 0 else ("",) * len(cells)), sentence))
    return rows


def table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return the lines of the table of what is wrong."""
    shown = [COLUMNS, *rows[:_ROWS_MAX]]
    widths = [max(map(len, column)) for column in list(zip(*shown))[:-1]]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths)), row[-1]])
        for row in shown
    ]
    if len(rows) > _ROWS_MAX:
        lines.append(f"… and {len(rows) - _ROWS_MAX} more")
    return lines


def _each(cores: Sequence[int], threads: Sequence[int]) -> str:
    return (
        " and ".join(
            _span(counts, noun) for counts, noun in ((cores, "core"), (threads, "thread")) if counts
        )
        + " each"
    )


def _span(counts: Sequence[int], noun: str) -> str:
    least, most = min(counts), max(counts)
    return counted(most, noun) if least == most else f"{least}-{most} {noun}s"
