"""Follow a run on the screen, and tell its end."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, TextIO

import typer

from hpml_orchestrator.cli.common import print_json
from hpml_orchestrator.cli.interrupt import EXIT_INTERRUPTED
from hpml_orchestrator.errors import BindingError, JobFailedError, RecordError
from hpml_orchestrator.runs.show import array_lines, summary_lines
from hpml_orchestrator.runs.state import run_of
from hpml_orchestrator.runs.status import State, wait_until_over
from hpml_orchestrator.runs.summary import binding_of, summarise
from hpml_orchestrator.runs.tail import Tail

if TYPE_CHECKING:
    from hpml_orchestrator.records.store import Store, Submission

__all__ = ["fail_unless_completed", "finish", "follow"]


def follow(
    store: Store,
    submission: Submission,
    *,
    out: TextIO,
    output: bool = True,
    position: int = 0,
    end_line: bool = False,
    summary: bool = False,
) -> State:
    """Print the run's output as it comes, and its states on standard error, until it is over.

    An array as a whole has no output: name one of its tasks, or leave the output out. Ctrl-C ends
    the following, not the job.

    Args:
        store: where records live.
        submission: whose run.
        out: where its output goes.
        output: whether to print it at all.
        position: the offset of its first byte that is printed.
        end_line: whether to end a last line that the job left open, for what is printed next.
        summary: whether a run's summary comes next, which has the reason of its end.
    """
    tail = Tail(run_of(store, submission).output, position=position)
    shown = ""
    last = b""

    def write(data: bytes) -> None:
        nonlocal last
        _write(out, data)
        last = data[-1:] or last

    def write_rest() -> None:
        write(tail.read_to_end())
        if end_line and last not in (b"", b"\n"):
            write(b"\n")

    def show(state: State) -> None:
        nonlocal shown
        reason = "" if summary and output and state.over else state.reason
        line = state.state + (f" ({reason})" if reason else "")
        line += f" on {state.nodes}" if state.nodes and state.state == "RUNNING" else ""
        if output and state.over:  # the end is told behind the last words
            write_rest()
        if line != shown:
            shown = line
            typer.echo(f"hpml: {line}", err=True)
        if output:
            write(tail.read())

    try:
        state = wait_until_over(store, submission, each=show)
    except KeyboardInterrupt:
        sid = submission.label
        again = "logs -f" if output else "wait"
        typer.echo(
            f"\nhpml: the job goes on; `hpml {again} {sid}` follows it again, "
            f"`hpml cancel {sid}` ends it",
            err=True,
        )
        raise typer.Exit(EXIT_INTERRUPTED) from None
    if output and not state.over:
        write_rest()
    return state


def finish(state: State, *, as_json: bool) -> None:
    """Print the summary of a run that is over.

    Raises:
        JobFailedError: it did not complete.
    """
    summary = summarise(state)
    if as_json:
        print_json({**state.to_json(), "summary": summary.to_json()})
    else:
        lines = array_lines(state) if state.tasks else summary_lines(state, summary)
        if sys.stdout.isatty():
            _panel(lines)
        else:
            typer.echo("\n".join(f"{name:<10} {text}" for name, text in lines))
    fail_unless_completed(state)


def fail_unless_completed(state: State) -> None:
    """Raise JobFailedError for a run that ended in any other state than COMPLETED.

    The reason was told before, by the last state or by the summary.
    """
    if state.state != "COMPLETED":
        code = f", exit code {state.exit_code}" if state.exit_code else ""
        message = f"job {state.job_id or '-'} ended {state.state}{code}"
        if _misplaced(state):
            raise JobFailedError(
                f"{message}: {BindingError.meaning}", hint=f"hpml show {state.submission.label}"
            )
        raise JobFailedError(message, hint=_where_to_look(state))


def _misplaced(state: State) -> bool:
    """Whether a run ended because its ranks were in wrong places, as far as it may be read."""
    try:
        return not state.tasks and binding_of(state).fatal
    except RecordError:  # somebody else's: that it failed is known all the same
        return False


def _where_to_look(state: State) -> str:
    """Return the command that shows what a run, or an array's first bad task, had to say."""
    bad = [task for task in state.tasks if task.state == state.state]
    told = [one for one in bad or [state] if os.path.exists(one.run.output)]
    return f"hpml logs {told[0].submission.label}" if told else ""


def _write(out: TextIO, data: bytes) -> None:
    if data:
        binary: Any = out.buffer
        binary.write(data)
        out.flush()


def _panel(lines: list[tuple[str, str]]) -> None:
    from rich.console import Console  # noqa: PLC0415
    from rich.panel import Panel  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, text in lines:
        table.add_row(name, Text(text))
    good = "COMPLETED" in lines[0][1]
    Console().print(Panel(table, border_style="green" if good else "red", expand=False))
