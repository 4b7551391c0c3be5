"""`python -m hpml_exporters.locks FILE`: what a web-config file asks of clients, as JSON.

For `hpml check`, which looks before a job runs and imports nothing of the exporters. One object:
`{"locked": BOOL, "tls": BOOL}`, or `{"error": TEXT, "hint": TEXT}` for a file that an exporter
would refuse. Certificates and keys are not opened: they may lie on the nodes alone.
"""

from __future__ import annotations

import json
import sys
from typing import Any

__all__ = ["main"]

_WRONG_OPTIONS = 2


def told(path: str) -> dict[str, Any]:
    """Return what a file asks for, or what is wrong with it.

    Args:
        path: of the web-config file.
    """
    from hpml_exporters.server import web_config  # noqa: PLC0415 - nothing else needs it here
    from hpml_orchestrator.errors import InputError  # noqa: PLC0415

    try:
        config = web_config.read(path)
    except InputError as error:
        return {"error": str(error), "hint": error.hint}
    return {"locked": config.locked, "tls": config.tls is not None}


def main(words: list[str]) -> int:
    """Write the object for the file that the one word names; returns the exit status."""
    if len(words) != 1:
        sys.stderr.write("hpml: error: one argument is wanted: a web-config file\n")
        return _WRONG_OPTIONS
    sys.stdout.write(json.dumps(told(words[0])) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
