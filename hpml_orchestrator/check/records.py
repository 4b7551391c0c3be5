"""Look at where records, and so the output of jobs, will lie."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from hpml_orchestrator.check.finding import Finding

__all__ = ["check_records", "one_machine", "one_machines", "unwritable"]

_OF_THIS_NODE = ("/tmp", "/var/tmp", "/dev/shm", "/run")  # noqa: S108 - where no job may write
_IN_MEMORY = ("tmpfs", "ramfs")
_USUAL_CONFIGURATION = "/etc/slurm/slurm.conf"
_LOOPBACK = re.compile(
    r"^\s*(?:SlurmctldHost\s*=\s*[^\s(]+\(127\.|SlurmctldHost\s*=\s*localhost\b)",
    re.IGNORECASE | re.MULTILINE,
)


def check_records(root: Path, *, on_nodes: bool, mounts: str = "/proc/mounts") -> list[Finding]:
    """Return whether records can be written, and whether the nodes will see them.

    Args:
        root: where records live.
        on_nodes: whether the job runs on other machines than this one.
        mounts: the table of mounts, for tests.
    """
    found = []
    place = unwritable(root)
    if place:
        found.append(
            Finding(
                "error",
                "records.unwritable",
                "--records",
                str(root),
                f"{place} cannot be written by you",
                hint="set HPML_HOME to a directory that you can write and the nodes see",
            )
        )
    alone = one_machines(root, mounts)
    if on_nodes and alone:
        found.append(
            Finding(
                "warning",
                "records.local",
                "--records",
                str(root),
                f"{root} is on this machine alone ({alone}); the nodes would not find "
                "the job's files",
                hint="set HPML_HOME to a directory that the nodes see",
            )
        )
    return found


def unwritable(path: Path) -> str:
    """Return the directory, there already, that has to be written for a path and cannot be."""
    place = _existing(path)
    return "" if place.is_dir() and os.access(place, os.W_OK | os.X_OK) else str(place)


def one_machines(path: Path, mounts: str = "/proc/mounts") -> str:
    """Return why other machines do not see a directory; empty where nothing says so."""
    real = os.path.realpath(path)
    below = next((one for one in _OF_THIS_NODE if real.startswith(f"{one}/")), "")
    kind = _file_system(real, mounts)
    return below or (kind if kind in _IN_MEMORY else "")


def one_machine(environment: Mapping[str, str]) -> bool:
    """Return whether the cluster is seen to be this machine: its controller is on loopback."""
    path = environment.get("SLURM_CONF", _USUAL_CONFIGURATION)
    try:
        text = Path(path).read_text("utf-8", errors="replace")
    except OSError:
        return False
    return _LOOPBACK.search(text) is not None


def _existing(path: Path) -> Path:
    path = Path(os.path.abspath(path))
    while not os.path.lexists(path) and path != path.parent:
        path = path.parent
    return path


def _file_system(path: str, mounts: str) -> str:
    """Return the type of the file system that a path lies on; empty where nobody knows."""
    best, kind = "", ""
    try:
        lines = Path(mounts).read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    for line in lines:
        words = line.split()
        point = words[1].replace("\\040", " ")
        if (path == point or path.startswith(point.rstrip("/") + "/")) and len(point) >= len(best):
            best, kind = point, words[2]
    return kind
