"""A node of a run, and where its ranks ran there: `hpml topo --run`."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import typer

from hpml_orchestrator.cli.common import STANDARD_OUTPUT, print_json, print_table
from hpml_orchestrator.cli.places import print_ranks
from hpml_orchestrator.cli.toponode import print_node, write_picture
from hpml_orchestrator.cli.topopicture import boxes_of_places, boxes_of_plan
from hpml_orchestrator.errors import InputError, NotFoundError, RecordError
from hpml_orchestrator.placement.model import PLAN_COLUMNS, plan_json, plan_rows
from hpml_orchestrator.placement.planfile import read
from hpml_orchestrator.records.files import read_text
from hpml_orchestrator.runs.bound import bound_of, node_topology
from hpml_orchestrator.runs.state import run_of
from hpml_orchestrator.topology.cpulist import parse_list
from hpml_orchestrator.topology.record import topology_json

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpml_orchestrator.placement.model import Plan
    from hpml_orchestrator.records.store import Attempt, Store, Submission
    from hpml_orchestrator.runs.bound import Bound, Place
    from hpml_orchestrator.topology import Topology

__all__ = ["show_run"]

_SUFFIX = ".topology.json"
_NODES_SHOWN = 10


def show_run(store: Store, run: str, node: str, *, svg: str | None, as_json: bool) -> None:
    """Print a node of a run's last attempt with where its ranks ran, or else the plan for them.

    Args:
        store: where records live.
        run: the run's name.
        node: the node's name; that of the first rank when empty.
        svg: file to write a picture to, if any; with - it takes the tables' place.
        as_json: whether to print JSON.

    Raises:
        NotFoundError: the run has no record of any node, or of this one.
        InputError: it is an array, or the node's record is damaged.
    """
    submission = _one_run(store.resolve(run))
    attempt = run_of(submission).newest()
    if attempt is None:
        raise NotFoundError(
            f"{submission.label} has not started", hint=f"hpml status {submission.label}"
        )
    bound = bound_of(attempt)
    name = _node(attempt, submission.label, node, bound)
    topology = node_topology(attempt, name)
    if topology is None:
        raise InputError(
            "its record is damaged",
            field=f"topology of {name}",
            hint=str(attempt.directory / "nodes" / f"{name}{_SUFFIX}"),
        )
    places = [place for place in bound.places if place.node == name]
    plan, damage = _plan(attempt, name)
    title = f"{name} of {submission.label}"
    if svg is not None:
        boxes = boxes_of_places(places) if places else boxes_of_plan(plan) if plan else []
        what = ": where ranks ran" if places else ": plan" if plan else ""
        write_picture(topology, svg, title=title + what, ranks=boxes)
    warnings = [*topology.warnings, *(plan.warnings if plan and not places else ())]
    warnings += _unreadable(bound, name, plan, damage, len(places))
    if as_json:
        print_json(
            {
                "node": name,
                "seen": bool(places),
                "ranks": _ranks_json(topology, places, plan),
                "warnings": warnings,
                "topology": topology_json(topology),
            }
        )
        return
    if svg != STANDARD_OUTPUT:
        print_node(topology, title)
        _print_ranks(places, plan)
    for warning in warnings:
        typer.echo(f"warning: {warning}", err=True)


def _print_ranks(places: list[Place], plan: Plan | None) -> None:
    """Print where ranks ran, or else where they should run."""
    typer.echo("")
    if places:
        print_ranks(places)
    elif plan:
        typer.echo("no rank has recorded where it runs; the plan is:")
        print_table([column.upper() for column in PLAN_COLUMNS], plan_rows(plan))
    else:
        typer.echo("no rank has recorded where it runs")


def _one_run(submission: Submission) -> Submission:
    """Return a submission of one run; a task of an array must be named."""
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


def _node(attempt: Attempt, label: str, wanted: str, bound: Bound) -> str:
    """Return the node to show, with a note where there are others."""
    directory = attempt.directory / "nodes"
    known = sorted(path.name.removesuffix(_SUFFIX) for path in directory.glob(f"*{_SUFFIX}"))
    if not known:
        raise NotFoundError(
            f"no node of {label} has recorded its topology",
            hint="nodes do so before ranks start, and only for jobs of this hpml or newer",
        )
    if wanted and wanted not in known:
        more = ", …" if len(known) > _NODES_SHOWN else ""
        raise NotFoundError(
            f"{label} has no record of a node {wanted!r}",
            hint=f"it has {', '.join(known[:_NODES_SHOWN])}{more}",
        )
    of_ranks = [place.node for place in bound.places if place.node in known]
    name = wanted or (of_ranks or known)[0]
    if not wanted and len(known) > 1:
        typer.echo(f"note: {name} is one of {len(known)} nodes; --node shows another", err=True)
    return name


def _plan(attempt: Attempt, node: str) -> tuple[Plan | None, str]:
    """Return what the node's agent planned, if it is there; and why it cannot be read, if so."""
    path = attempt.directory / "plan" / f"{node}.txt"
    try:
        return read(read_text(path)), ""
    except NotFoundError:
        return None, ""
    except (RecordError, ValueError) as error:
        reason = str(error).replace(f"{path} ", "").replace(str(path), path.name)
        return None, reason or type(error).__name__


def _unreadable(
    bound: Bound, node: str, plan: Plan | None, damage: str, shown: int
) -> Iterator[str]:
    """Yield which records of a node cannot be read, and how many of its ranks that leaves out."""
    for proof in bound.unreadable:
        if proof.node == node:
            yield f"the proof of node {node} cannot be read: {proof.why}"
    if damage:
        yield f"the plan of node {node} cannot be read: {damage}"
    expected = [proof.expected for proof in bound.proofs if proof.node == node]
    most = max([*expected, len(plan.ranks) if plan else 0])
    if 0 < shown < most:
        yield f"{shown} of the node's {most} ranks are shown: the others left no record"


def _ranks_json(topology: Topology, places: list[Place], plan: Plan | None) -> list[dict[str, Any]]:
    if not places:
        return list(plan_json(plan)["ranks"]) if plan else []
    ranks = []
    for place in places:
        cpus = set(parse_list(place.cpus))
        cores = [core.number for core in topology.cores if cpus & set(core.cpus)]
        ranks.append({**asdict(place), "cores": cores, "nic": place.nic or None})
    return ranks
