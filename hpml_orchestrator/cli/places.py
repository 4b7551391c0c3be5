"""Where ranks ran, as `hpml show` prints it: a table of ranks, and what is wrong with them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from hpml_orchestrator.cli.common import print_table
from hpml_orchestrator.errors import counted
from hpml_orchestrator.placement.report import by_sentence
from hpml_orchestrator.topology.cpulist import format_list

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hpml_orchestrator.runs.bound import Bound, Place

__all__ = ["COLUMNS", "print_places", "print_ranks"]

COLUMNS = tuple("RANK NODE GPU CPUS CORES NUMA DISTANCE NIC THREADS STATUS".split())
_ALL_RANKS = 16
"""So many ranks are all shown; of more only those that are wrong."""


def print_places(bound: Bound, *, everything: bool) -> None:
    """Print a table of ranks, how many are left out of it, and what is wrong.

    Args:
        bound: the records of the run's binding.
        everything: whether to show all ranks, however many there are.
    """
    places = bound.places
    if not places and not bound.proofs and not bound.unreadable:
        return
    whole = everything or len(places) <= _ALL_RANKS
    shown = [place for place in places if whole or place.right is False]
    typer.echo("")
    if shown:
        print_ranks(shown)
    left = [place.right for place in places if not whole and place.right is not False]
    if left:
        counts = [(left.count(True), "bound as planned"), (left.count(None), "not checked")]
        text = " and ".join(f"{counted(n, 'rank')} {status}" for n, status in counts if n)
        typer.echo(f"not shown: {text}; `--ranks` shows all {len(places)}")
    _print_wrong(places)
    for proof in bound.proofs:
        for sentence in proof.wrong:
            typer.echo(f"WRONG node {proof.node}: {sentence}")
    for unreadable in bound.unreadable:
        typer.echo(
            f"warning: the proof of node {unreadable.node} cannot be read: {unreadable.why}",
            err=True,
        )
    for warning in by_sentence((proof.node, proof.warnings) for proof in bound.proofs):
        typer.echo(f"warning: {warning}", err=True)


def print_ranks(places: Iterable[Place]) -> None:
    """Print the table of ranks alone."""
    rows = [
        (
            place.rank,
            place.node,
            place.gpu or None,
            place.cpus or None,
            place.cores,
            ",".join(map(str, place.numa)) or None,
            place.distance,
            place.nic or None,
            place.threads,
            {True: "ok", False: "WRONG", None: None}[place.right],
        )
        for place in places
    ]
    print_table(COLUMNS, [["-" if cell is None else str(cell) for cell in row] for row in rows])


def _print_wrong(places: Iterable[Place]) -> None:
    """Print each sentence about what is wrong once, behind the ranks that it is about."""
    wrong: dict[str, list[Place]] = {}
    for place in places:
        for sentence in dict.fromkeys(place.wrong):
            wrong.setdefault(sentence, []).append(place)
    for sentence, those in wrong.items():
        typer.echo(f"WRONG {_where(those)}: {sentence}")


def _where(places: list[Place]) -> str:
    """Return ranks and their nodes, such as `rank 3 (n1)` or `ranks 0-7 (2 nodes)`."""
    nodes = list(dict.fromkeys(place.node for place in places))
    at = nodes[0] if len(nodes) == 1 else f"{len(nodes)} nodes"
    ranks = format_list(place.rank for place in places if place.rank >= 0) or "?"
    return f"rank{'s' * (len(places) > 1)} {ranks} ({at})"
