"""What the commands that copy data share: options, a progress bar, stopping by signals."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from typing import TYPE_CHECKING

import typer

from hpml_orchestrator.cli.process import Stop, notice
from hpml_orchestrator.errors import InputError, StagingError
from hpml_orchestrator.records.texts import human_bytes
from hpml_orchestrator.records.units import parse_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Self

    from rich.progress import Progress

_WORKERS_MAX = 1024

_LINE_EVERY_SECONDS = 10.0
_BAR_EVERY_SECONDS = 0.2


def count_option(name: str, text: str, default: str = "one per CPU", *, least: int = 1) -> object:
    """Return an option for a number of processes or threads.

    Args:
        name: of the option.
        text: its help.
        default: what happens without it.
        least: the smallest value.
    """
    return typer.Option(
        name, metavar="N", min=least, max=_WORKERS_MAX, help=text, show_default=default
    )


def outside_links_option(verb: str) -> object:
    """Return the option that accepts symbolic links out of the tree, which are refused without."""
    text = f"{verb} symbolic links that leave the tree, as they are."
    return typer.Option("--outside-links", help=text)


def parse_size(option: str, text: str) -> int:
    """Return the bytes of a value such as `16K` or `1G`.

    Raises:
        InputError: it is not a size; names the option.
    """
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise InputError(str(error), field=option, value=text) from None


class Meter:
    """A bar on a terminal, a line every ten seconds elsewhere, both on standard error.

    Called with (bytes done, files done, bytes in all, files in all).

    Args:
        verb: what is done, as in "packed 3 of 4 files".
        lines: whether to print lines without a terminal.
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

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, done: int, files: int, all_bytes: int, all_files: int) -> None:
        """Show the figures if it is time to."""
        now = self._clock()
        # Called for every file, so it must cost next to nothing in most calls.
        if now < self._next:
            return
        counts = f"{self._verb} {files} of {all_files} files"
        if self._terminal:
            self._next = now + _BAR_EVERY_SECONDS
            self._draw(counts, done, all_bytes)
        elif self._lines:
            self._next = now + _LINE_EVERY_SECONDS
            seconds = now - self._begin
            rate = done / seconds if seconds else 0.0
            left = f", {(all_bytes - done) / rate:.0f} s left" if rate else ""
            notice(
                f"{counts}, {human_bytes(done)} of {human_bytes(all_bytes)} in {seconds:.0f} s, "
                f"{human_bytes(int(rate))}/s{left}"
            )

    def _draw(self, counts: str, done: int, all_bytes: int) -> None:
        if self._bar is None:
            from hpml_orchestrator.cli.terminal import progress_bar  # noqa: PLC0415 - rich takes long

            self._bar = progress_bar()
        self._bar.update(self._bar.task_ids[0], description=counts, completed=done, total=all_bytes)
        self._bar.refresh()


@contextlib.contextmanager
def stoppable(outcome: Callable[[], str]) -> Iterator[Stop]:
    """Run a block; when a signal ended it, report that and exit with 128 + its number.

    Args:
        outcome: what is left of the work, printed after the signal's name.
    """
    with Stop(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as stop:
        try:
            yield stop
        except (StagingError, KeyboardInterrupt):
            if not stop():
                raise
            name = "Ctrl-C" if stop.number == signal.SIGINT else signal.Signals(stop.number).name
            begin = "\n" if sys.stderr.isatty() else ""  # behind the ^C
            typer.echo(f"{begin}hpml: {name}: {outcome()}", err=True)
            raise typer.Exit(128 + stop.number) from None
