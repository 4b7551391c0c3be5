"""Make a pack: tar archives and an index of a tree."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any

from hpml_orchestrator.errors import InputError, NotFoundError, StagingError
from hpml_orchestrator.packing.dest import Destination, stripe
from hpml_orchestrator.packing.index import Archive, Row, write_index
from hpml_orchestrator.packing.layout import lay_out, place
from hpml_orchestrator.packing.shards import Part, ShardWriter, read_part
from hpml_orchestrator.packing.workers import default_workers, in_parallel
from hpml_orchestrator.staging.capacity import Need, check_room, room_at
from hpml_orchestrator.staging.engine import check_directories
from hpml_orchestrator.staging.faults import Problems, Retry, is_directory, shown, why
from hpml_orchestrator.staging.plan import scan_tree

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hpml_orchestrator.packing.layout import Layout
    from hpml_orchestrator.packing.workers import Tell
    from hpml_orchestrator.staging.plan import Plan

__all__ = ["OnPack", "PackRequest", "PackResult", "pack"]

OnPack = Callable[[int, int, int, int], None]
"""Called often with (bytes done, files done, bytes in all, files in all)."""

_LEAST_SHARD_BYTES = 1 << 16


@dataclass(frozen=True)
class PackRequest:
    """What is to be packed, and how.

    Attributes:
        source: a directory.
        dest: the pack's directory.
        shard_bytes: archives do not grow larger, unless one sample alone does.
        workers: processes; 0: one for each CPU that this process may use.
        resume: go on with a pack that was not finished.
        outside_links: pack symbolic links that leave the tree as they are.
    """

    source: str
    dest: str
    shard_bytes: int = 1 << 30
    workers: int = 0
    resume: bool = False
    outside_links: bool = False


@dataclass(frozen=True)
class PackResult:
    """What was packed.

    Attributes:
        pack: the directory.
        shards: archives.
        kept_shards: archives that an earlier run had finished.
        files: regular files, a file with several names once.
        hard_links: further names of files.
        symbolic_links: of all kinds.
        directories: without the top.
        bytes: sizes of the files.
        written_bytes: those that this run read and wrote.
        archive_bytes: sizes of the archives.
        seconds: wall time of this run, reading the tree included.
        index_sha256: of the index behind its first 40 bytes.
        note: something to know; empty when there is nothing.
    """

    pack: str
    shards: int
    kept_shards: int
    files: int
    hard_links: int
    symbolic_links: int
    directories: int
    bytes: int
    written_bytes: int
    archive_bytes: int
    seconds: float
    index_sha256: str
    note: str


def pack(request: PackRequest, on_pack: OnPack = lambda *_: None) -> PackResult:
    """Make a pack of a tree, or complete one.

    Args:
        request: what is wanted.
        on_pack: is told how far it is.

    Raises:
        InputError: source or destination cannot be used as asked.
        CapacityError: it does not fit; found before a byte is written.
        StagingError: something of the source cannot be read or changed, or the destination cannot
            be written. Finished archives stay, for `resume`; no index was written.
    """
    begin = time.monotonic()
    source = _source(request.source)
    if request.shard_bytes < _LEAST_SHARD_BYTES:
        raise InputError("must be at least 64K", field="--shard-size", value=request.shard_bytes)
    dest = Destination(request.dest, source, resume=request.resume)
    try:
        tree = _scan(source, request)
        layout = lay_out(tree, request.shard_bytes)
        if dest.finished is not None:
            return _already(dest, layout, begin)
        _check_room(layout, dest.path)
        dest.sweep(layout)
        note = stripe(dest.path, request.shard_bytes)
        parts = _write(layout, dest.path, request.workers or default_workers(), on_pack)
        problems = Problems(f"cannot pack {shown(source)}")
        check_directories(tree, Retry(), problems)
        problems.raise_any("wait until the tree is complete, then go on with --resume")
        digest = _write_index(layout, parts, dest.path)
        dest.end()
    except BaseException as error:
        dest.leave()
        if not isinstance(error, OSError):
            raise
        path = shown(request.dest)
        raise StagingError(f"cannot write in {path}: {why(error)}") from error
    kept = [part.number for part in parts if part.kept]
    return _result(layout, dest.path, kept, time.monotonic() - begin, digest, note)


def _source(path: str) -> str:
    if not is_directory(path):
        if not os.path.lexists(path):
            raise NotFoundError(f"no such directory: {shown(path)}")
        raise InputError("must be a directory", field="SOURCE", value=path)
    return os.path.realpath(path)


def _scan(source: str, request: PackRequest) -> Plan:
    try:
        return scan_tree(source, Retry(), verb="pack", outside_links=request.outside_links)
    except OSError as error:
        raise StagingError(f"cannot read {shown(request.source)}: {why(error)}") from error


def _check_room(layout: Layout, directory: str) -> None:
    missing = [
        shard
        for number, shard in enumerate(layout.shards)
        if read_part(directory, shard, number) is None
    ]
    room = room_at(directory)
    need = Need(sum(shard.bytes for shard in missing), 2 * len(missing) + 2)
    check_room(need, room, name="DEST", where=shown(directory))


def _write(layout: Layout, directory: str, workers: int, on_pack: OnPack) -> list[Part]:
    """Write the archives, the largest first so that all workers end at about the same time."""
    total = (layout.tree.bytes, len(layout.files))
    done = [0, 0]

    def progress(more_bytes: int, more_files: int) -> None:
        done[0] += more_bytes
        done[1] += more_files
        on_pack(done[0], done[1], *total)

    numbers = sorted(range(len(layout.shards)), key=lambda number: -layout.shards[number].bytes)
    problems = Problems(f"cannot pack {shown(layout.tree.source_root)}")
    parts: list[Part | None] = [None] * len(numbers)
    writer = ShardWriter(layout, directory)

    def work(number: int, tell: Tell) -> tuple[Any, ...]:
        return astuple(writer(number, tell))

    def finished(*values: Any) -> None:
        part = Part(*values)
        for path, reason in part.problems:
            problems.add(path, reason)
        problems.raise_any(
            "if the tree is being written, wait until it is complete; --resume goes on, and packs "
            "again what changed"
        )
        parts[part.number] = part

    in_parallel(
        numbers,
        work,
        workers=workers,
        progress=progress,
        done=finished,
        died="was memory short? What is finished is kept: --resume goes on",
    )
    return [part for part in parts if part is not None]


def _write_index(layout: Layout, parts: Sequence[Part], directory: str) -> str:
    archives = [
        Archive(shard.file, part.bytes, shard.end - shard.first, part.digest)
        for shard, part in zip(layout.shards, parts, strict=True)
    ]
    rows = _rows(layout, parts)
    links = list(_links(layout.tree))
    if links:
        rows = _with_links(list(rows), links)
    return write_index(
        directory, rows, archives, tree=layout.digest(), shard_bytes=layout.shard_bytes
    )


def _rows(layout: Layout, parts: Sequence[Part]) -> Iterator[Row]:
    for number, (shard, part) in enumerate(zip(layout.shards, parts, strict=True)):
        digests = bytes.fromhex(part.digests)
        for at, entry in enumerate(layout.files[shard.first : shard.end]):
            yield Row(
                os.fsencode(entry.path),
                number,
                layout.offsets[shard.first + at],
                entry.size,
                0,
                entry.mode & 0o777,
                entry.mtime_ns // 1_000_000_000,
                digests[at * 16 : at * 16 + 16],
            )


def _links(tree: Plan) -> Iterator[tuple[bytes, bytes, int]]:
    """Yield (name, where it leads, kind) of links; whether a file is there, the caller knows."""
    for hard in tree.hard_links:
        yield os.fsencode(hard.path), os.fsencode(hard.first), 1
    top = tree.source_root.rstrip("/") + "/"
    for link in tree.symlinks:
        real = os.path.realpath(top + link.path)
        if real.startswith(top):
            yield os.fsencode(link.path), os.fsencode(real[len(top) :]), 2


def _with_links(rows: list[Row], links: list[tuple[bytes, bytes, int]]) -> Iterator[Row]:
    wanted = {target for _, target, _ in links}
    found = {row.name: row for row in rows if row.name in wanted}
    for name, target, kind in sorted(links, key=lambda link: link[2]):  # hard links first
        row = found.get(target)
        if row is None:
            continue
        made = row._replace(name=name, kind=kind)
        rows.append(made)
        if name in wanted:
            found[name] = made
    return iter(sorted(rows, key=lambda row: place(row.name)))


def _already(dest: Destination, layout: Layout, begin: float) -> PackResult:
    index = dest.finished
    assert index is not None  # noqa: S101 - asked by the caller
    if index.tree != layout.digest():
        raise InputError(
            "is a finished pack of another tree, of another state of this one, or of another "
            "--shard-size",
            field="DEST",
            value=dest.path,
            hint="take another DEST",
        )
    for archive in index.archives:
        path = os.path.join(dest.path, archive.file)
        if not os.path.exists(path) or os.path.getsize(path) != archive.bytes:
            raise StagingError(f"{shown(path)} is damaged", hint="`hpml pack --verify` tells more")
    dest.end()
    kept = range(len(layout.shards))
    seconds = time.monotonic() - begin
    return _result(layout, dest.path, kept, seconds, index.digest, "the pack was finished before")


def _result(
    layout: Layout, path: str, kept: Sequence[int], seconds: float, digest: str, note: str
) -> PackResult:
    tree = layout.tree
    kept_bytes = sum(
        entry.size
        for number in kept
        for entry in layout.files[layout.shards[number].first : layout.shards[number].end]
    )
    return PackResult(
        path,
        len(layout.shards),
        len(kept),
        len(tree.files),
        len(tree.hard_links),
        len(tree.symlinks),
        len(tree.directories),
        tree.bytes,
        tree.bytes - kept_bytes,
        layout.archive_bytes,
        seconds,
        digest,
        note,
    )
