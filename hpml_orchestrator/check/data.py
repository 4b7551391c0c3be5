"""Look at a job's data on this machine: what of it could not be staged, and how much there is."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hpml_orchestrator.check.files import Level
from hpml_orchestrator.check.finding import Finding, listed
from hpml_orchestrator.check.stage import Seen, check_staging
from hpml_orchestrator.errors import HpmlError
from hpml_orchestrator.runs.measure import is_compressed
from hpml_orchestrator.staging.request import kind_at

if TYPE_CHECKING:
    from hpml_orchestrator.spec import Job, Stage

__all__ = ["Sizes", "check_stages", "check_targets"]

_MAX_ENTRIES = 200_000
_MAX_LINKS = 2000
"""Links whose text is read: each asks the file system once more, and a few tell the fault."""
_NAMED = 5
_MEBIBYTE = 1024**2
_SCRIPT_BYTES = 1 << 20


@dataclass
class Sizes:
    """What will be staged to each node, in MiB, as far as it could be found out."""

    disk_mib: int = 0
    shm_mib: int = 0


@dataclass
class _Walk:
    """What a walk through a source has seen; `refused` are what staging a tree refuses."""

    ends: float
    clock: Callable[[], float]
    top: str = ""
    real: str = ""
    kind: str = ""
    outside_links: bool = False
    links: int = 0
    refused: list[str] = field(default_factory=list)
    refused_link: bool = False
    entries: int = 0
    size_bytes: int = 0
    closed: list[str] = field(default_factory=list)
    cut: bool = False


def check_stages(
    job: Job, *, seconds: float, clock: Callable[[], float] = time.monotonic
) -> tuple[list[Finding], Sizes]:
    """Return what of the data cannot be staged, and how much there is to stage.

    Args:
        job: a complete job.
        seconds: after which the walk through the data ends.
        clock: seconds that never go back.
    """
    sizes = Sizes()
    found = check_staging(job, {stage.name: _seen(job, stage) for stage in job.stage})
    walk_ends = clock() + seconds
    for index, stage in enumerate(job.stage):
        place = f"stage.{index}.source"
        walk = _Walk(walk_ends, clock, stage.source, outside_links=stage.outside_links)
        try:
            found += _kind(stage, place, walk)
            _look(stage.source, walk)
        except OSError as error:
            found.append(_no_source(index, stage, error))
            continue
        if walk.closed:
            found.append(
                Finding(
                    "error",
                    "stage.unreadable",
                    place,
                    stage.source,
                    f"cannot be read by you: {listed(walk.closed[:_NAMED])}"
                    + (" and others" if len(walk.closed) > _NAMED else ""),
                    hint=f"`ls -l {walk.closed[0]}`; ask its owner for the right to read",
                )
            )
        if walk.refused:
            found.append(_refused(stage, place, walk))
        if walk.cut:
            found.append(
                Finding(
                    "warning",
                    "stage.partly",
                    place,
                    stage.source,
                    f"only the first {walk.entries} entries were looked at",
                )
            )
        _add(sizes, stage, walk)
    return found, sizes


def check_targets(job: Job) -> list[Finding]:
    """Return which directories that data is to go to cannot be used here.

    Only where this machine is the one that stages: the nodes' own directories are seen there alone.

    Args:
        job: a complete job.
    """
    from hpml_orchestrator.staging.root import Root  # noqa: PLC0415 - few jobs need it

    found = []
    for index, stage in enumerate(job.stage):
        if not stage.target.startswith("/"):
            continue
        place = f"stage.{index}.target"
        root = Root(stage.target)
        try:
            root.check_base()
        except HpmlError as error:
            message = error.message.removeprefix("target: ")
            found.append(
                Finding("error", "stage.target", place, stage.target, message, hint=error.hint)
            )
            continue
        inner = root.path if os.path.isdir(root.path) else root.base
        if not os.access(inner, os.W_OK | os.X_OK):
            message = "cannot be written by you"
            found.append(Finding("error", "stage.target", place, inner, f"{inner} {message}"))
    return found


def _kind(stage: Stage, place: str, walk: _Walk) -> list[Finding]:
    """Return in which way a source is not of the kind that it is said to be; tells the walk."""
    from hpml_orchestrator.staging.sources import check_archive  # noqa: PLC0415 - few jobs need it

    try:
        walk.kind = kind_at(stage.source, stage.kind)
        walk.real = os.path.realpath(stage.source)
        check_archive(stage.source, walk.kind)
    except PermissionError:
        return []  # the walk names what is closed
    except HpmlError as error:
        message = error.message.removeprefix("source: ")
        return [Finding("error", "stage.kind", place, stage.source, message, hint=error.hint)]
    return []


def _refused(stage: Stage, place: str, walk: _Walk) -> Finding:
    from hpml_orchestrator.staging.faults import OUTSIDE_LINKS  # noqa: PLC0415 - few jobs need it

    more = len(walk.refused) - _NAMED
    return Finding(
        "error",
        "stage.refused",
        place,
        stage.source,
        f"{stage.source} holds what is not staged: {'; '.join(walk.refused[:_NAMED])}"
        + (f"; and {more} more" if more > 0 else ""),
        hint=OUTSIDE_LINKS if walk.refused_link else "",
    )


def _seen(job: Job, stage: Stage) -> Seen:
    """Look at an entry's source, and where it is partitioned at the program's text."""
    try:
        is_directory = stat.S_ISDIR(os.stat(stage.source).st_mode)
    except OSError:
        is_directory = None
    if stage.distribution != "partition" or job.script is None:
        return Seen(is_directory)
    try:
        with open(job.script, "rb") as stream:
            text = stream.read(_SCRIPT_BYTES)
    except OSError:
        return Seen(is_directory)
    return Seen(is_directory, any(word in text for word in (b"HPML_PART", b"PartSampler")))


def _add(sizes: Sizes, stage: Stage, walk: _Walk) -> None:
    if stage.size is not None:
        mebibytes = int(stage.size.removesuffix("M"))
    elif walk.cut or is_compressed(stage):
        return
    else:
        mebibytes = -(-walk.size_bytes // _MEBIBYTE)
    if stage.target == "local":
        sizes.disk_mib += mebibytes
    elif stage.target == "shm":
        sizes.shm_mib += mebibytes


def _no_source(index: int, stage: Stage, error: OSError) -> Finding:
    # With a size the source is not looked at before the job runs: it may be on the nodes alone.
    level: Level = "error" if stage.size is None else "warning"
    return Finding(
        level,
        "stage.missing",
        f"stage.{index}.source",
        stage.source,
        f"{stage.source} cannot be staged: {error.strerror or error}",
        hint="" if stage.size else "if only the nodes have it, give its `size`",
    )


def _look(path: str, walk: _Walk) -> None:
    """Walk through a source; a directory that is closed is named, not entered."""
    info = os.stat(path)
    if not stat.S_ISDIR(info.st_mode):
        walk.entries += 1
        walk.size_bytes += info.st_size
        if not os.access(path, os.R_OK):
            walk.closed.append(path)
        return
    waiting = [path]
    while waiting:
        here = waiting.pop()
        if not os.access(here, os.R_OK | os.X_OK):
            walk.closed.append(here)
            continue
        try:
            with os.scandir(here) as entries:
                for entry in entries:
                    if walk.entries >= _MAX_ENTRIES or walk.clock() > walk.ends:
                        walk.cut = True
                        return
                    _count(entry, walk, waiting)
        except OSError as error:
            walk.closed.append(error.filename or here)


def _count(entry: os.DirEntry[str], walk: _Walk, waiting: list[str]) -> None:
    walk.entries += 1
    if entry.is_dir(follow_symlinks=False):
        waiting.append(entry.path)
    elif entry.is_file(follow_symlinks=False):
        walk.size_bytes += entry.stat(follow_symlinks=False).st_size
        if not os.access(entry.path, os.R_OK):
            walk.closed.append(entry.path)
    elif walk.kind == "tree":
        _judge(entry, walk)


def _judge(entry: os.DirEntry[str], walk: _Walk) -> None:
    """Note what staging refuses of what is neither file nor directory, as staging judges it."""
    from hpml_orchestrator.staging.faults import shown  # noqa: PLC0415 - few jobs need them
    from hpml_orchestrator.staging.plan import NO_FILE, link_fault  # noqa: PLC0415

    path = entry.path[len(walk.top) :].lstrip("/")
    fault = NO_FILE
    if entry.is_symlink():
        if walk.outside_links or walk.links >= _MAX_LINKS:
            return
        walk.links += 1
        fault = link_fault(path, os.readlink(entry.path), walk.real)
        walk.refused_link = walk.refused_link or bool(fault)
    if fault:
        walk.refused.append(f"{shown(path)}: {fault}")
