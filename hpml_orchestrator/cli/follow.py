"""Commands that follow runs: logs, wait and attach; `run` follows as well."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from hpml_orchestrator.cli.common import (
    JsonOption,
    RunWord,
    appended_arguments,
    print_json,
    refuse_empty,
    store_of,
)
from hpml_orchestrator.cli.process import EXIT_INTERRUPTED, notice
from hpml_orchestrator.errors import HpmlError, NotFoundError
from hpml_orchestrator.runs.follow import (
    Tail,
    refuse_failed,
    start_of_last,
    wait_until_over,
)
from hpml_orchestrator.runs.history import RunHistory, read_history, silence_of
from hpml_orchestrator.runs.select import one_run
from hpml_orchestrator.runs.state import State, run_of
from hpml_orchestrator.runs.status import states

if TYPE_CHECKING:
    from hpml_orchestrator.records.store import Store
    from hpml_orchestrator.records.submission import Submission


def logs(
    context: typer.Context,
    run: RunWord = "last",
    following: Annotated[
        bool, typer.Option("--follow", "-f", help="Print new output until the run has ended.")
    ] = False,
    lines: Annotated[
        int, typer.Option("--lines", "-n", min=0, help="Print only the last N lines; 0: all.")
    ] = 0,
) -> None:
    """Print the output of a run.

    For a job array, name one task: RUN.INDEX.
    """
    store = store_of(context)
    submission = one_run(store.resolve(run, newest=True), field="RUN", has="output")
    chosen = run_of(submission)
    has_output = chosen.has_output()
    position = start_of_last(chosen.output, lines) if has_output and lines else 0
    if following:
        follow(store, submission, out=sys.stdout, position=position)
        return
    if not has_output:
        raise NotFoundError(
            f"{submission.label} has no output yet", hint=f"hpml status {submission.label}"
        )
    tail = Tail(chosen.output, position=position)
    while data := tail.read():
        sys.stdout.buffer.write(data)


def wait(context: typer.Context, run: RunWord = "last", as_json: JsonOption = False) -> None:
    """Wait until a run has ended.

    The exit status is 0 if the run completed, otherwise 6.
    """
    store = store_of(context)
    state = follow(store, store.resolve(run, newest=True), out=sys.stdout, output=False)
    if as_json:
        print_json(state.to_json())
    refuse_failed(state)


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
    """Print a run's output as it grows, and its states on standard error, until it has ended.

    An array as a whole has no output: name one of its tasks, or omit the output. Ctrl-C stops
    following; the job continues.

    Args:
        store: where records live.
        submission: submission of the run.
        out: destination of its output.
        output: whether to print it at all.
        position: offset of the first byte to print.
        end_line: whether to complete a last line that has no newline.
        summary: whether a summary follows, which has the reason of the end.
    """
    tail = Tail(run_of(submission).output, position=position)
    printer = _Printer(out)
    notices = _Notices()
    over = False

    def print_rest() -> None:
        printer.write(tail.read_to_end())
        if end_line:
            printer.end_line()

    def show(state: State) -> None:
        nonlocal over
        over = state.over
        if output and state.over:  # print the final state after the last line of output
            print_rest()
        notices.show(state, reason=not (summary and output and state.over))
        if output:
            printer.write(tail.read())

    try:
        state = wait_until_over(store, submission, each=show)
    except KeyboardInterrupt:
        again = "logs -f" if output else "wait"
        typer.echo(f"\nhpml: {_interrupted(submission.label, again, over=over)}", err=True)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    if output and not state.over:
        print_rest()
    return state


class _Notices:
    """Prints a run's state, and its running attempt, whenever they change."""

    def __init__(self) -> None:
        self._shown = self._attempt = ""
        self._known = 0  # number of attempts, the last of which has started to train
        self._state: State | None = None
        self._silent = False

    def show(self, state: State, *, reason: bool) -> None:
        """Print what has changed; called again with the same state between two queries."""
        line = _state_line(state, reason=reason)
        if line != self._shown:
            self._shown = line
            notice(line)
        if state is self._state:
            return
        self._state = state
        _, silence = silence_of(state, time.time())
        if silence and not self._silent:
            notice(silence)
        self._silent = bool(silence)
        if state.attempts == self._known:
            return
        history = _history(state)
        place = history.place if history else ""
        if history and history.attempts[-1].trained_from:
            self._known = state.attempts
        if history and place not in ("", self._attempt):
            self._attempt = place
            notice(history.line)


def _history(state: State) -> RunHistory | None:
    with contextlib.suppress(HpmlError):  # another user's
        if state.state == "RUNNING" and not state.tasks:
            continues = state.submission.requested_job().checkpoint.enabled
            return read_history(state) if state.attempts > 1 or continues else None
    return None


def _interrupted(label: str, again: str, *, over: bool) -> str:
    if over:
        return f"the job has ended; `hpml show {label}` shows how"
    return (
        f"the job continues; `hpml {again} {label}` follows it again, "
        f"`hpml cancel {label}` cancels it"
    )


class _Printer:
    """Writes bytes to a text stream, and tracks whether the last line is complete."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._binary = out.buffer
        self._last = b"\n"

    def write(self, data: bytes) -> None:
        if data:
            self._binary.write(data)
            self._out.flush()
            self._last = data[-1:]

    def end_line(self) -> None:
        if self._last != b"\n":
            self.write(b"\n")


def _state_line(state: State, *, reason: bool) -> str:
    why = f" ({state.reason})" if reason and state.reason else ""
    where = f" on {state.nodes}" if state.nodes and state.state == "RUNNING" else ""
    return f"{state.state}{why}{where}"


# Command `attach`: a shell or a program on a node of a running job.


def attach(
    context: typer.Context,
    run: RunWord = "last",
    node: Annotated[
        str | None,
        typer.Option("--node", metavar="NODE", help="One of the job's nodes; default: its first."),
    ] = None,
) -> None:
    """Open a shell, or run a program, on a node of a running job.

    Words after `--` are the program and its arguments; the default is bash. It starts in the
    job's working directory and has the job's CPUs, memory and GPUs on that node. For a job array,
    name one task: RUN.INDEX. The exit status is that of the program.
    """
    refuse_empty({"--node": node})
    store = store_of(context)
    submission = one_run(store.resolve(run, newest=True), field="RUN", has="nodes")
    from hpml_orchestrator.runs.attach import attachment  # noqa: PLC0415 - loads script rendering

    joined = attachment(
        states(store, [submission])[0],
        appended_arguments(context),
        node=node or "",
        terminal=sys.stdin.isatty() and sys.stdout.isatty(),
        environment=os.environ,
    )
    if joined.directory is not None and os.path.isdir(joined.directory):
        os.chdir(joined.directory)
    program = joined.argv[0]
    if shutil.which(program, path=joined.environment.get("PATH")) is None:
        raise NotFoundError(f"no such program: {program}", hint="it is looked up on the job's PATH")
    if joined.cpus:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, joined.cpus)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execvpe(program, joined.argv, joined.environment)  # noqa: S606 - as the user asks
