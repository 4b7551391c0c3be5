"""Fill in what a job leaves open and the script needs: where data goes, and its size in RAM."""

from __future__ import annotations

import dataclasses
import errno
import os
import stat
import tarfile
import time
import zipfile
from typing import TYPE_CHECKING

from hpml_orchestrator.batch.stage_target import NodeRoom, choose_target
from hpml_orchestrator.errors import HpmlError, InputError
from hpml_orchestrator.staging.faults import Retry
from hpml_orchestrator.staging.packindex import TREE_FILE, read_index
from hpml_orchestrator.staging.request import PACK_INDEX, SUFFIXES, TAR_SUFFIXES
from hpml_orchestrator.staging.tarplain import TarSource

if TYPE_CHECKING:
    from hpml_orchestrator.spec import ResolvedJob, Stage

__all__ = ["chosen_targets", "is_compressed", "measured", "tree_bytes"]

AUTO = "auto: "
"""Begins the origin of a target that was chosen; the reason follows."""

_MEBIBYTE = 1024**2
_PAGE_BYTES = 4096
_ANY_BYTES = 1 << 62
_COMPRESSED = tuple(one for one in TAR_SUFFIXES if one != ".tar")


def measured(resolved: ResolvedJob, room: NodeRoom | None = None) -> ResolvedJob:
    """Return the job with a target for every `auto`, and the size of all that goes to RAM.

    Files in /dev/shm count as the job's memory, so `--mem` has to include them: where memory is
    asked for, the size is measured if the job file does not give it.

    Args:
        resolved: the job.
        room: what the nodes have; nothing is known of them when left out.

    Raises:
        InputError: the source is not there, or is a compressed archive whose size must be said.
    """
    job = resolved.job
    own = int((job.resources.memory or "0M").removesuffix("M"))
    origins = dict(resolved.origins)
    stages: list[Stage] = []
    in_ram = 0
    for index, given in enumerate(job.stage):
        stage = given
        needed = own and stage.target in ("shm", "auto") and stage.size is None
        if needed and (stage.target == "shm" or not is_compressed(stage)):
            stage = stage.model_copy(update={"size": _size(stage, index)})
            origins[f"stage.{index}.size"] = "measured"
        size = int(stage.size.removesuffix("M")) if stage.size else None
        if stage.target == "auto":
            target = choose_target(size, own_mib=own, in_ram_mib=in_ram, room=room or NodeRoom())
            stage = stage.model_copy(update={"target": target.target})
            origins[f"stage.{index}.target"] = f"{AUTO}{target.why}"
        if stage.target == "shm":
            in_ram += size or 0
        stages.append(stage)
    if stages == job.stage:
        return resolved
    return dataclasses.replace(
        resolved, job=job.model_copy(update={"stage": stages}), origins=origins
    )


def chosen_targets(resolved: ResolvedJob) -> dict[str, str]:
    """Return why each `target: auto` of a measured job became what it is, by the entry's name."""
    origins = {
        stage.name: f"stage.{index}.target" for index, stage in enumerate(resolved.job.stage)
    }
    told = {name: resolved.origins.get(origin, "") for name, origin in origins.items()}
    return {name: why.removeprefix(AUTO) for name, why in told.items() if why.startswith(AUTO)}


def _size(stage: Stage, index: int) -> str:
    unknown = InputError(
        "must be given for a compressed archive that is unpacked into RAM",
        field=f"stage.{index}.size",
        hint=f"`size: 40G`, or whatever {stage.source} holds",
    )
    if is_compressed(stage):
        raise unknown
    try:
        size = _bytes_in_ram(stage)
    except OSError as error:
        raise InputError(
            f"cannot be read: {error.strerror or error}",
            field=f"stage.{index}.source",
            value=error.filename or stage.source,
            hint="or give `size`, and the source is not looked at before the job runs",
        ) from error
    if size is None:
        raise unknown
    return f"{max(1, -(-size // _MEBIBYTE))}M"


def is_compressed(stage: Stage) -> bool:
    """Tell whether only reading all of an archive would tell what it holds."""
    name = stage.source.lower()
    kind: str = stage.kind
    if kind == "auto":
        kind = next((kind for end, kind in SUFFIXES.items() if name.endswith(end)), "file")
        if kind != "file" and os.path.isdir(stage.source):
            return False
    return kind == "squashfs" or (kind == "tar" and name.endswith(_COMPRESSED))


def _is_archive(stage: Stage, kind: str) -> bool:
    named = stage.source.lower().endswith(f".{kind}") and not os.path.isdir(stage.source)
    return stage.kind == kind or (stage.kind == "auto" and named)


def _bytes_in_ram(stage: Stage) -> int | None:
    """Return what an entry takes in RAM; None for a compressed archive.

    Raises:
        OSError: the source cannot be read.
    """
    if _is_pack(stage):
        return _unpacked_bytes(stage)
    if _is_archive(stage, "zip"):
        return _unzipped_bytes(stage)
    return _untarred_bytes(stage) if _is_archive(stage, "tar") else tree_bytes(stage.source)


def _untarred_bytes(stage: Stage) -> int | None:
    """Return what the members of a plain tar archive take in RAM, by their headers.

    Raises:
        OSError: it cannot be read.
    """
    try:
        source = TarSource(stage.source, Retry(time.sleep, lambda: False), most_bytes=_ANY_BYTES)
        return None if source.ordered else source.plan().need(_PAGE_BYTES).bytes
    except HpmlError as error:
        raise OSError(errno.EBADMSG, str(error), stage.source) from error


def _is_pack(stage: Stage) -> bool:
    if stage.kind == "auto":
        return os.path.isfile(os.path.join(stage.source, PACK_INDEX))
    return stage.kind == "pack"


def _unpacked_bytes(stage: Stage) -> int:
    """Return what the tree of a pack takes in RAM, by its index.

    Raises:
        OSError: it cannot be read.
    """
    try:
        files = sum(map(_pages, read_index(stage.source).files().sizes))
        with tarfile.open(os.path.join(stage.source, TREE_FILE)) as archive:
            others = sum(1 for _ in archive)  # directories and links, a page each
    except (HpmlError, tarfile.TarError) as error:
        raise OSError(errno.EBADMSG, str(error), stage.source) from error
    return files + (others + 1) * _PAGE_BYTES


def _unzipped_bytes(stage: Stage) -> int:
    """Return what the files of a zip archive take in RAM, by its directory.

    Raises:
        OSError: it cannot be read.
    """
    try:
        with zipfile.ZipFile(stage.source) as archive:
            return _PAGE_BYTES + sum(_pages(max(1, one.file_size)) for one in archive.infolist())
    except (zipfile.BadZipFile, NotImplementedError) as error:
        raise OSError(errno.EBADMSG, f"is no zip archive ({error})", stage.source) from error


def tree_bytes(path: str) -> int:
    """Return the bytes that a file or tree takes in RAM: each file rounded up to whole pages."""
    info = os.stat(path)
    if not stat.S_ISDIR(info.st_mode):
        return _pages(info.st_size)
    total = _PAGE_BYTES
    with os.scandir(path) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                total += tree_bytes(entry.path)
            elif entry.is_symlink():
                total += _PAGE_BYTES
            else:
                total += _pages(entry.stat(follow_symlinks=False).st_size)
    return total


def _pages(size: int) -> int:
    return -(-size // _PAGE_BYTES) * _PAGE_BYTES
