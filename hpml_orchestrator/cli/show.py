"""Command `show`, and the summary at the end of `run`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from hpml_orchestrator.cli.common import JsonOption, RunWord, print_json, print_table, store_of
from hpml_orchestrator.cli.follow import fail_unless_completed
from hpml_orchestrator.cli.places import print_places
from hpml_orchestrator.errors import InputError
from hpml_orchestrator.runs.bound import Bound
from hpml_orchestrator.runs.show import array_lines, attempt_reports, summary_lines, task_rows
from hpml_orchestrator.runs.status import states
from hpml_orchestrator.runs.summary import Summary, binding_of, summarise

if TYPE_CHECKING:
    from hpml_orchestrator.runs.status import State

__all__ = ["print_summary", "show"]


def show(
    context: typer.Context,
    run: RunWord = "last",
    ranks: Annotated[
        bool, typer.Option("--ranks", help="Show all ranks; default: of more than 16, wrong ones.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show a run's phases, staging, results and binding.

    For a job array this lists its tasks; name one (RUN.INDEX) for its details.
    """
    store = store_of(context)
    submission = store.resolve(run)
    state = states(store, [submission])[0]
    if ranks and state.tasks:
        raise InputError(
            "each task of a job array has its own ranks",
            field="--ranks",
            hint=f"name one: hpml show {state.tasks[0].submission.label} --ranks",
        )
    reports = attempt_reports(state)
    summary, bound, bindings = Summary(), Bound(), []
    if reports and reports[-1].error is None:
        summary, bound = summarise(state), binding_of(state)
        bindings = state.run.attempts()[-1].bindings()
    if as_json:
        print_json(
            {
                **state.to_json(),
                "history": [report.to_json() for report in reports],
                "summary": summary.to_json(),
                **bound.to_json(),
                "bindings": bindings,
                "record": submission.record(),
            }
        )
    else:
        lines = array_lines(state) if state.tasks else summary_lines(state, summary)
        _print_lines([*lines, ("script", str(submission.script))])
        if state.tasks:
            typer.echo("")
            header = ("TASK", "JOB", "STATE", "TIME", "NODES", "EXIT", "REASON")
            print_table(header, task_rows(state))
        else:
            print_places(bound, everything=ranks)
    unreadable = next((report.error for report in reports if report.error is not None), None)
    if unreadable is not None:  # everything else has been printed
        raise unreadable


def print_summary(state: State, *, as_json: bool) -> None:
    """Print the summary of a run that has ended.

    Raises:
        JobFailedError: it did not complete.
    """
    summary = summarise(state)
    lines = array_lines(state) if state.tasks else summary_lines(state, summary)
    if as_json:
        print_json({**state.to_json(), "summary": summary.to_json()})
    elif sys.stdout.isatty():
        _print_panel(lines, completed=state.state == "COMPLETED")
    else:
        _print_lines(lines)
    fail_unless_completed(state)


def _print_lines(lines: list[tuple[str, str]]) -> None:
    for name, text in lines:
        typer.echo(f"{name:<10} {text}")


def _print_panel(lines: list[tuple[str, str]], *, completed: bool) -> None:
    from rich.console import Console  # noqa: PLC0415 - only for terminals
    from rich.panel import Panel  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, text in lines:
        table.add_row(name, Text(text))
    border = "green" if completed else "red"
    Console().print(Panel(table, border_style=border, expand=False))
