"""Target files, one per job and node, in which Prometheus finds the exporters of running jobs.

The format is that of Prometheus' `file_sd_configs`. An agent updates the modification time of its
file every minute, so an old file belongs to an agent or node that died. A later agent or command of
the same user removes it. If the agent was only suspended, it writes the file again.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import re
import stat
import time
from pathlib import Path
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import RecordError
from hpml_orchestrator.records.files import write_text

if TYPE_CHECKING:
    from collections.abc import Mapping

RENEW_SECONDS = 60.0
"""Interval at which an agent updates its file."""

STALE_SECONDS = 600.0
"""Age at which the agent counts as dead: ten missing updates."""

_UNSAFE = re.compile(r"[^A-Za-z0-9._+-]")
_OURS = re.compile(r"[A-Za-z0-9._+-]+@[A-Za-z0-9._+-]+\.json(\.\w+)?")


def is_loopback(host: str) -> bool:
    """Return whether a host is `localhost` or a loopback address.

    >>> [is_loopback(host) for host in ("127.0.0.1", "127.8.9.1", "::1", "localhost")]
    [True, True, True, True]
    >>> [is_loopback(host) for host in ("", "0.0.0.0", "node1", "127.example.org")]
    [False, False, False, False]
    """
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def default_directory(root: Path) -> Path:
    """Return the default directory of target files."""
    return root / "targets"


def target_name(run: str, key: str, node: str) -> str:
    """Return the name of a target file.

    Args:
        run: the run's id.
        key: cluster and job id.
        node: Slurm's name of the node.

    >>> target_name("digits-20240101-120000-abcdef", "elbe-17", "gpu01")
    'digits-20240101-120000-abcdef.elbe-17@gpu01.json'
    """
    words = (_UNSAFE.sub("_", word) for word in (run, key, node))
    return "{}.{}@{}.json".format(*words)


def publish(path: Path, address: str, labels: Mapping[str, str]) -> None:
    """Write a target file atomically, readable by everybody.

    Args:
        path: the file; its directory is created if missing.
        address: HOST:PORT of the exporter.
        labels: added to all its series.

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
    """Update the time of a target file; return False if it is missing or not writable."""
    try:
        os.utime(path, follow_symlinks=False)
    except OSError:
        return False
    return True


def withdraw(path: Path) -> None:
    """Remove a target file if it exists."""
    with contextlib.suppress(OSError):
        os.unlink(path)


def withdraw_run(directory: Path, run: str) -> None:
    """Remove the target files of a finished run or of all tasks of an array."""
    begin = f"{_UNSAFE.sub('_', run)}."
    for path in _own_files(directory):
        if path.name.startswith(begin):
            withdraw(path)


def remove_stale(directory: Path) -> list[str]:
    """Remove this user's target files of dead agents; return their names.

    If a wrong clock removes the file of a live agent, the agent writes it again.
    """
    stale_before = time.time() - STALE_SECONDS
    stale = [path for path, modified in _own_files(directory).items() if modified < stale_before]
    for path in stale:
        withdraw(path)
    return [path.name for path in stale]


def _own_files(directory: Path) -> dict[Path, float]:
    """Return this user's target files, including temporary ones of killed writers, with mtimes.

    Ignore links and pipes: several users may write to the directory.
    """
    files = {}
    with contextlib.suppress(OSError):
        for entry in sorted(os.scandir(directory), key=lambda entry: entry.name):
            info = entry.stat(follow_symlinks=False)
            own = stat.S_ISREG(info.st_mode) and info.st_uid == os.geteuid()
            if own and _OURS.fullmatch(entry.name):
                files[directory / entry.name] = info.st_mtime
    return files
