"""`hpml` and `python -m hpml_orchestrator.cli`: start the command line."""

from __future__ import annotations

import sys

__all__ = ["run"]

EXIT_INTERRUPTED = 130


def run() -> None:
    """Entry point; Ctrl-C while modules are still being loaded ends without a traceback."""
    try:
        from hpml_orchestrator.cli.main import main  # noqa: PLC0415
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    main()


if __name__ == "__main__":
    run()
