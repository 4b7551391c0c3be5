"""Files by which Prometheus finds the exporters of running jobs: one per job and node.

The form is that of Prometheus' `file_sd_configs`. A file says that it is alive by its time of
change, which the job's agent renews every minute. So a file whose agent was killed, or whose node
died, is known by its age, and any later agent or command of its owner may remove it; an agent
whose file was removed in error (it stood still meanwhile) writes it again.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpml_orchestrator.errors import RecordError
from hpml_orchestrator.records.files import write_text

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "RENEW_SECONDS",
    "STALE_SECONDS",
    "default_directory",
    "publish",
    "renew",
    "sweep",
    "target_name",
    "withdraw",
    "withdraw_run",
]

RENEW_SECONDS = 60.0
"""How often an agent says that its file is alive."""

STALE_SECONDS = 600.0
"""Age of a file whose agent is gone: ten signs of life are missing."""

_OTHER = re.compile(r"[^A-Za-z0-9._+-]")
_OURS = re.compile(r"[A-Za-z0-9._+-]+@[A-Za-z0-9._+-]+\.json")
_TEMPORARY = re.compile(r"\.[A-Za-z0-9._+-]+@[A-Za-z0-9._+-]+\.json\.\w+")
_LABELS = {"jobid", "run", "node"}
_MAX_BYTES = 65_536
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def default_directory(root: Path) -> Path:
    """Return where targets are, below the root of records, unless a job says else."""
    return root / "targets"


def target_name(run: str, key: str, node: str) -> str:
    """Return the name of a target's file.

    Args:
        run: the run's id.
        key: cluster and job id.
        node: Slurm's name of the node.

    >>> target_name("digits-20240101-120000-abcdef", "elbe-17", "gpu01")
    'digits-20240101-120000-abcdef.elbe-17@gpu01.json'
    """
    words = (_OTHER.sub("_", word) for word in (run, key, node))
    return "{}.{}@{}.json".format(*words)


def publish(path: Path, address: str, labels: Mapping[str, str]) -> None:
    """Write a target's file: complete or not at all, readable for everybody.

    Args:
        path: the file; its directory is made when missing.
        address: HOST:PORT that Prometheus asks.
        labels: what all of its series get.

    Raises:
        RecordError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RecordError(f"cannot make {path.parent}: {error.strerror or error}") from error
    given = {name: value for name, value in labels.items() if value}
    write_text(path, json.dumps([{"targets": [address], "labels": given}], indent=2) + "\n")


def renew(path: Path) -> bool:
    """Say that a target is alive; returns False where its file is gone or cannot be changed."""
    try:
        os.utime(path, follow_symlinks=False)
    except OSError:
        return False
    return True


def withdraw(path: Path) -> None:
    """Remove a target's file; harmless where it is gone."""
    with contextlib.suppress(OSError):
        os.unlink(path)


def withdraw_run(directory: Path, run: str) -> None:
    """Remove the targets of a run that is over, or of all tasks of an array."""
    begin = f"{_OTHER.sub('_', run)}."
    for name in _names(directory):
        if name.startswith(begin) and _OURS.fullmatch(name) and _is_target(directory / name):
            withdraw(directory / name)


def sweep(directory: Path) -> list[str]:
    """Remove this user's targets whose jobs died without a word; returns their names.

    Ages are by the file server's clock, for that of this node may be off.
    """
    limit = time.time() - STALE_SECONDS
    old = [name for name in _names(directory) if _is_stale(directory / name, limit)]
    if not old:
        return []
    now = _server_time(directory)
    if now is None:
        return []
    removed = []
    for name in old:
        path = directory / name
        if _is_stale(path, now - STALE_SECONDS) and (name.startswith(".") or _is_target(path)):
            withdraw(path)
            removed.append(name)
    return removed


def _names(directory: Path) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []


def _is_stale(path: Path, limit: float) -> bool:
    if not (_OURS.fullmatch(path.name) or _TEMPORARY.fullmatch(path.name)):
        return False
    try:
        told = os.lstat(path)
    except OSError:
        return False
    own = told.st_uid == os.geteuid() and stat.S_ISREG(told.st_mode)
    return own and told.st_mtime < limit


def _is_target(path: Path) -> bool:
    """Whether a file is one that `publish` wrote for us: a directory may have others' beside them.

    What everybody may write holds what anybody likes: pipes, which would never answer, and links.
    """
    try:
        with open(os.open(path, _FLAGS), "rb") as stream:
            about = os.fstat(stream.fileno())
            if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid():
                return False
            told: Any = json.loads(stream.read(_MAX_BYTES))
        return set(told[0]["labels"]) >= _LABELS
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return False


def _server_time(directory: Path) -> float | None:
    """Return the time that the directory's file server has now; None where nothing can be made."""
    try:
        with tempfile.NamedTemporaryFile(prefix=".hpml-time.", dir=directory) as probe:
            return os.fstat(probe.fileno()).st_mtime
    except OSError:
        return None
