"""`hpml` and `python -m hpml_orchestrator.cli`: start the command line."""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType

EXIT_INTERRUPTED = 130


def run() -> None:
    """Entry point; Ctrl-C ends hpml without a traceback unless a command handles it."""
    held = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if held:  # KeyboardInterrupt can get lost inside an import; nothing has started yet
        signal.signal(signal.SIGINT, _leave)
    from hpml_orchestrator.cli.main import main  # noqa: PLC0415 - signals first

    try:
        if held:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        main()
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


def _leave(_number: int, _frame: FrameType | None) -> None:
    os._exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    run()
