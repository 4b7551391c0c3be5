"""The log of a process without a user before it: lines with time and level on standard error.

Standard library only and Python >= 3.9: it travels to the nodes.
"""

from __future__ import annotations

import logging
import re
import time

_SHOWN_CHARS = 400
_HEAD = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ [A-Z]+ ")
"""Time and level, before the message."""


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
    """Return a line without time and level, if it has them; Python itself writes lines without.

    >>> message_of("2026-11-28T12:00:00Z ERROR cannot listen"), message_of("python: No module x")
    ('cannot listen', 'python: No module x')
    """
    head = _HEAD.match(line)
    return line[head.end() :] if head else line
