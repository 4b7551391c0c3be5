"""Check whether a job's data can be staged: options, sources and targets on this machine."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hpml_orchestrator.check.request import CheckFinding, error, warning
from hpml_orchestrator.errors import HpmlError
from hpml_orchestrator.records.mounts import file_system_type
from hpml_orchestrator.records.texts import first_few, human_bytes
from hpml_orchestrator.runs.prepare import is_compressed
from hpml_orchestrator.staging.archives import check_archive
from hpml_orchestrator.staging.plan import CIRCLE, NO_FILE, link_fault
from hpml_orchestrator.staging.request import download_hint, kind_at, links_hint, shown
from hpml_orchestrator.staging.space import capacity_at, room_at
from hpml_orchestrator.staging.store import NodeStore

if TYPE_CHECKING:
    from hpml_orchestrator.records.job import Job, Stage

_MAX_ENTRIES = 200_000
_NAMED = 5
_MANY_FILES = 10_000
_SLOW_METADATA = ("lustre", "gpfs")
_WRITTEN = re.compile(r"out|save|log|check|ckpt|result|cache|tmp", re.IGNORECASE)  # not read
_MEBIBYTE = 1024**2


@dataclass
class _Walk:
    """Results of a walk through a source; `refused` lists what staging a tree would refuse."""

    stage: Stage
    ends: float
    clock: Callable[[], float]
    kind: str = ""
    entries: int = 0
    size_bytes: int = 0
    cut: bool = False
    unreadable: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)


def check_stages(
    job: Job, *, seconds: float, clock: Callable[[], float] = time.monotonic
) -> tuple[list[CheckFinding], dict[str, int]]:
    """Return findings about data that cannot be staged, and the data's sizes in MiB, by target.

    The walk through the data ends after `seconds`.
    """
    sizes: dict[str, int] = {}
    findings: list[CheckFinding] = []
    ends = clock() + seconds
    for index, stage in enumerate(job.stage):
        place = f"stage.{index}"
        findings += _options(job, stage, place)
        if hint := download_hint(stage.source, job.workdir):
            message = f"{stage.source} is a URL, and hpml stages files"
            if hint.startswith("download"):
                hint += ", or in environment.setup, and leave `stage` out"
            findings.append(
                error("stage.url", f"{place}.source", stage.source, message, None, hint)
            )
            continue
        walk = _Walk(stage, ends, clock)
        try:
            findings += _kind(stage, f"{place}.source", walk)
            _look(walk)
        except OSError as fault:
            findings.append(_no_source(stage, f"{place}.source", fault))
        findings += _walk_findings(walk, f"{place}.source")
        _add(sizes, stage, walk)
    findings += _many_files(job, ends, clock)
    return findings, sizes


def check_targets(
    job: Job, sizes: Mapping[str, int], bases: Mapping[str, str]
) -> Iterator[CheckFinding]:
    """Yield target directories that cannot be used on this machine, or have too little room.

    Only for a job that runs here; `bases` are the directories for `shm` and `local`, and `sizes`
    are
    MiB by target.
    """
    for target, mebibytes in sizes.items():
        base, need = bases.get(target, target), mebibytes * _MEBIBYTE
        with contextlib.suppress(OSError):  # missing directories are reported below
            room = room_at(base)
            index = next(index for index, stage in enumerate(job.stage) if stage.target == target)
            message = f"the data are {human_bytes(need)}, and {human_bytes(max(0, room.bytes))} "
            message += f"are available in {base} ({room.limit})"
            hint = "choose another target; data that is kept there already needs no more room"
            level = error if need > capacity_at(base) else warning
            if need > room.bytes:
                yield level("stage.room", f"stage.{index}.target", target, message, None, hint)
    for index, stage in enumerate(job.stage):
        if not stage.target.startswith("/"):
            continue
        place = f"stage.{index}.target"
        store = NodeStore(stage.target)
        try:
            store.check_base()
        except HpmlError as fault:
            yield error("stage.target", place, stage.target, fault.message, None, fault.hint)
            continue
        inner = store.path if os.path.isdir(store.path) else store.base
        if not os.access(inner, os.W_OK | os.X_OK):
            yield error("stage.target", place, inner, f"{inner} is not writable by you")


def _options(job: Job, stage: Stage, place: str) -> Iterator[CheckFinding]:
    if stage.keep and stage.target == "shm":
        message = f"{stage.name} stays in the memory of the nodes after the job, until room is "
        message += "needed; many sites empty /dev/shm between jobs or charge the next job for it"
        hint = "`target: local` keeps it on the disk"
        yield warning("stage.keep_ram", f"{place}.keep", True, message, None, hint)
    if stage.distribution == "chain" and job.resources.nodes == 1:
        message = "the job has one node: there is nothing to distribute"
        yield warning("stage.one_node", f"{place}.distribution", "chain", message)


def _kind(stage: Stage, place: str, walk: _Walk) -> Iterator[CheckFinding]:
    """Yield an error if a source is not of its `kind`; set the walk's kind."""
    try:
        walk.kind = kind_at(stage.source, stage.kind)
        check_archive(stage.source, walk.kind)
    except PermissionError:
        pass  # the walk reports what is unreadable
    except HpmlError as fault:
        yield error("stage.kind", place, stage.source, fault.message, None, fault.hint)


def _no_source(stage: Stage, place: str, fault: OSError) -> CheckFinding:
    message = f"{stage.source} cannot be staged: {fault.strerror or fault}"
    if stage.size is not None:  # need not exist here: it may be on the nodes only
        return warning("stage.missing", place, stage.source, message)
    hint = "if only the nodes have it, give its `size`"
    return error("stage.missing", place, stage.source, message, None, hint)


def _look(walk: _Walk) -> None:
    """Walk through a source and record what cannot be read."""
    source = walk.stage.source
    info = os.stat(source)
    if not stat.S_ISDIR(info.st_mode):
        walk.entries += 1
        walk.size_bytes += info.st_size
        if not os.access(source, os.R_OK):
            walk.unreadable.append(source)
        return

    def note(fault: OSError) -> None:
        walk.unreadable.append(fault.filename or source)

    follow = walk.stage.follow_links
    for directory, directories, files in os.walk(source, onerror=note, followlinks=follow):
        for name in [one for one in directories if follow and _is_above(directory, one)]:
            directories.remove(name)
            walk.refused.append(f"{shown(os.path.join(directory, name))}: {CIRCLE}")
        for name in [*directories, *files]:
            # Two limits: time for a slow file server, number of entries for a fast one with
            # millions of files. Then sizes are unknown, and nothing is concluded from a part.
            if walk.entries >= _MAX_ENTRIES or walk.clock() > walk.ends:
                walk.cut = True
                return
            walk.entries += 1
            try:
                _look_at(os.path.join(directory, name), walk)
            except OSError as fault:
                note(fault)


def _is_above(directory: str, name: str) -> bool:
    real = os.path.realpath(os.path.join(directory, name))
    return os.path.commonpath([real, os.path.realpath(directory)]) == real


def _look_at(path: str, walk: _Walk) -> None:
    info = os.stat(path, follow_symlinks=walk.stage.follow_links and os.path.exists(path))
    if stat.S_ISREG(info.st_mode):
        walk.size_bytes += info.st_size
        if not os.access(path, os.R_OK):
            walk.unreadable.append(path)
    elif walk.kind == "tree" and not stat.S_ISDIR(info.st_mode):
        inner = path.removeprefix(walk.stage.source).lstrip("/")
        fault = NO_FILE
        if stat.S_ISLNK(info.st_mode):
            top = os.path.realpath(walk.stage.source)
            target = os.readlink(path)
            taken = walk.stage.outside_links or walk.stage.follow_links
            fault = "" if taken else link_fault(inner, target, top)
            if fault:
                walk.outside.append(os.path.join(os.path.dirname(inner), target))
        if fault:
            walk.refused.append(f"{shown(inner)}: {fault}")


def _walk_findings(walk: _Walk, place: str) -> Iterator[CheckFinding]:
    source = walk.stage.source
    if walk.unreadable:
        message = f"not readable by you: {first_few(walk.unreadable, _NAMED)}"
        hint = f"`ls -l {walk.unreadable[0]}`; ask its owner for permission to read it"
        yield error("stage.unreadable", place, source, message, None, hint)
    if walk.refused:
        message = f"{source} contains what cannot be staged: {first_few(walk.refused, _NAMED)}"
        hint = links_hint(os.path.realpath(source), walk.outside) if walk.outside else ""
        yield error("stage.refused", place, source, message, None, hint)
    if walk.cut:
        message = f"only the first {walk.entries} entries were checked"
        yield warning("stage.partly", place, source, message)


def _many_files(job: Job, ends: float, clock: Callable[[], float]) -> Iterator[CheckFinding]:
    """Yield directories of many files on Lustre or GPFS that the program reads in place."""
    for place, words in (("args", job.args), ("command", job.command or ())):
        for index, word in enumerate(words):
            before = words[index - 1] if index and words[index - 1].startswith("-") else ""
            option, equals, value = word.partition("=")
            option, path = (option, value) if equals else (before, word)
            directory = os.path.join(job.workdir, path)
            if not path.strip(".") or _WRITTEN.search(option) or not os.path.isdir(directory):
                continue
            with contextlib.suppress(OSError):
                kind = file_system_type(directory)
                if kind in _SLOW_METADATA and _has_many_files(directory, ends, clock):
                    message = f"{path} has more than {_MANY_FILES:,} files on {kind}: "
                    message += "its metadata servers are slow with many small files"
                    hint = f"`hpml pack {shown(path)} DEST` makes a few large ones; or `stage` it"
                    yield warning("data.many_files", f"{place}.{index}", word, message, None, hint)


def _has_many_files(directory: str, ends: float, clock: Callable[[], float]) -> bool:
    count = 0
    for _, _, files in os.walk(directory):
        count += len(files)
        if count > _MANY_FILES or clock() > ends:
            break
    return count > _MANY_FILES


def _add(sizes: dict[str, int], stage: Stage, walk: _Walk) -> None:
    if stage.size is not None:
        mebibytes = stage.size
    elif walk.cut or is_compressed(stage):
        return
    else:
        mebibytes = -(-walk.size_bytes // _MEBIBYTE)
    sizes[stage.target] = sizes.get(stage.target, 0) + mebibytes
