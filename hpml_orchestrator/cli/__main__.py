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
    """Entry point; Ctrl-C that no command holds back ends without a traceback."""
    held = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if held:  # an exception can be lost in the midst of an import; nothing has begun by then
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
