"""A node of a run, and where its ranks ran there: `hpml topo --run`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from hpml_orchestrator.cli.common import STANDARD_OUTPUT, print_json, print_table
from hpml_orchestrator.errors import InputError, NotFoundError, RecordError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpml_orchestrator.placement.model import Plan
    from hpml_orchestrator.records.store import Attempt, Store, Submission
    from hpml_orchestrator.runs.bound import Bound, Place
    from hpml_orchestrator.topology import Topology

__all__ = ["tell_run"]

_SUFFIX = ".topology.json"


def tell_run(store: Store, word: str, node: str, *, svg: str | None, as_json: bool) -> None:
    """Print a node of a run's last attempt with where its ranks ran, or what was planned for them.

    Args:
        store: where records live.
        word: names the run.
        node: names the node; that of the first rank when empty.
        svg: file to write a picture to, if any; with - it takes the tables' place.
        as_json: whether to print JSON.

    Raises:
        NotFoundError: the run has written down no node, or not this one.
        InputError: it is an array, or the node's record is damaged.
    """
    from hpml_orchestrator.runs.bound import bound_of, node_topology  # noqa: PLC0415
    from hpml_orchestrator.topology.record import topology_json  # noqa: PLC0415

    submission = _one_run(store.resolve(word))
    attempt = _attempt(store, submission)
    bound = bound_of(attempt)
    name = _node(attempt, submission.label, node, bound)
    topology = node_topology(attempt, name)
    if topology is None:
        raise InputError(
            "its record is damaged",
            field=f"topology of {name}",
            hint=str(attempt.directory / "nodes" / f"{name}{_SUFFIX}"),
        )
    places = [one for one in bound.places if one.node == name]
    plan, damage = _plan(attempt, name)
    planned = None if places else plan
    title = f"{name} of {submission.label}"
    if svg is not None:
        _draw(topology, svg, title, places, planned)
    warnings = [
        *topology.warnings,
        *(planned.warnings if planned else ()),
        *_unknown(bound, name, plan, damage, len(places)),
    ]
    if as_json:
        print_json(
            {
                "node": name,
                "seen": bool(places),
                "ranks": _ranks_json(topology, places, planned),
                "warnings": warnings,
                "topology": topology_json(topology),
            }
        )
        return
    if svg != STANDARD_OUTPUT:
        _print(topology, title, places, planned)
    for warning in warnings:
        typer.echo(f"warning: {warning}", err=True)


def _one_run(submission: Submission) -> Submission:
    from dataclasses import replace  # noqa: PLC0415

    table = submission.runs()
    if submission.index is not None or not submission.is_array():
        return submission
    if len(table) == 1:
        return replace(submission, index=table[0][0])
    raise InputError(
        f"is a job array of {len(table)} tasks, each with nodes of its own",
        field="--run",
        value=submission.sid,
        hint=f"name one: --run {submission.sid}.{table[0][0]}",
    )


def _attempt(store: Store, submission: Submission) -> Attempt:
    from hpml_orchestrator.runs.state import run_of  # noqa: PLC0415

    attempt = run_of(store, submission).newest()
    if attempt is None:
        raise NotFoundError(
            f"{submission.label} has not started", hint=f"hpml status {submission.label}"
        )
    return attempt


def _node(attempt: Attempt, label: str, wanted: str, bound: Bound) -> str:
    """Return the node to show; says which, where there are others."""
    directory = attempt.directory / "nodes"
    known = sorted(path.name.removesuffix(_SUFFIX) for path in directory.glob(f"*{_SUFFIX}"))
    if not known:
        raise NotFoundError(
            f"no node of {label} has written down its topology",
            hint="nodes do so when they are made ready, and only for jobs of this hpml or newer",
        )
    shown = ", ".join(known[:10]) + (", …" if len(known) > 10 else "")  # noqa: PLR2004
    if wanted and wanted not in known:
        raise NotFoundError(f"{label} has no record of a node {wanted!r}", hint=f"it has {shown}")
    first = [one.node for one in bound.places if one.node in known]
    found = wanted or (first or known)[0]
    if not wanted and len(known) > 1:
        typer.echo(f"note: {found} is one of {len(known)} nodes; --node shows another", err=True)
    return found


def _plan(attempt: Attempt, node: str) -> tuple[Plan | None, str]:
    """Return what the node's agent planned, if it is there; and why it cannot be read, if so."""
    from hpml_orchestrator.placement.planfile import read  # noqa: PLC0415
    from hpml_orchestrator.records.files import read_text  # noqa: PLC0415

    path = attempt.directory / "plan" / f"{node}.txt"
    try:
        return read(read_text(path)), ""
    except NotFoundError:
        return None, ""
    except (RecordError, ValueError) as error:
        told = str(error).replace(f"{path} ", "").replace(str(path), path.name)
        return None, told or type(error).__name__


def _unknown(
    bound: Bound, node: str, planned: Plan | None, damage: str, shown: int
) -> Iterator[str]:
    """Say which records of a node cannot be read, and how many of its ranks that leaves out."""
    for one in bound.unreadable:
        if one.node == node:
            yield f"the proof of node {node} cannot be read: {one.why}"
    if damage:
        yield f"the plan of node {node} cannot be read: {damage}"
    proven = [one.expected for one in bound.proofs if one.node == node]
    expected = max([*proven, len(planned.ranks) if planned else 0])
    if 0 < shown < expected:
        yield f"{shown} of the node's {expected} ranks are shown: the others left no record"


def _draw(
    topology: Topology, path: str, title: str, places: list[Place], planned: Plan | None
) -> None:
    from hpml_orchestrator.cli.rankpicture import of_places, of_plan  # noqa: PLC0415
    from hpml_orchestrator.cli.topo import write_picture  # noqa: PLC0415

    if places:
        write_picture(topology, path, title=f"{title}: where ranks ran", ranks=of_places(places))
    elif planned:
        words = f"{title}: where ranks should run ({planned.policy})"
        write_picture(topology, path, title=words, ranks=of_plan(planned))
    else:
        write_picture(topology, path, title=title)


def _ranks_json(
    topology: Topology, places: list[Place], planned: Plan | None
) -> list[dict[str, Any]]:
    from dataclasses import asdict  # noqa: PLC0415

    from hpml_orchestrator.placement.show import plan_json  # noqa: PLC0415
    from hpml_orchestrator.topology import parse_list  # noqa: PLC0415

    if not places:
        ranks: list[dict[str, Any]] = plan_json(planned)["ranks"] if planned else []
        return ranks
    found = []
    for one in places:
        cpus = set(parse_list(one.cpus))
        cores = [core.number for core in topology.cores if cpus & set(core.cpus)]
        found.append({**asdict(one), "cores": cores, "nic": one.nic or None})
    return found


def _print(topology: Topology, title: str, places: list[Place], planned: Plan | None) -> None:
    from hpml_orchestrator.cli.places import print_ranks  # noqa: PLC0415
    from hpml_orchestrator.cli.topo import print_node  # noqa: PLC0415
    from hpml_orchestrator.placement.show import PLAN_COLUMNS, plan_rows  # noqa: PLC0415

    print_node(topology, title)
    typer.echo("")
    if places:
        print_ranks(places)
    elif planned:
        typer.echo("no rank has written down where it runs; the plan is:")
        print_table([column.upper() for column in PLAN_COLUMNS], plan_rows(planned))
    else:
        typer.echo("no rank has written down where it runs")
