"""Fill in what a job leaves open and the script needs: where data goes, and its size in RAM."""

from __future__ import annotations

import dataclasses
import errno
import os
import stat
import time
import zipfile
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import HpmlError, InputError
from hpml_orchestrator.runs.stage_target import NodeRoom, choose_target
from hpml_orchestrator.staging.capacity import INODE_BYTES
from hpml_orchestrator.staging.request import SUFFIXES, kind_at

if TYPE_CHECKING:
    from hpml_orchestrator.spec import ResolvedJob, Stage

__all__ = ["chosen_targets", "is_compressed", "measured", "tree_bytes"]

AUTO = "auto: "
"""Begins the origin of a target that was chosen; the reason follows."""

_MEBIBYTE = 1024**2
_PAGE_BYTES = 4096
_ANY_BYTES = 1 << 62
_COMPRESSED = tuple(".gz .tgz .xz .bz2 .txz .tbz2 .tbz .zst .zstd .tzst .lz4".split())


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
    if is_compressed(stage):
        raise _must_be_given(stage, index)
    try:
        size = _measured_bytes(stage, index)
    except InputError as error:
        if error.field != "source":
            raise
        told = InputError(
            error.message.removeprefix("source: "), field=f"stage.{index}.source", hint=error.hint
        )
        told.value = error.value  # the message has it
        raise told from error
    except HpmlError as error:  # a damaged archive, one that holds what is refused
        raise InputError(
            f"{error}",
            field=f"stage.{index}.source",
            value=stage.source,
            hint=error.hint or "the job could not stage it either",
        ) from error
    except OSError as error:
        raise InputError(
            f"cannot be read: {error.strerror or error}",
            field=f"stage.{index}.source",
            value=error.filename or stage.source,
            hint="or give `size`, and the source is not looked at before the job runs",
        ) from error
    return f"{max(1, -(-size // _MEBIBYTE))}M"


def is_compressed(stage: Stage) -> bool:
    """Tell whether only reading all of an archive would tell what it holds."""
    kind = _kind_by_name(stage)
    return kind == "squashfs" or (kind == "tar" and stage.source.lower().endswith(_COMPRESSED))


def _kind_by_name(stage: Stage) -> str:
    """Return what a source is by its kind, else by the suffixes that staging goes by."""
    if stage.kind != "auto" or os.path.isdir(stage.source):
        return stage.kind
    name = stage.source.lower()
    return next((kind for end, kind in SUFFIXES.items() if name.endswith(end)), "file")


def _must_be_given(stage: Stage, index: int) -> InputError:
    return InputError(
        "must be given for a compressed archive that is unpacked into RAM",
        field=f"stage.{index}.size",
        hint=f"`size: 40G`, or whatever {stage.source} holds",
    )


def _measured_bytes(stage: Stage, index: int) -> int:
    """Return what an entry takes in RAM once staged: of archives, what they hold.

    Raises:
        HpmlError: an archive or pack is damaged or holds what is refused, or it is not of the kind
            that the job says; or only reading all of it would tell.
        OSError: it cannot be read.
    """
    from hpml_orchestrator.staging.faults import Retry  # noqa: PLC0415 - few jobs need them
    from hpml_orchestrator.staging.packsource import PackSource  # noqa: PLC0415
    from hpml_orchestrator.staging.tarplain import TarSource  # noqa: PLC0415

    kind = kind_at(stage.source, stage.kind)
    if kind == "squashfs":
        raise _must_be_given(stage, index)
    if kind == "zip":
        return _unzipped_bytes(stage)
    retry = Retry(time.sleep, lambda: False)
    if kind == "tar":
        archive = TarSource(
            stage.source, retry, most_bytes=_ANY_BYTES, outside_links=stage.outside_links
        )
        if archive.ordered:
            raise _must_be_given(stage, index)
        return archive.plan().need(_PAGE_BYTES, INODE_BYTES).bytes
    if kind == "pack":
        pack = PackSource(stage.source, retry, outside_links=stage.outside_links)
        return pack.plan().need(_PAGE_BYTES, INODE_BYTES).bytes
    return tree_bytes(stage.source)


def _unzipped_bytes(stage: Stage) -> int:
    """Return what the files of a zip archive take in RAM, by its directory.

    Raises:
        OSError: it cannot be read.
    """
    try:
        with zipfile.ZipFile(stage.source) as archive:
            return _in_ram(1) + sum(_in_ram(max(1, one.file_size)) for one in archive.infolist())
    except (zipfile.BadZipFile, NotImplementedError) as error:
        raise OSError(errno.EBADMSG, f"is no zip archive ({error})", stage.source) from error


def tree_bytes(path: str) -> int:
    """Return the bytes that a file or tree takes in RAM: whole pages, and the kernel's own."""
    info = os.stat(path)
    if not stat.S_ISDIR(info.st_mode):
        return _in_ram(info.st_size)
    total = _in_ram(1)
    with os.scandir(path) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                total += tree_bytes(entry.path)
            elif entry.is_symlink():
                total += _in_ram(1)
            else:
                total += _in_ram(entry.stat(follow_symlinks=False).st_size)
    return total


def _in_ram(size: int) -> int:
    return -(-size // _PAGE_BYTES) * _PAGE_BYTES + INODE_BYTES
