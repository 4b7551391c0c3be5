"""How the local backend starts Python: its supervisors, and the srun on a job's PATH."""

from __future__ import annotations

import os
import sys
from pathlib import Path

__all__ = ["BOOT_SUPERVISOR", "package_parent", "srun_script"]

# Python isolated from the user's variables and directory; the package is taken from where this
# module lies, be that a checkout or site-packages, and nothing else is taken from there.
_BOOT = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); import hpml_orchestrator; del sys.path[0]; "
)
BOOT_SUPERVISOR = (
    "import os; os.fork() and os._exit(0); "
    + _BOOT
    + "from hpml_orchestrator.scheduler.local.supervisor import main; sys.exit(main(sys.argv[1:]))"
)
"""Code for `python -c` that becomes a supervisor; its first argument is `package_parent()`."""

_BOOT_SRUN = (
    _BOOT + "from hpml_orchestrator.scheduler.local.srun import main; sys.exit(main(sys.argv[1:]))"
)


def package_parent() -> str:
    """Return the directory that this package lies in."""
    return str(Path(__file__).resolve().parents[3])


def srun_script() -> bytes:
    """Return the text of a job's `bin/srun`."""
    python = _quoted(sys.executable)
    return (
        b"#!/bin/sh\n"
        b"# srun of hpml's local backend, written at submission.\n"
        b"exec " + python + b" -I -S -c " + _quoted(_BOOT_SRUN) + b" "
        b"" + _quoted(package_parent()) + b' "$@"\n'
    )


def _quoted(text: str) -> bytes:
    return b"'" + os.fsencode(text).replace(b"'", b"'\\''") + b"'"
