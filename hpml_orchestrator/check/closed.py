"""Tell what may not be looked at from what is not there: where a directory above it is closed."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpml_orchestrator.check.finding import Finding

__all__ = ["with_closed"]

_WITHIN = {"venv.missing": "bin/activate", "conda.missing": "conda-meta"}
"""What was looked for inside of the path, by the finding's code."""


def with_closed(found: Iterable[Finding], directory: str) -> list[Finding]:
    """Return findings, those of paths behind a closed directory with that as their reason.

    Args:
        found: what is wrong with a job; those about missing paths end in `.missing`.
        directory: what relative paths are relative to.
    """
    return [_told(finding, directory) for finding in found]


def _told(finding: Finding, directory: str) -> Finding:
    value = finding.value
    if not finding.code.endswith(".missing") or not isinstance(value, str) or "/" not in value:
        return finding
    path = os.path.join(directory, value.partition(":")[0], _WITHIN.get(finding.code, ""))
    try:
        os.stat(path)
    except PermissionError as error:
        door = _closed(Path(path))
        return replace(
            finding,
            message=f"{value} cannot be looked at by you: {error.strerror}",
            hint=f"`ls -ld {door}`; ask its owner for the right to enter it",
        )
    except OSError:
        pass
    return finding


def _closed(path: Path) -> Path:
    """Return the highest directory above a path that may not be entered."""
    parents = reversed(path.parents)
    return next((one for one in parents if not os.access(one, os.X_OK)), path.parent)
