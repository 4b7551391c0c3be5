"""The log of a process without a user before it: lines with time and level on standard error.

Standard library only and Python >= 3.9: it travels to the nodes.
"""

from __future__ import annotations

import logging
import time

_SHOWN_CHARS = 400
_MESSAGE_AT = 2
"""Words before the message: time and level."""


class _OneLine(logging.Formatter):
    # UTC, because the lines of several nodes are read together.
    converter = staticmethod(time.gmtime)

    def format(self, record: logging.LogRecord) -> str:
        return " ".join(super().format(record).split())[:_SHOWN_CHARS]


def log_to_stderr(package: str, *, prefix: str = "") -> None:
    """Have the loggers of a package write to standard error, from INFO on.

    Args:
        package: whose loggers.
        prefix: of each line, where others write to the same file.
    """
    # Somebody may have closed the log; that must not stop the process.
    logging.raiseExceptions = False
    handler = logging.StreamHandler()
    line = f"{prefix}%(asctime)s %(levelname)s %(message)s"
    handler.setFormatter(_OneLine(line, "%Y-%m-%dT%H:%M:%SZ"))
    logger = logging.getLogger(package)
    logger.handlers = [handler]
    logger.setLevel(logging.INFO)


def message_of(line: str) -> str:
    """Return the message of a line that was logged without a prefix."""
    return line.split(" ", _MESSAGE_AT)[-1]
