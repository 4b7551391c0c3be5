"""Command `show`: a run, its summary and where its ranks ran."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from hpml_orchestrator.cli.common import (
    JsonOption,
    RunWord,
    chosen_site,
    print_json,
    print_table,
    refuse_with,
    store_of,
)
from hpml_orchestrator.diagnosis.diagnose import diagnose
from hpml_orchestrator.errors import HpmlError, InputError, RecordError, counted
from hpml_orchestrator.placement.verify import by_sentence
from hpml_orchestrator.runs.facts import gather
from hpml_orchestrator.runs.follow import refuse_failed
from hpml_orchestrator.runs.history import read_history
from hpml_orchestrator.runs.reporting.description import describe, read_software
from hpml_orchestrator.runs.reporting.description import requirements as requirements_of
from hpml_orchestrator.runs.reporting.summary import Summary, read_links, summarise
from hpml_orchestrator.runs.reporting.text import array_lines, summary_lines, task_rows
from hpml_orchestrator.runs.state import (
    damage_error,
    damage_of,
    job_dashboard,
    naming_damage,
    state_json,
)
from hpml_orchestrator.runs.status import UNREADABLE, states
from hpml_orchestrator.topology.cpulist import format_list

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hpml_orchestrator.runs.history import RunHistory
    from hpml_orchestrator.runs.reporting.summary import BindingReport, RankLocation
    from hpml_orchestrator.runs.state import State


def show(
    context: typer.Context,
    run: RunWord = "last",
    ranks: Annotated[
        bool,
        typer.Option(
            "--ranks", help="Show all ranks; by default only wrong ones if there are over 16."
        ),
    ] = False,
    requirements: Annotated[
        bool,
        typer.Option(
            "--requirements",
            help="Print the run's Python packages as a requirements.txt for `pip install -r`.",
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show a run's phases, staging, results and binding.

    For a job array this lists the tasks; RUN.INDEX shows one.
    """
    if requirements:
        refuse_with("--requirements", {"--ranks": ranks, "--json": as_json})
    store = store_of(context)
    submission = store.resolve(run, newest=True)
    state = states(store, [submission])[0]
    if ranks and state.tasks:
        raise InputError(
            "each task of a job array has its own ranks",
            field="--ranks",
            hint=f"name one: hpml show {state.tasks[0].submission.label} --ranks",
        )
    if requirements:
        typer.echo(requirements_of(state))
        return
    with naming_damage(state):
        _show(state, ranks=ranks, as_json=as_json, site=chosen_site(context))


def _show(state: State, *, ranks: bool, as_json: bool, site: str) -> None:
    submission = state.submission
    try:
        state.run.newest()
    except RecordError:  # of another user: raised below, after what can be read
        summary = Summary()
    else:
        summary = summarise(state)
    life = read_history(state, summary)
    reports = life.attempts if life else ()
    if as_json:
        print_json(
            {
                **state_json(state, chosen=site),
                **describe(state, summary).to_json(),
                "history": [report.to_json() for report in reports],
                "life": life.to_json() if life else None,
                "summary": summary.to_json(),
                "links": read_links(state, summary),
                "software": read_software(state),
                "diagnosis": _diagnosis(state, summary, life),
                **summary.bound.to_json(),
                "bindings": summary.bindings,
                "record": submission.record(),
            }
        )
    else:
        lines = _lines(state, summary, life, site)
        _print_lines([*lines, ("script", str(submission.script))])
        if state.tasks:
            typer.echo("")
            header = ("TASK", "JOB", "STATE", "TIME", "NODES", "EXIT", "REASON")
            optional = ("NODES", "TIME", "JOB", "EXIT", "REASON")
            print_table(header, task_rows(state), optional=optional)
        else:
            print_places(summary.bound, everything=ranks)
    unreadable = next((report.error for report in reports if report.error is not None), None)
    if unreadable is not None:  # everything else has been printed
        raise unreadable
    if damaged := damage_of(state, [] if state.tasks else state.run.attempts()):
        raise damage_error(state, damaged)
    if state.state == UNREADABLE:
        raise RecordError(state.reason)


def _lines(
    state: State, summary: Summary, life: RunHistory | None, site: str
) -> list[tuple[str, str]]:
    lines = array_lines(state) if state.tasks else summary_lines(state, summary, life)
    if dashboard := job_dashboard(state, chosen=site):
        lines.append(("dashboard", dashboard))
    if found := _diagnosis(state, summary, life):
        lines.append(("diagnosis", f"{found}; hpml report {state.submission.label}"))
    return lines


def _diagnosis(state: State, summary: Summary, life: RunHistory | None) -> str | None:
    """Return the main bottleneck of a run in one line; None if nothing was found."""
    try:
        if state.tasks or state.run.newest() is None:
            return None
        silence = life.silence if life else None
        diagnosis = diagnose(gather(state, summary=summary, silence=silence))
    except HpmlError:  # another user's, or damaged: the summary lists what can be read
        return None
    return diagnosis.headline if diagnosis.findings else None


def print_summary(state: State, *, site: str, as_json: bool) -> None:
    """Print the summary of a run that has ended.

    Args:
        state: of the run.
        site: the value of `--site` or `HPML_SITE`.
        as_json: whether to print JSON.

    Raises:
        JobFailedError: it did not complete.
    """
    summary = summarise(state)
    life = read_history(state, summary)
    lines = _lines(state, summary, life, site)
    if as_json:
        shown = {**state_json(state, chosen=site), "summary": summary.to_json()}
        print_json({**shown, "life": life.to_json() if life else None})
    elif sys.stdout.isatty():
        from hpml_orchestrator.cli.terminal import draw_summary  # noqa: PLC0415 - rich takes long

        draw_summary(lines, completed=state.state == "COMPLETED")
    else:
        _print_lines(lines)
    refuse_failed(state)


def _print_lines(lines: list[tuple[str, str]]) -> None:
    for name, text in lines:
        typer.echo(f"{name:<10} {text}")


COLUMNS = ("RANK", "NODE", "GPU", "CPUS", "CORES", "NUMA", "DISTANCE", "NIC", "THREADS", "STATUS")
_OPTIONAL = ("THREADS", "DISTANCE", "CORES", "NIC", "NUMA", "CPUS", "GPU")
_ALL_RANKS = 16
"""With more ranks only those that are not bound as planned are shown."""


def print_places(bound: BindingReport, *, everything: bool) -> None:
    """Print the table of ranks, how many it leaves out, and what is wrong.

    Args:
        bound: the records of the run's binding.
        everything: whether to show all ranks, however many there are.
    """
    places = bound.places
    if not places and not bound.proofs and not bound.unreadable:
        return
    everything = everything or len(places) <= _ALL_RANKS
    typer.echo("")
    if shown := [place for place in places if everything or place.right is False]:
        print_ranks(shown)
    left = [] if everything else [place.right for place in places if place.right is not False]
    if left:
        counts = [(left.count(True), "bound as planned"), (left.count(None), "not checked")]
        text = " and ".join(f"{counted(n, 'rank')} {status}" for n, status in counts if n)
        typer.echo(f"not shown: {text}; `--ranks` shows all {len(places)}")
    wrong: dict[str, list[RankLocation]] = {}
    for place in places:
        for sentence in dict.fromkeys(place.wrong):
            wrong.setdefault(sentence, []).append(place)
    for sentence, its_places in wrong.items():
        typer.echo(f"WRONG {_where(its_places)}: {sentence}")
    warnings = [
        f"the proof of node {proof.node} cannot be read: {proof.why}" for proof in bound.unreadable
    ]
    warnings += by_sentence((proof.node, proof.warnings) for proof in bound.proofs)
    for warning in warnings:
        typer.echo(f"warning: {warning}", err=True)


def print_ranks(places: Iterable[RankLocation]) -> None:
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
    cells = [["-" if cell is None else str(cell) for cell in row] for row in rows]
    print_table(COLUMNS, cells, optional=_OPTIONAL)


def _where(places: list[RankLocation]) -> str:
    """Return ranks and their nodes, such as `rank 3 (n1)` or `ranks 0-7 (2 nodes)`."""
    nodes = list(dict.fromkeys(place.node for place in places))
    at = nodes[0] if len(nodes) == 1 else f"{len(nodes)} nodes"
    ranks = format_list(place.rank for place in places if place.rank >= 0) or "?"
    return f"{'rank' if len(places) == 1 else 'ranks'} {ranks} ({at})"
