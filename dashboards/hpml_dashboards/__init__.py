"""Grafana dashboards of hpml's metrics: built from Python, shown without Grafana, or pushed to one.

`json/` holds what `hpml dashboards build` writes; it is kept in the repository, so that showing
and pushing need no SDK.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from hpml_orchestrator.errors import InputError

__all__ = ["JSON", "read_secret"]

JSON = Path(__file__).parent / "json"
"""Directory of the built dashboards, one file each, named by its uid: `hpml-job.json`."""


def read_secret(path: str, option: str) -> str:
    """Return the one line of a file that nobody else may read.

    Args:
        path: the file.
        option: the option that named it, for errors.

    Raises:
        InputError: the file cannot be read, others may read it, or it has not one line of ASCII.
    """
    try:
        with open(path, encoding="utf-8") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            text = file.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot be read: {error}", field=option, value=path) from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        hint = f"chmod 600 {path}"
        raise InputError(f"others can read it: mode {mode:o}", field=option, value=path, hint=hint)
    if not text or not text.isprintable() or not text.isascii():
        raise InputError("must have one line of ASCII", field=option, value=path)
    return text
