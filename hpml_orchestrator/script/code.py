"""Where a job's code lies, in the words of its script: the live tree, or a snapshot beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpml_orchestrator.script import template

if TYPE_CHECKING:
    from hpml_orchestrator.spec import Job

__all__ = ["CODE_DIRECTORY", "SnapshotPaths", "script_word", "workdir_word"]

CODE_DIRECTORY = "code"
"""Name of the snapshot in the submission's directory."""


@dataclass(frozen=True)
class SnapshotPaths:
    """What of a job lies in its snapshot.

    Attributes:
        workdir: the working directory, relative to the snapshot; empty for its top.
        script: the script, relative to the snapshot; None where it lies outside of it.
    """

    workdir: str
    script: str | None = None


def workdir_word(job: Job, snapshot: SnapshotPaths | None) -> template.Raw:
    """Return the shell word of the directory that the ranks run in."""
    return template.quote(job.workdir) if snapshot is None else _inside(snapshot.workdir)


def script_word(job: Job, snapshot: SnapshotPaths | None) -> template.Raw | str | None:
    """Return the script as a word of the ranks' command."""
    if snapshot is None or snapshot.script is None:
        return job.script
    return _inside(snapshot.script)


def _inside(path: str) -> template.Raw:
    """Return the word of a path in the snapshot; it names no submission, as the script must not."""
    rest = f"/{template.quote(path)}" if path else ""
    return template.Raw(f'"$hpml_submission"/{CODE_DIRECTORY}{rest}')
