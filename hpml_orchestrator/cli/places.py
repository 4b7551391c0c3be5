"""Where ranks ran, as `hpml show` prints it: a table of ranks, and what is wrong with them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from hpml_orchestrator.cli.common import print_table

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hpml_orchestrator.runs.bound import Bound, Place

__all__ = ["print_places", "print_ranks"]

_COLUMNS = tuple("RANK NODE GPU CPUS CORES NUMA DISTANCE NIC THREADS RIGHT".split())
_ALL_RANKS = 16
"""So many ranks are all shown; of more only those that are wrong."""


def print_places(bound: Bound, *, everything: bool) -> None:
    """Print a table of ranks, how many are left out of it, and what is wrong.

    Args:
        bound: what the run's records tell.
        everything: whether to show all ranks, however many there are.
    """
    places = bound.places
    if not places and not bound.proofs and not bound.unreadable:
        return
    whole = everything or len(places) <= _ALL_RANKS
    shown = [one for one in places if whole or one.right is False]
    typer.echo("")
    if shown:
        print_ranks(shown)
    left = [one for one in places if not whole and one.right is not False]
    if left:
        typer.echo(f"{_left_out(left)}; `--ranks` shows all {len(places)}")
    for sentence, wrong in _by_sentence(places):
        typer.echo(f"WRONG {_where(wrong)}: {sentence}")
    for proof in bound.proofs:
        for sentence in proof.wrong:
            typer.echo(f"WRONG node {proof.node}: {sentence}")
    _warn(bound)


def print_ranks(places: Iterable[Place]) -> None:
    """Print the table of ranks alone."""
    print_table(_COLUMNS, [_row(one) for one in places])


def _warn(bound: Bound) -> None:
    """Tell of proofs that cannot be read, and once what several nodes warn of."""
    for one in bound.unreadable:
        typer.echo(f"warning: the proof of node {one.node} cannot be read: {one.why}", err=True)
    from hpml_orchestrator.placement.told import by_sentence  # noqa: PLC0415

    for warning in by_sentence((proof.node, proof.warnings) for proof in bound.proofs):
        typer.echo(f"warning: {warning}", err=True)


def _row(one: Place) -> tuple[str, ...]:
    return (
        str(one.rank),
        one.node,
        one.gpu or "-",
        one.cpus or "-",
        "-" if one.cores is None else str(one.cores),
        ",".join(str(domain) for domain in one.numa) or "-",
        "-" if one.distance is None else str(one.distance),
        one.nic or "-",
        "-" if one.threads is None else str(one.threads),
        {True: "yes", False: "WRONG", None: "-"}[one.right],
    )


def _left_out(places: list[Place]) -> str:
    right = sum(one.right is True for one in places)
    unknown = len(places) - right
    told = [f"{right} rank{'s' * (right != 1)} where they should be"] if right else []
    told += [f"{unknown} that nobody judged"] if unknown else []
    return f"not shown: {' and '.join(told)}"


def _by_sentence(places: Iterable[Place]) -> list[tuple[str, list[Place]]]:
    """Return each sentence with the ranks that it was said of."""
    found: dict[str, list[Place]] = {}
    for place in places:
        for sentence in dict.fromkeys(place.wrong):
            found.setdefault(sentence, []).append(place)
    return list(found.items())


def _where(places: list[Place]) -> str:
    """Name ranks and their nodes, such as `rank 3 (n1)` or `ranks 0-7 (2 nodes)`."""
    from hpml_orchestrator.topology import format_list  # noqa: PLC0415

    nodes = list(dict.fromkeys(one.node for one in places))
    at = nodes[0] if len(nodes) == 1 else f"{len(nodes)} nodes"
    ranks = format_list(one.rank for one in places if one.rank >= 0) or "?"
    return f"rank{'s' * (len(places) > 1)} {ranks} ({at})"
