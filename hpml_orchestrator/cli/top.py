"""Command `top`: a live view of running jobs, their resource usage and their bottlenecks."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import time
import tty
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import typer
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from hpml_orchestrator.cli.common import (
    JsonOption,
    PrometheusAuthOption,
    PrometheusOption,
    RunWords,
    chosen_prometheus,
    chosen_site,
    print_json,
    print_table,
    store_of,
)
from hpml_orchestrator.cli.process import Stop, notice
from hpml_orchestrator.cli.terminal import GAP, fitting
from hpml_orchestrator.errors import InputError, counted
from hpml_orchestrator.records.run import user_name
from hpml_orchestrator.records.texts import human_bytes, seconds_text
from hpml_orchestrator.runs.live import LiveJobs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hpml_orchestrator.runs.live import LiveJob

_KEY_SECONDS = 0.2
_HEADER_LINES = 4
_TEXTS = ("JOB", "CLUSTER", "NAME", "USER", "STATE", "BOTTLENECK")
_MOST_ROOM = {"NAME": 18}  # longer text is cut
_LEAST_ROOM = {"NAME": 10, "BOTTLENECK": 11}  # before a column is dropped; 11 fits input-bound


def top(
    context: typer.Context,
    runs: RunWords = [],
    prometheus: PrometheusOption = "",
    prometheus_auth: PrometheusAuthOption = "",
    everybody: Annotated[
        bool, typer.Option("--all-users", help="Show the jobs of all users (needs Prometheus).")
    ] = False,
    interval: Annotated[
        float, typer.Option("--interval", metavar="SECONDS", min=1, help="Time between updates.")
    ] = 10.0,
    once: Annotated[bool, typer.Option("--once", help="Print once instead of live.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show running jobs live: GPUs, memory, I/O, samples/s, time left, bottlenecks.

    Figures come from Prometheus if there is one, else from the runs' records. Without RUN this
    shows
    all of your jobs. q ends it; without a terminal it prints once.
    """
    store = store_of(context)
    server = chosen_prometheus(context, prometheus, prometheus_auth)
    if everybody and server is None:
        raise InputError("needs a Prometheus", field="--all-users", hint="--prometheus URL")
    jobs = LiveJobs(
        store,
        runs,
        server,
        user="" if everybody else user_name(os.getuid()),
        site=chosen_site(context),
    )
    if not (once or as_json) and sys.stdout.isatty():
        _watch(jobs, interval)
        return
    found = jobs.look()
    if jobs.problem:
        notice(f"warning: {jobs.problem}" + ("; figures are from records" if found else ""))
    if as_json:
        shown = [asdict(job) for job in found]
        print_json({"time": jobs.now(), "problem": jobs.problem, "jobs": shown})
    elif sys.stdout.isatty():
        Console().print(draw(found, width=Console().width))
    elif found:
        rows = [[column.text(job) or "-" for column in COLUMNS] for job in _sorted(found)]
        print_table([column.name for column in COLUMNS], rows)
    elif not jobs.problem:
        submitted = " that hpml submitted" if jobs.prometheus is None else ""
        typer.echo(f"no running jobs{submitted}", err=True)
        if submitted:
            typer.echo("hint: jobs that hpml did not submit need --prometheus URL", err=True)
    if jobs.problem and not found:
        raise typer.Exit(1)  # an empty table would mean no jobs, but that is unknown


def _watch(jobs: LiveJobs, interval: float) -> None:
    console, stop = Console(), Stop(signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    found, look_at = jobs.look(), time.monotonic() + interval

    def screen() -> RenderableType:
        return draw(found, jobs.problem, width=console.width, height=console.height)

    with (
        stop,
        _keys() as pressed,
        Live(console=console, screen=True, get_renderable=screen, refresh_per_second=1),
    ):
        while not stop() and pressed() not in ("q", "Q"):
            if time.monotonic() >= look_at:
                found, look_at = jobs.look(), time.monotonic() + interval


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[], str]]:
    """Yield a function that briefly waits for a key; restore the terminal's mode at the end."""
    stream = sys.stdin.fileno()
    before = termios.tcgetattr(stream) if sys.stdin.isatty() else None

    def pressed() -> str:
        ready, _, _ = select.select([stream] if before else [], [], [], _KEY_SECONDS)
        return os.read(stream, 1).decode("ascii", "replace") if ready else ""

    try:
        if before:
            tty.setcbreak(stream)
        yield pressed
    finally:
        if before:
            termios.tcsetattr(stream, termios.TCSADRAIN, before)


class Column(NamedTuple):
    """A column; on a narrow terminal the one with the highest rank is dropped first."""

    name: str
    rank: int
    text: Callable[[LiveJob], str]  # empty if unknown


def _show(form: Callable[[float], str], *names: str) -> Callable[[LiveJob], str]:
    """Return a function that formats those of a job's figures that are known, such as 3/4."""
    return lambda job: "/".join(form(job.figures[name]) for name in names if name in job.figures)


def _rate(value: float) -> str:
    return f"{human_bytes(value)}/s"


def _gibibytes(value: float) -> str:
    return f"{value / (1 << 30):.0f}"


def _time(seconds: float | None) -> str:
    return "" if seconds is None else seconds_text(seconds)


COLUMNS = (
    Column("JOB", 0, lambda job: job.job_id),
    Column("CLUSTER", 2, lambda job: job.cluster),
    Column("NAME", 1, lambda job: job.name),
    Column("USER", 6, lambda job: job.user),
    Column("STATE", 3, lambda job: job.state),
    Column("TIME", 14, lambda job: _time(job.elapsed_seconds)),
    Column("LEFT", 7, lambda job: _time(job.left_seconds)),
    Column("GPUS", 4, _show("{:.0f}".format, "gpus_used", "gpus_allocated")),
    Column("BUSY", 5, _show("{:.0%}".format, "gpu_busy_ratio")),
    Column("GPU GiB", 9, _show(_gibibytes, "gpu_memory_used_bytes", "gpu_memory_total_bytes")),
    Column("CPUS", 10, _show("{:.1f}".format, "cpus_busy", "cpus")),
    Column("MEMORY", 11, _show(human_bytes, "memory_bytes")),
    Column("READ", 12, _show(_rate, "read_bytes_per_second")),
    Column("WRITE", 13, _show(_rate, "write_bytes_per_second")),
    Column("SAMPLES/S", 8, _show("{:,.0f}".format, "samples_per_second")),
    Column("BOTTLENECK", 2, lambda job: "; ".join(job.bottlenecks) or job.reason),
)


def _sorted(jobs: Sequence[LiveJob]) -> list[LiveJob]:
    return sorted(
        jobs, key=lambda job: (job.state != "RUNNING", not job.bottlenecks, -(job.started or 0.0))
    )


def draw(
    jobs: Sequence[LiveJob], problem: str = "", *, width: int, height: int | None = None
) -> RenderableType:
    """Return a table of the jobs, below a line about all of them.

    Args:
        jobs: jobs to show.
        problem: why Prometheus gives no figures.
        width: width of the terminal; columns that do not fit are dropped.
        height: height of the terminal; jobs that do not fit are counted. None shows all.
    """
    running = [job for job in jobs if job.state == "RUNNING"]
    gpus, busy = (
        sum(job.figures.get(name, 0.0) for job in running) for name in ("gpus", "gpus_busy")
    )
    sources = " and ".join(sorted({job.source.capitalize() for job in jobs if job.source}))
    head = f"{time.strftime('%H:%M:%S')}   {counted(len(jobs), 'job')}, {len(running)} running"
    head += f"   {busy:.1f} of {gpus:.0f} GPUs busy" if gpus else ""
    head += f"   figures: {sources}" if sources else ""
    lines: list[RenderableType] = [Text(head, style="bold", overflow="ellipsis", no_wrap=True)]
    if problem:
        lines.append(Text(f"{problem}; figures are from records", style="yellow"))
    shown = _sorted(jobs)
    if height is not None:
        shown = shown[: max(1, height - _HEADER_LINES - bool(problem))]
    if jobs:
        lines += [Text(""), _table(shown, width)]
    if len(shown) < len(jobs):
        lines.append(Text(f"… and {len(jobs) - len(shown)} more", style="dim"))
    return Group(*lines)


def _shortened(text: str, room: int) -> str:
    """Return a bottleneck in as many words as fit.

    >>> [_shortened("input-bound: 65% waiting for data", room) for room in (33, 20, 11)]
    ['input-bound: 65% waiting for data', 'input-bound: 65%', 'input-bound']
    """
    first = text.partition("; ")[0]
    head, _, rest = first.partition(": ")
    figure = rest.partition(" ")[0]
    shorter = (text, first, f"{head}: {figure}" if figure.endswith("%") else head)
    return next((words for words in shorter if cell_len(words) <= room), head)


def _table(jobs: Sequence[LiveJob], width: int) -> Table:
    """Return the table: names and bottlenecks shrink, then columns that do not fit are dropped."""
    cells = {column: [column.text(job) for job in jobs] for column in COLUMNS}
    left = [
        column
        for column in COLUMNS
        if len({*cells[column]} - {""}) > (column.name in ("CLUSTER", "USER"))
    ]
    wanted = {
        column: min(
            _MOST_ROOM.get(column.name, width), max(map(cell_len, [column.name, *cells[column]]))
        )
        for column in left
    }
    room = {
        column: min(size, _LEAST_ROOM.get(column.name, size)) for column, size in wanted.items()
    }
    left = fitting(
        left,
        room,
        width,
        least_important=lambda left: (
            max(left, key=lambda column: column.rank) if left[2:] else None
        ),
    )
    for column in left:  # in order: the name grows first
        spare = width - sum(room[other] + GAP for other in left) + GAP
        room[column] = max(0, min(wanted[column], room[column] + spare))
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0))
    for column in left:
        justify: Literal["left", "right"] = "left" if column.name in _TEXTS else "right"
        table.add_column(column.name, justify=justify, width=room[column], no_wrap=True)
        if column.name == "BOTTLENECK":
            cells[column] = [
                _shortened(text, room[column]) if job.bottlenecks else text
                for job, text in zip(jobs, cells[column], strict=True)
            ]
    for row, job in enumerate(jobs):
        styles = {
            "STATE": {"RUNNING": "green", "PENDING": "yellow"}.get(job.state, ""),
            "BOTTLENECK": "bold red" if job.bottlenecks else "dim",
        }
        texts = [Text(cells[column][row] or "-", styles.get(column.name, "")) for column in left]
        table.add_row(*texts)
    return table
