"""Ctrl-C while a job is being handed over: never silent about a job that exists."""

from __future__ import annotations

import contextlib
import signal
from typing import TYPE_CHECKING

import typer

from hpml_orchestrator.cli.statuses import EXIT_INTERRUPTED

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

__all__ = ["EXIT_INTERRUPTED", "Interrupt", "held"]


class Interrupt:
    """Whether Ctrl-C was pressed, and what to tell when it is pressed again."""

    def __init__(self) -> None:
        self.pressed = False
        self.sid = ""

    def on_signal(self, _number: int, _frame: FrameType | None) -> None:
        """Note the first Ctrl-C; the second one ends the command."""
        if self.pressed:
            raise KeyboardInterrupt
        self.pressed = True
        typer.echo("\nhpml: submitting; Ctrl-C again leaves that half-way", err=True)


@contextlib.contextmanager
def held() -> Iterator[Interrupt]:
    """Hold Ctrl-C back until the block is done, which for a submission is a moment.

    After the block the caller looks at `pressed`. A second Ctrl-C ends the command at once and says
    how to find out what became of the submission.
    """
    interrupt = Interrupt()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield interrupt  # started with & by a script: Ctrl-C is meant for another command
        return
    previous = signal.signal(signal.SIGINT, interrupt.on_signal)
    try:
        yield interrupt
    except KeyboardInterrupt:
        if interrupt.sid:
            typer.echo(
                f"hpml: {interrupt.sid} may have been submitted; `hpml status {interrupt.sid}` "
                f"tells, `hpml submit --resume {interrupt.sid}` completes it",
                err=True,
            )
        else:
            typer.echo("hpml: nothing was submitted", err=True)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    finally:
        signal.signal(signal.SIGINT, previous)
