"""Fill in what `stage` leaves open: where data goes, and the size of what goes to RAM.

The staging package is imported only when something is measured.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import stat
import time
import zipfile
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import HpmlError, InputError
from hpml_orchestrator.spec.values import size_text

if TYPE_CHECKING:
    from hpml_orchestrator.spec import Job, ResolvedJob, Stage
    from hpml_orchestrator.spec.site import Site

__all__ = [
    "NodeRoom",
    "Target",
    "choose_target",
    "chosen_targets",
    "is_compressed",
    "measured",
    "room_of_site",
    "tree_bytes",
]

_AUTO = "auto: "  # begins the origin of a target that was chosen; the reason follows
_MEBIBYTE = 1024**2
_PAGE_BYTES = 4096
_INODE_BYTES = 1024  # of a tmpfs, as staging counts it
_ANY_BYTES = 1 << 62
_COMPRESSED = tuple(".gz .tgz .xz .bz2 .txz .tbz2 .tbz .zst .zstd .tzst .lz4".split())


def measured(resolved: ResolvedJob, room: NodeRoom | None = None) -> ResolvedJob:
    """Return the job with a target for every `auto`, and the size of all that goes to RAM.

    Files in /dev/shm count as the job's memory, so `--mem` has to include them: where memory is
    asked for, the size is measured if the job file does not give it.

    Args:
        resolved: the job.
        room: what the nodes have; not known when left out.

    Raises:
        InputError: the source does not exist, or is a compressed archive whose size must be given.
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
            origins[f"stage.{index}.target"] = f"{_AUTO}{target.why}"
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
    chosen = {}
    for index, stage in enumerate(resolved.job.stage):
        origin = resolved.origins.get(f"stage.{index}.target", "")
        if origin.startswith(_AUTO):
            chosen[stage.name] = origin.removeprefix(_AUTO)
    return chosen


def is_compressed(stage: Stage) -> bool:
    """Whether only unpacking an archive would tell how much it holds."""
    from hpml_orchestrator.staging.request import SUFFIXES  # noqa: PLC0415 - few jobs stage data

    name = stage.source.lower()
    kind: str = stage.kind
    if kind == "auto" and not os.path.isdir(stage.source):
        kind = next((kind for end, kind in SUFFIXES.items() if name.endswith(end)), "file")
    return kind == "squashfs" or (kind == "tar" and name.endswith(_COMPRESSED))


def tree_bytes(path: str) -> int:
    """Return the bytes that a file or tree takes in RAM: whole pages, and the inodes."""
    info = os.stat(path)
    if not stat.S_ISDIR(info.st_mode):
        return _in_ram(info.st_size)
    total = _in_ram(1)
    with os.scandir(path) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                total += tree_bytes(entry.path)
            else:
                size = 1 if entry.is_symlink() else entry.stat(follow_symlinks=False).st_size
                total += _in_ram(size)
    return total


def _size(stage: Stage, index: int) -> str:
    """Return the measured size of an entry, such as `30M`, with errors that name its field."""
    try:
        size = None if is_compressed(stage) else _bytes(stage)
    except (HpmlError, OSError) as error:
        if isinstance(error, OSError):
            message = f"cannot be read: {error.strerror or error}"
            hint = "or give `size`, and the source is not looked at before the job runs"
        else:  # a damaged archive, or one that holds what staging refuses
            message, hint = error.message.removeprefix("source: "), error.hint
        field = f"stage.{index}.source"
        raise InputError(message, field=field, value=stage.source, hint=hint) from error
    if size is None:
        raise InputError(
            "must be given for a compressed archive that is unpacked into RAM",
            field=f"stage.{index}.size",
            hint=f"`size: 40G`, or whatever {stage.source} holds",
        )
    return f"{max(1, -(-size // _MEBIBYTE))}M"


def _bytes(stage: Stage) -> int | None:
    """Return what an entry takes in RAM once staged; None where only unpacking would tell.

    Raises:
        HpmlError: an archive or pack is damaged or not what the job file says.
        OSError: it cannot be read.
    """
    from hpml_orchestrator.staging.faults import Retry  # noqa: PLC0415 - few jobs stage data
    from hpml_orchestrator.staging.packsource import PackSource  # noqa: PLC0415
    from hpml_orchestrator.staging.request import kind_at  # noqa: PLC0415
    from hpml_orchestrator.staging.tarplain import TarSource  # noqa: PLC0415

    source, links = stage.source, stage.outside_links
    kind = kind_at(source, stage.kind)
    retry = Retry(time.sleep, lambda: False)
    if kind == "tar":
        archive = TarSource(source, retry, most_bytes=_ANY_BYTES, outside_links=links)
        return None if archive.ordered else archive.plan().need(_PAGE_BYTES, _INODE_BYTES).bytes
    if kind == "pack":
        pack = PackSource(source, retry, outside_links=links)
        return pack.plan().need(_PAGE_BYTES, _INODE_BYTES).bytes
    if kind == "zip":
        try:
            with zipfile.ZipFile(source) as members:
                sizes = [max(1, member.file_size) for member in members.infolist()]
        except (zipfile.BadZipFile, NotImplementedError) as error:
            raise OSError(errno.EBADMSG, f"is no zip archive ({error})", source) from error
        return sum(map(_in_ram, [1, *sizes]))
    return None if kind == "squashfs" else tree_bytes(source)


def _in_ram(size: int) -> int:
    return -(-size // _PAGE_BYTES) * _PAGE_BYTES + _INODE_BYTES


RAM_SHARE = 0.5
"""Of the memory that a node has beside what the job asks for, how much staging may take: the rest
is for the page cache, for other jobs, and for what the job did not foresee."""


@dataclass(frozen=True)
class NodeRoom:
    """What the nodes that a job may land on have, each the least of them; None: not known.

    Attributes:
        memory_mib: memory that jobs can have.
        disk_mib: size of the local disk.
        scratch: whether the site names a directory on it.
    """

    memory_mib: int | None = None
    disk_mib: int | None = None
    scratch: bool = False


@dataclass(frozen=True)
class Target:
    """What `auto` became, and why, in words that need no quoting in a script."""

    target: str
    why: str


def room_of_site(job: Job, site: Site | None) -> NodeRoom:
    """Return what a site profile tells of the nodes of a job's partition."""
    if site is None:
        return NodeRoom()
    partition = job.resources.partition
    kinds = site.node_types_of(partition)
    limits = [
        int(one.max_memory_per_node.removesuffix("M"))
        for name in site.partitions_of(partition)
        if (one := site.partitions.get(name)) is not None and one.max_memory_per_node
    ]
    memory = [int(kind.memory.removesuffix("M")) for kind in kinds if kind.memory]
    disks = [int(kind.local_disk.removesuffix("M")) for kind in kinds if kind.local_disk]
    known = bool(kinds) and len(memory) == len(kinds)
    return NodeRoom(
        memory_mib=min([*memory, *limits]) if known else None,
        disk_mib=min(disks) if kinds and len(disks) == len(kinds) else None,
        scratch=site.path("scratch", partition) is not None,
    )


def choose_target(size_mib: int | None, *, own_mib: int, in_ram_mib: int, room: NodeRoom) -> Target:
    """Return where one entry of `stage` goes.

    Args:
        size_mib: of the data once staged, per node; None when it is not known.
        own_mib: memory that the job asks for itself, per node; 0 where it says nothing.
        in_ram_mib: what other entries bring to RAM.
        room: what the nodes have.

    >>> choose_target(100, own_mib=4096, in_ram_mib=0, room=NodeRoom(65536)).target
    'shm'
    """
    if not own_mib:
        return Target(
            "local", "the job asks for no memory, to which what goes to RAM would be added"
        )
    if size_mib is None:
        return Target("local", "its size is not known, and RAM has to be asked for")
    size = size_text(size_mib)
    if room.memory_mib is None:
        return Target("local", "the memory of the nodes is not known, a site profile would tell it")
    left = max(0, room.memory_mib - own_mib)
    beside = f"{size_text(left)} that a node has beside the {size_text(own_mib)} of the job"
    if room.disk_mib is not None and size_mib > room.disk_mib and in_ram_mib + size_mib <= left:
        return Target(
            "shm", f"{size} fit into the {beside}, not on a disk of {size_text(room.disk_mib)}"
        )
    others = f" with {size_text(in_ram_mib)} of other data" if in_ram_mib else ""
    if in_ram_mib + size_mib <= RAM_SHARE * left:
        return Target("shm", f"{size}{others} are at most half of the {beside}")
    return Target("local", f"{size}{others} are more than half of the {beside}")
