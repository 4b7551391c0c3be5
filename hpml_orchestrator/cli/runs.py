"""Commands about runs: list, status, show, logs, wait, cancel."""

from __future__ import annotations

import sys
import time
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
    from hpml_orchestrator.jobs.status import State

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

    from hpml_orchestrator.jobs.status import states  # noqa: PLC0415

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
    from hpml_orchestrator.jobs.status import states  # noqa: PLC0415

    store = store_of(context)
    if runs:
        found = states(store, [store.resolve(word) for word in runs])
    else:
        everything = states(store, store.submissions())
        found = [state for state in everything if not state.over]
    _print_states(found, as_json=as_json)


def _print_states(found: list[State], *, as_json: bool) -> None:
    from hpml_orchestrator.jobs.show import seconds_text  # noqa: PLC0415

    if as_json:
        print_json([state.to_json() for state in found])
        return
    if not found:
        typer.echo("no runs", err=True)
        return
    now = time.time()
    rows = []
    for state in found:
        took = (state.ended or now) - state.started if state.started else None
        rows.append(
            (
                state.submission.sid,
                state.job_id or "-",
                state.backend,
                state.state,
                seconds_text(max(0, took)) if took is not None else "-",
                state.nodes or "-",
                state.reason or "-",
            )
        )
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
    """Print a run's output."""
    from hpml_orchestrator.errors import NotFoundError  # noqa: PLC0415
    from hpml_orchestrator.jobs.tail import Tail, last_lines  # noqa: PLC0415

    store = store_of(context)
    submission = store.resolve(run)
    if follow:
        from hpml_orchestrator.cli.follow import follow as follow_run  # noqa: PLC0415

        follow_run(store, submission, out=sys.stdout)
        return
    output = store.run(submission.runs()[0][1]).output
    if not output.exists():
        raise NotFoundError(
            f"{submission.sid} has no output yet", hint=f"hpml status {submission.sid}"
        )
    if lines:
        sys.stdout.buffer.write(last_lines(output, lines))
        return
    tail = Tail(output)
    while data := tail.read():
        sys.stdout.buffer.write(data)


def cancel(context: typer.Context, runs: RunWords, as_json: JsonOption = False) -> None:
    """Cancel runs; those that are over stay as they are."""
    from hpml_orchestrator.jobs.cancel import cancel as cancel_runs  # noqa: PLC0415

    store = store_of(context)
    done = cancel_runs(store, [store.resolve(word) for word in runs])
    if as_json:
        print_json(done)
        return
    for one in done:
        typer.echo(f"{one['id']}: {one['outcome']}")


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


def show(context: typer.Context, run: RunWord = "last", as_json: JsonOption = False) -> None:
    """Show a run: its state, phases, staging, result, and where its records lie."""
    from hpml_orchestrator.jobs.show import summary_lines  # noqa: PLC0415
    from hpml_orchestrator.jobs.status import states  # noqa: PLC0415
    from hpml_orchestrator.jobs.summary import summarise  # noqa: PLC0415

    store = store_of(context)
    submission = store.resolve(run)
    state = states(store, [submission])[0]
    summary = summarise(state)
    attempts = state.run.attempts()
    bindings = attempts[-1].bindings() if attempts else []
    if as_json:
        print_json(
            {
                **state.to_json(),
                "summary": summary.to_json(),
                "bindings": bindings,
                "record": submission.record(),
            }
        )
        return
    for name, text in summary_lines(state, summary):
        typer.echo(f"{name:<10} {text}")
    typer.echo(f"{'script':<10} {submission.script}")
    for one in bindings:
        typer.echo(
            f"{'rank ' + str(one.get('rank')):<10} {one.get('node')}, "
            f"CPUs {','.join(str(cpu) for cpu in one.get('cpus', []))}, "
            f"GPUs {one.get('visible_gpus') or 'none'}"
        )
