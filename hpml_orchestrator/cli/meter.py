"""How far a long copy is: a bar on a terminal, a plain line every ten seconds elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import typer

from hpml_orchestrator.staging.capacity import human_bytes

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Self

    from rich.progress import Progress

__all__ = ["Meter"]

_LINE_EVERY_SECONDS = 10.0
_BAR_EVERY_SECONDS = 0.2


class Meter:
    """Tells on standard error; called with (bytes done, files done, bytes in all, files in all).

    Args:
        verb: what is done, as in "packed 3 of 4 files".
        lines: whether to print lines where there is no terminal.
        terminal: whether to draw; None: find out.
        clock: seconds.
    """

    def __init__(
        self,
        verb: str,
        *,
        lines: bool = True,
        terminal: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._verb = verb
        self._lines = lines
        self._clock = clock
        self._begin = clock()
        self._next = self._begin
        self._terminal = sys.stderr.isatty() if terminal is None else terminal
        self._bar: Progress | None = None
        if not self._terminal:
            self._next += _LINE_EVERY_SECONDS

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, done: int, files: int, all_bytes: int, all_files: int) -> None:
        """Tell the figures if it is time to."""
        now = self._clock()
        if now < self._next:
            return
        if self._terminal:
            self._next = now + _BAR_EVERY_SECONDS
            self._draw(done, files, all_bytes, all_files)
            return
        if not self._lines:
            return
        self._next = now + _LINE_EVERY_SECONDS
        seconds = now - self._begin
        rate = done / seconds if seconds else 0.0
        left = f", {(all_bytes - done) / rate:.0f} s left" if rate else ""
        typer.echo(
            f"hpml: {self._verb} {files} of {all_files} files, {human_bytes(done)} of "
            f"{human_bytes(all_bytes)} in {seconds:.0f} s, {human_bytes(int(rate))}/s{left}",
            err=True,
        )

    def _draw(self, done: int, files: int, all_bytes: int, all_files: int) -> None:
        from rich import progress  # noqa: PLC0415
        from rich.console import Console  # noqa: PLC0415

        if self._bar is None:
            self._bar = progress.Progress(
                progress.TextColumn("{task.description}"),
                progress.BarColumn(),
                progress.DownloadColumn(binary_units=True),
                progress.TransferSpeedColumn(),
                progress.TimeRemainingColumn(),
                console=Console(stderr=True),
                auto_refresh=False,  # a thread of its own would be forked with the workers
                redirect_stdout=False,
                redirect_stderr=False,
                transient=True,
            )
            self._bar.add_task("", total=None)
            self._bar.start()
        words = f"{self._verb} {files} of {all_files} files"
        self._bar.update(self._bar.task_ids[0], description=words, completed=done, total=all_bytes)
        self._bar.refresh()
