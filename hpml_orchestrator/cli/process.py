"""The process of a command: its exit statuses, its streams, its current directory."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

import typer

from hpml_orchestrator.errors import NotFoundError

if TYPE_CHECKING:
    from types import FrameType
    from typing import Self

APPENDED = "hpml.appended"
"""Key in a context's `meta` for the words after `--`, for commands that take a job file."""

EXIT_OUTLIER = 9
EXIT_INTERNAL = 70
EXIT_NOT_WRITTEN = 74
EXIT_STUCK = 75
EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_TERMINATED = 128 + signal.SIGTERM


def notice(text: str) -> None:
    """Print a line of progress on standard error."""
    typer.echo(f"hpml: {text}", err=True)


def become_exporter(module: str, options: str) -> None:
    """Replace this process by an exporter without any of the command line's libraries.

    Args:
        module: module that Python runs.
        options: its only argument.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    # An exporter runs for months next to other people's jobs: exec frees the memory of the command
    # line's libraries.
    argv = [sys.executable, "-P", "-m", module, options]
    os.execve(sys.executable, argv, {"MALLOC_ARENA_MAX": "2", **os.environ})  # noqa: S606


def refuse_gone_directory() -> None:
    """Refuse to run in a directory that was removed.

    Raises:
        NotFoundError: the current directory does not exist.
    """
    try:
        os.getcwd()
    except OSError:
        raise NotFoundError(
            "the current directory no longer exists", hint="`cd` to another one first"
        ) from None


def report_unwritable_output(error: OSError) -> None:
    """Report on standard error that standard output cannot be written, and discard the rest."""
    with contextlib.suppress(OSError):
        typer.echo(f"hpml: cannot write to standard output: {error.strerror}", err=True)
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Stop:
    """Whether a signal requested a stop; a context manager that is passed as `should_stop`.

    A second Ctrl-C raises KeyboardInterrupt. Ignored signals stay ignored, for nohup.

    Args:
        signals: the signals to intercept.
        message: printed at the first one.

    Attributes:
        number: number of the signal; 0 before the first one.
    """

    def __init__(self, *signals: signal.Signals, message: str = "") -> None:
        self.number = 0
        self._signals = signals
        self._message = message
        self._before: dict[signal.Signals, Any] = {}

    def __call__(self) -> bool:
        """Return whether to stop."""
        return self.number != 0

    def __enter__(self) -> Self:
        for number in self._signals:
            before = signal.getsignal(number)
            # nohup ignores SIGHUP on purpose; handling it would end the work at logout.
            if before != signal.SIG_IGN:
                self._before[number] = before
                signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self.number and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self._message and not self.number:
            # Not through sys.stderr: the signal may have interrupted a write to it, and buffered
            # streams are not reentrant.
            with contextlib.suppress(OSError):
                os.write(2, f"\nhpml: {self._message}\n".encode())
        self.number = self.number or number
