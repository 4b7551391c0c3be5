"""Commands about runs: list, status, show, logs, wait, cancel."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from hpml_orchestrator.cli.common import (
    JsonOption,
    RunWord,
    RunWords,
    print_json,
    print_table,
    store_of,
)

if TYPE_CHECKING:
    from hpml_orchestrator.records.store import Submission
    from hpml_orchestrator.runs.status import State

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add this group's commands to the application."""
    app.command("list")(list_)
    app.command()(status)
    app.command()(logs)
    app.command()(cancel)
    app.command()(wait)
    app.command()(show)


def list_(
    context: typer.Context,
    number: Annotated[
        int, typer.Option("--number", "-n", min=1, help="How many, the newest first.")
    ] = 20,
    everything: Annotated[bool, typer.Option("--all", "-a", help="All of them.")] = False,
    as_json: JsonOption = False,
) -> None:
    """List runs, the newest first."""
    from itertools import islice  # noqa: PLC0415

    from hpml_orchestrator.runs.status import states  # noqa: PLC0415

    store = store_of(context)
    chosen = list(islice(store.submissions(), None if everything else number))
    _print_states(states(store, chosen), as_json=as_json)


def status(
    context: typer.Context,
    runs: Annotated[
        list[str], typer.Argument(metavar="[RUN…]", help="Runs; all that are not over without.")
    ] = [],  # noqa: B006 - typer copies it
    as_json: JsonOption = False,
) -> None:
    """Say what state runs are in; without names, all that are not over."""
    from hpml_orchestrator.runs.status import states  # noqa: PLC0415

    store = store_of(context)
    if runs:
        _print_states(states(store, [store.resolve(word) for word in runs]), as_json=as_json)
        return
    everything = states(store, store.submissions())
    none = "no run is waiting or running; `hpml list` shows those that are over"
    _print_states(
        [state for state in everything if not state.over],
        as_json=as_json,
        none=none if everything else "no runs",
    )


def _print_states(found: list[State], *, as_json: bool, none: str = "no runs") -> None:
    from hpml_orchestrator.runs.show import time_text  # noqa: PLC0415

    if as_json:
        print_json([state.to_json() for state in found])
        return
    if not found:
        typer.echo(none, err=True)
        return
    rows = [
        (
            state.submission.label,
            state.job_id or "-",
            state.backend,
            state.state,
            time_text(state),
            state.nodes or "-",
            state.reason or "-",
        )
        for state in found
    ]
    print_table(("RUN", "JOB", "BACKEND", "STATE", "TIME", "NODES", "REASON"), rows)


def logs(
    context: typer.Context,
    run: RunWord = "last",
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on as the output grows, to the end.")
    ] = False,
    lines: Annotated[
        int, typer.Option("--lines", "-n", min=0, help="Only the last so many lines; 0 for all.")
    ] = 0,
) -> None:
    """Print a run's output; of a job array that of one task, RUN.INDEX."""
    from hpml_orchestrator.errors import NotFoundError  # noqa: PLC0415
    from hpml_orchestrator.runs.state import run_of  # noqa: PLC0415
    from hpml_orchestrator.runs.tail import Tail, start_of_last  # noqa: PLC0415

    store = store_of(context)
    submission = _one_run(store.resolve(run))
    chosen = run_of(store, submission)
    begun = chosen.has_output()
    position = start_of_last(chosen.output, lines) if begun and lines else 0
    if follow:
        from hpml_orchestrator.cli.follow import follow as follow_run  # noqa: PLC0415

        follow_run(store, submission, out=sys.stdout, position=position)
        return
    if not begun:
        raise NotFoundError(
            f"{submission.label} has no output yet", hint=f"hpml status {submission.label}"
        )
    tail = Tail(chosen.output, position=position)
    while data := tail.read():
        sys.stdout.buffer.write(data)


def _one_run(submission: Submission) -> Submission:
    """Return a submission with one run: of an array a task must be named, unless it has only one.

    Raises:
        InputError: it is an array and none of its tasks is named.
    """
    from hpml_orchestrator.errors import InputError  # noqa: PLC0415

    table = submission.runs()
    if submission.index is not None or not submission.is_array():
        return submission
    if len(table) == 1:
        return replace(submission, index=table[0][0])
    known = ", ".join(f"{submission.sid}.{index}" for index, _ in table[:3])
    raise InputError(
        f"is a job array of {len(table)} tasks, each with an output of its own",
        field="RUN",
        value=submission.sid,
        hint=f"name one: {known}{', …' if len(table) > 3 else ''}",  # noqa: PLR2004
    )


def cancel(context: typer.Context, runs: RunWords, as_json: JsonOption = False) -> None:
    """Cancel runs, or one task of a job array (RUN.INDEX); what is over stays as it is.

    A run that is being submitted is waited for, some seconds. The exit status is 5 where it has no
    job then: it may get one yet, and was not cancelled.
    """
    from hpml_orchestrator.errors import HpmlError, SchedulerUnavailable  # noqa: PLC0415
    from hpml_orchestrator.runs.cancel import NOT_CANCELLED  # noqa: PLC0415
    from hpml_orchestrator.runs.cancel import cancel as cancel_runs  # noqa: PLC0415

    store = store_of(context)
    try:
        named = [store.resolve(word) for word in runs]
    except HpmlError as error:
        if len(runs) > 1:
            error.hint = f"nothing was cancelled; {error.hint}"
        raise
    done = cancel_runs(
        store,
        named,
        notice=lambda text: typer.echo(f"hpml: {text}", err=True),
    )
    if as_json:
        print_json(done)
    else:
        for one in done:
            typer.echo(f"{one['id']}: {one['outcome']}")
    left = [one["id"] for one in done if one["outcome"].startswith(NOT_CANCELLED)]
    if left:
        raise SchedulerUnavailable(
            f"not cancelled: {', '.join(left)}",
            hint=f"the job may appear yet: `hpml cancel {' '.join(left)}` again in a minute",
        )


def wait(
    context: typer.Context,
    run: RunWord = "last",
    as_json: JsonOption = False,
) -> None:
    """Wait until a run is over; the exit status is 0 when it completed, else 6."""
    from hpml_orchestrator.cli.follow import fail_unless_completed, follow  # noqa: PLC0415

    store = store_of(context)
    state = follow(store, store.resolve(run), out=sys.stdout, output=False)
    if as_json:
        print_json(state.to_json())
    fail_unless_completed(state)


def show(
    context: typer.Context,
    run: RunWord = "last",
    ranks: Annotated[
        bool, typer.Option("--ranks", help="Show every rank; else of more than 16 the wrong ones.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show a run: state, phases, staging, result, where its ranks ran, where its records lie.

    Of a job array it shows the tasks, and of one of them (RUN.INDEX) what it shows of any run.
    """
    from hpml_orchestrator.runs.attempts import attempt_reports  # noqa: PLC0415
    from hpml_orchestrator.runs.bound import Bound  # noqa: PLC0415
    from hpml_orchestrator.runs.show import array_lines, summary_lines, task_rows  # noqa: PLC0415
    from hpml_orchestrator.runs.status import states  # noqa: PLC0415
    from hpml_orchestrator.runs.summary import Summary, binding_of, summarise  # noqa: PLC0415

    store = store_of(context)
    submission = store.resolve(run)
    state = states(store, [submission])[0]
    if ranks and state.tasks:
        from hpml_orchestrator.errors import InputError  # noqa: PLC0415

        raise InputError(
            "a job array has ranks in each of its tasks",
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
    elif state.tasks:
        for name, text in [*array_lines(state), ("script", str(submission.script))]:
            typer.echo(f"{name:<10} {text}")
        typer.echo("")
        print_table(("TASK", "JOB", "STATE", "TIME", "NODES", "EXIT", "REASON"), task_rows(state))
    else:
        from hpml_orchestrator.cli.places import print_places  # noqa: PLC0415

        for name, text in summary_lines(state, summary):
            typer.echo(f"{name:<10} {text}")
        typer.echo(f"{'script':<10} {submission.script}")
        print_places(bound, everything=ranks)
    unreadable = next((report.error for report in reports if report.error is not None), None)
    if unreadable is not None:  # the rest was shown
        raise unreadable
