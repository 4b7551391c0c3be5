"""Signals that end a command in good order: it is asked to stop, cleans up, and then says so."""

from __future__ import annotations

import contextlib
import signal
import sys
from typing import TYPE_CHECKING

import typer

from hpml_orchestrator.errors import StagingError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType, TracebackType
    from typing import Any, Self

__all__ = ["Stop", "stoppable"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stop:
    """Whether a signal asked to stop; a context manager, and what `should_stop` calls.

    The second Ctrl-C does not wait any longer.

    Attributes:
        number: of the signal; 0 as long as there was none.
    """

    def __init__(self) -> None:
        self.number = 0
        self._before: dict[signal.Signals, Any] = {}

    def __call__(self) -> bool:
        """Say whether to stop."""
        return self.number != 0

    def __enter__(self) -> Self:
        for one in _SIGNALS:
            before = signal.getsignal(one)
            if before != signal.SIG_IGN:  # as nohup has it: that stays so
                self._before[one] = before
                signal.signal(one, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for one, before in self._before.items():
            signal.signal(one, before)

    @property
    def word(self) -> str:
        """What it was, in words."""
        return "Ctrl-C" if self.number == signal.SIGINT else signal.Signals(self.number).name

    @property
    def status(self) -> int:
        """The exit status that a shell expects after that signal."""
        return 128 + self.number

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self.number and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.number = self.number or number


@contextlib.contextmanager
def stoppable(told: Callable[[], str]) -> Iterator[Stop]:
    """Do what is in the block; when a signal ended it, say so and exit with that signal's status.

    Args:
        told: what there is to say of what was done, after the signal's name.
    """
    with Stop() as stop:
        try:
            yield stop
        except (StagingError, KeyboardInterrupt):
            if not stop():
                raise
            begin = "\n" if sys.stderr.isatty() else ""  # behind the ^C
            typer.echo(f"{begin}hpml: {stop.word}: {told()}", err=True)
            raise typer.Exit(stop.status) from None
