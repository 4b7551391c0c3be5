"""Tables, the summary and progress bars on a terminal, drawn by rich; not imported elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from rich import progress
from rich.cells import cell_len
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

Column = TypeVar("Column")

GAP = 2
"""Between two columns of a table."""

_UNBROKEN_COLUMNS = frozenset(
    {"RUN", "TASK", "JOB", "SWEEP", "STATE", "TIME", "RANK", "STATUS", "DASHBOARD"}
)
"""Columns that are never wrapped, because users copy from them."""

_LEAST_ROOM = 16  # minimum width of a wrapped column

_FAILED = ("FAILED", "TIMEOUT", "OUT_OF_MEMORY", "NODE_FAIL", "REFUSED", "NOT SUBMITTED")
_STYLES = {
    **dict.fromkeys(_FAILED, "red"),
    **dict.fromkeys(("COMPLETED", "ok", "yes"), "green"),
    "RUNNING": "cyan",
    "PENDING": "yellow",
    "CANCELLED": "magenta",
    "WRONG": "bold red",
}


def fitting(
    columns: Sequence[Column],
    room: Mapping[Column, int],
    width: int,
    *,
    least_important: Callable[[Sequence[Column]], Column | None],
) -> list[Column]:
    """Return the columns of a table that fit a terminal.

    Args:
        columns: all columns, in order.
        room: width of each, without the gap.
        width: width of the terminal.
        least_important: returns which of the remaining columns to drop; None for none.
    """
    left = [*columns]
    while sum(room[column] + GAP for column in left) - GAP > width:
        column = least_important(left)
        if column is None:
            break
        left.remove(column)
    return left


def draw_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], optional: Sequence[str] = ()
) -> None:
    """Draw a table with coloured states.

    Text that users copy, such as ids, is never wrapped, even if it is wider than the terminal.

    Args:
        header: name of each column.
        rows: cells of each row.
        optional: columns to drop on a narrow terminal, least important first.
    """
    cells = dict(zip(header, zip(*rows, strict=True), strict=True)) if rows else {}
    wanted = {name: max(map(cell_len, [name, *cells.get(name, ())])) for name in header}
    room = {
        name: size if name in _UNBROKEN_COLUMNS else min(size, max(cell_len(name), _LEAST_ROOM))
        for name, size in wanted.items()
    }
    empty = [name for name in optional if not {*cells.get(name, ())} - {"-"}]
    order = dict.fromkeys([*empty, *optional])
    console = Console()
    left = fitting(
        header,
        room,
        console.width,
        least_important=lambda left: next((name for name in order if name in left), None),
    )
    spare = console.width - sum(room[name] + GAP for name in left) + GAP
    for name in sorted(left, key=lambda name: wanted[name]):  # wrap the longest texts
        more = max(0, min(wanted[name] - room[name], spare))
        room[name] += more
        spare -= more
    console.width = max(console.width, console.width - spare)
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0))
    for name in left:
        table.add_column(name, width=room[name], no_wrap=name in _UNBROKEN_COLUMNS, overflow="fold")
    for row in rows:
        shown = [cell for name, cell in zip(header, row, strict=True) if name in left]
        table.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in shown))
    console.print(table)


def draw_summary(lines: Sequence[tuple[str, str]], *, completed: bool) -> None:
    """Draw names and values in a box: green for a completed run, else red."""
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
        auto_refresh=False,  # a refresh thread could hold a lock during a fork
        redirect_stdout=False,
        redirect_stderr=False,
        transient=True,
    )
    bar.add_task("", total=None)
    bar.start()
    return bar


def sweep_bar() -> Callable[[int, int | None, str], None]:
    """Return a function that draws how many points of a sweep are done; a total of None ends it.

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
