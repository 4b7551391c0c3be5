"""Complete `stage`: the target of each entry, and the size of data in RAM.

`target: auto` becomes RAM if data and job fit well into memory, else the node's disk. The
staging package is imported only when something is measured.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import HpmlError, InputError
from hpml_orchestrator.records.units import MIB, size_text

if TYPE_CHECKING:
    from hpml_orchestrator.records.job import Job, Stage
    from hpml_orchestrator.runs.load import ResolvedJob
    from hpml_orchestrator.site.model import Site

RAM_SHARE = 0.5
"""Share of the memory not requested by the job that staging may use: the rest is for the page
cache, for other jobs, and for unforeseen needs of the job."""

_PAGE_BYTES = 4096
_ANY_BYTES = 1 << 62
_COMPRESSED = (
    ".gz",
    ".tgz",
    ".xz",
    ".bz2",
    ".txz",
    ".tbz2",
    ".tbz",
    ".zst",
    ".zstd",
    ".tzst",
    ".lz4",
)


@dataclass(frozen=True)
class NodeRoom:
    """The least memory and disk of the nodes that a job may run on; None if unknown."""

    memory_mib: int | None = None  # that jobs can have
    disk_mib: int | None = None  # size of the local disk


def room_of_site(job: Job, site: Site | None) -> NodeRoom:
    """Return the nodes' memory and disks by the site profile, for a job's partition."""
    if site is None:
        return NodeRoom()
    partition = job.resources.partition
    kinds = site.node_types_of(partition)
    profiles = [site.partitions.get(name) for name in site.partitions_of(partition)]
    limits = [profile.max_memory_per_node for profile in profiles if profile]
    memory = [kind.memory or 0 for kind in kinds]
    disks = [kind.local_disk or 0 for kind in kinds]
    return NodeRoom(
        memory_mib=min([*memory, *filter(None, limits)]) if kinds and all(memory) else None,
        disk_mib=min(disks) if kinds and all(disks) else None,
    )


def resolve_stage_targets(
    resolved: ResolvedJob, room: NodeRoom = NodeRoom()
) -> tuple[ResolvedJob, dict[str, str]]:
    """Return the job with a target for every `auto`, and the size of all data in RAM.

    The second value is the reason for each choice, by the name of the entry.

    Files in /dev/shm count as the job's memory, so `--mem` has to include them: where memory is
    asked for, the size is measured if the job file does not give it.

    Raises:
        InputError: the source does not exist, or is a compressed archive whose size must be given.
    """
    job = resolved.job
    own = job.resources.node_memory
    origins = dict(resolved.origins)
    stages: list[Stage] = []
    reasons: dict[str, str] = {}
    in_ram = 0
    for index, given in enumerate(job.stage):
        stage = given
        needed = own and stage.target in ("shm", "auto") and stage.size is None
        if needed and (stage.target == "shm" or not is_compressed(stage)):
            stage = dataclasses.replace(stage, size=_size(stage, index))
            origins[f"stage.{index}.size"] = "measured"
        size = stage.size or 0
        if stage.target == "auto":
            target, why = _target(size, own, in_ram, room)
            stage = dataclasses.replace(stage, target=target)
            origins[f"stage.{index}.target"] = f"auto: {why}"
            reasons[stage.name] = why
        if stage.target == "shm":
            in_ram += size
        stages.append(stage)
    job = dataclasses.replace(job, stage=tuple(stages))
    return dataclasses.replace(resolved, job=job, origins=origins), reasons


def _target(size: int, own: int, in_ram: int, room: NodeRoom) -> tuple[str, str]:
    """Return the target of an entry of `stage`, and the reason, without characters to quote.

    Sizes are in MiB per node: of its data once staged (0: not known), of what the job asks for
    itself (0: nothing), and of what other entries bring to RAM.
    """
    # Without --mem the cluster gives a default that staged files would eat into: they count as the
    # job's memory, and the kernel would kill the ranks.
    if not own:
        return "local", "the job asks for no memory, to which the data in RAM would be added"
    if not size:
        return "local", "its size is not known, and RAM has to be requested"
    if room.memory_mib is None:
        return "local", "node memory is unknown, define it in the site profile"
    left = max(0, room.memory_mib - own)
    beside = f"{size_text(left)} of node memory left by the {size_text(own)} of the job"
    if room.disk_mib is not None and size > room.disk_mib and in_ram + size <= left:
        disk = size_text(room.disk_mib)
        return "shm", f"{size_text(size)} fit into the {beside}, not on a disk of {disk}"
    data = size_text(size) + (f" with {size_text(in_ram)} of other data" if in_ram else "")
    if in_ram + size <= RAM_SHARE * left:
        return "shm", f"{data} are at most half of the {beside}"
    return "local", f"{data} are more than half of the {beside}"


def is_compressed(stage: Stage) -> bool:
    """Whether the size of an archive's content is unknown before unpacking."""
    from hpml_orchestrator.staging.request import SUFFIXES  # noqa: PLC0415 - few jobs stage data

    name = stage.source.lower()
    kind: str = stage.kind
    if kind == "auto" and not os.path.isdir(stage.source):
        kind = next((kind for end, kind in SUFFIXES.items() if name.endswith(end)), "file")
    return kind == "tar" and name.endswith(_COMPRESSED)


def _size(stage: Stage, index: int) -> int:
    """Return the measured size of an entry in MiB, with errors that name its field."""
    try:
        size = None if is_compressed(stage) else _bytes_in_ram(stage)
    except (HpmlError, OSError) as error:
        if isinstance(error, OSError):
            message = f"cannot be read: {error.strerror or error}"
            hint = "or give `size`, and the source is not looked at before the job runs"
        else:  # a damaged archive, or one that holds what staging refuses
            message, hint = error.message, error.hint
        field = f"stage.{index}.source"
        raise InputError(message, field=field, value=stage.source, hint=hint) from error
    if size is None:
        raise InputError(
            "must be given for a compressed archive that is unpacked into RAM",
            field=f"stage.{index}.size",
            hint=f"`size: 40G`, or whatever {stage.source} holds",
        )
    return max(1, -(-size // MIB))


def _bytes_in_ram(stage: Stage) -> int | None:
    from hpml_orchestrator.staging.request import Retry  # noqa: PLC0415 - only for `target: auto`
    from hpml_orchestrator.staging.space import INODE_BYTES  # noqa: PLC0415 - few stage
    from hpml_orchestrator.staging.stage import open_source  # noqa: PLC0415 - as above

    with contextlib.closing(open_source(stage, Retry(), _ANY_BYTES)) as source:
        return None if source.ordered else source.plan().need(_PAGE_BYTES, INODE_BYTES).bytes
