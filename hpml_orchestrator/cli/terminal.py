"""Tables, the summary and progress bars on a terminal, drawn by rich; not imported elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import progress
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["draw_summary", "draw_table", "progress_bar", "sweep_bar"]

_UNBROKEN_COLUMNS = frozenset(
    {"RUN", "TASK", "JOB", "STATE", "TIME", "RANK", "STATUS", "DASHBOARD"}
)
"""Columns that are never wrapped, because users copy from them."""

_FAILED = ("FAILED", "TIMEOUT", "OUT_OF_MEMORY", "NODE_FAIL", "REFUSED", "NOT SUBMITTED")
_STYLES = {
    **dict.fromkeys(_FAILED, "red"),
    **dict.fromkeys(("COMPLETED", "ok", "yes"), "green"),
    "RUNNING": "cyan",
    "PENDING": "yellow",
    "CANCELLED": "magenta",
    "WRONG": "bold red",
}


def draw_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Draw a table; states are coloured."""
    table = Table(box=None, pad_edge=False)
    for column in header:
        whole = column in _UNBROKEN_COLUMNS
        table.add_column(column, no_wrap=whole, overflow="ignore" if whole else "fold")
    for row in rows:
        table.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))
    Console().print(table)


def draw_summary(lines: Sequence[tuple[str, str]], *, completed: bool) -> None:
    """Draw names and values in a box, which is green for a run that completed, else red."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, text in lines:
        table.add_row(name, Text(text))
    border = "green" if completed else "red"
    Console().print(Panel(table, border_style=border, expand=False))


def progress_bar() -> progress.Progress:
    """Return a started bar of bytes on standard error, with one task; the caller refreshes it."""
    bar = progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(binary_units=True),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
        console=Console(stderr=True),
        auto_refresh=False,  # a refresh thread would be forked with the workers
        redirect_stdout=False,
        redirect_stderr=False,
        transient=True,
    )
    bar.add_task("", total=None)
    bar.start()
    return bar


def sweep_bar() -> Callable[[int, int | None, str], None]:
    """Return a function that draws how many of a sweep's points are done; a total of None ends it.

    The bar is on standard error; its line is the third argument.
    """
    bar = progress.Progress(
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TextColumn("{task.description}"),
        console=Console(stderr=True),
        transient=True,
    )
    task = bar.add_task("", total=None)
    bar.start()

    def show(done: int, total: int | None, line: str) -> None:
        if total is None:
            bar.stop()
        else:
            bar.update(task, completed=done, total=total, description=line)

    return show
