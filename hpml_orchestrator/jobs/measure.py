"""Fill in what a job leaves open and the script needs: the size of what is staged into RAM."""

from __future__ import annotations

import dataclasses
import os
import stat
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import InputError

if TYPE_CHECKING:
    from hpml_orchestrator.spec import ResolvedJob

__all__ = ["measured", "tree_bytes"]

_MEBIBYTE = 1024**2
_PAGE_BYTES = 4096
_COMPRESSED = (".gz", ".tgz", ".xz", ".bz2", ".txz", ".tbz2")


def measured(resolved: ResolvedJob) -> ResolvedJob:
    """Return the job with the size of every source that goes to RAM, where memory is asked for.

    Files in /dev/shm count as the job's memory, so `--mem` has to include them.

    Raises:
        InputError: the source is not there, or is a compressed archive whose size must be said.
    """
    job = resolved.job
    if job.resources.memory is None:
        return resolved
    stages = []
    origins = dict(resolved.origins)
    for index, stage in enumerate(job.stage):
        if stage.target != "shm" or stage.size is not None:
            stages.append(stage)
            continue
        field = f"stage.{index}.size"
        if stage.kind != "file" and stage.source.endswith(_COMPRESSED):
            raise InputError(
                "must be given for a compressed archive that is unpacked into RAM",
                field=field,
                hint=f"`size: 40G`, or whatever {stage.source} holds",
            )
        try:
            size = tree_bytes(stage.source)
        except OSError as error:
            raise InputError(
                f"cannot be read: {error.strerror or error}",
                field=f"stage.{index}.source",
                value=error.filename or stage.source,
                hint="or give `size`, and the source is not looked at before the job runs",
            ) from error
        stages.append(stage.model_copy(update={"size": f"{max(1, -(-size // _MEBIBYTE))}M"}))
        origins[field] = "measured"
    return dataclasses.replace(
        resolved, job=job.model_copy(update={"stage": stages}), origins=origins
    )


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
