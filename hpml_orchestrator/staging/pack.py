"""Pack a tree into shards: plain POSIX tar archives, written by several processes at once.

`data-00000.tar` and its successors contain the regular files. `tree.tar` has directories and links;
it is unpacked last, so that directories keep their times. All shards are written to a hidden
directory next to the destination, which is renamed once it is complete.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import stat
import subprocess
import tarfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

from hpml_orchestrator.errors import InputError, NotFoundError, StagingError
from hpml_orchestrator.records.files import fsync_dir
from hpml_orchestrator.records.mounts import file_system_type
from hpml_orchestrator.staging.archives import PACK_COMMENT
from hpml_orchestrator.staging.copy import Tally, check_directories
from hpml_orchestrator.staging.plan import scan_tree
from hpml_orchestrator.staging.request import (
    TREE_SHARD,
    Problems,
    Retry,
    SourceChangedError,
    is_directory,
    shown,
    why,
)
from hpml_orchestrator.staging.source import WRITE_BYTES, TreeSource
from hpml_orchestrator.staging.space import Need, check_room, room_at
from hpml_orchestrator.staging.workers import run_forked

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hpml_orchestrator.staging.plan import CopyPlan, TreeEntry
    from hpml_orchestrator.staging.source import Buffer
    from hpml_orchestrator.staging.workers import Report

OnPack = Callable[[int, int, int, int], None]
"""Called often with (bytes done, files done, total bytes, total files)."""

_LEAST_SHARD_BYTES = 1 << 16
_BLOCK = 512
_END = bytes(2 * _BLOCK)
_NANO = 1_000_000_000
_LONGEST_NAME = 100  # longer names, and sizes of 8 GiB or more, need an extended header
_LARGEST = 8**11
_SURROGATES = re.compile("[\ud800-\udfff]")
_CHANGED = "changed while it was packed"
_PER_STRIPE_BYTES = 256 << 20
_MOST_STRIPES = 8
_LFS_SECONDS = 30


@dataclass(frozen=True)
class PackRequest:
    """A request to pack a directory.

    Attributes:
        source: a directory.
        dest: directory for the shards, new or empty.
        shard_bytes: maximum size of a shard, unless a single sample is larger.
        workers: number of processes; 0 for one per CPU that this process may use.
        outside_links: pack symbolic links that leave the tree unchanged.
    """

    source: str
    dest: str
    shard_bytes: int = 1 << 30
    workers: int = 0
    outside_links: bool = False


@dataclass(frozen=True)
class PackResult:
    """Result of packing.

    Attributes:
        pack: the directory.
        shards: number of archives.
        files: number of regular files, counting a file with several names once.
        hard_links: number of additional names of files.
        symbolic_links: number of all symbolic links.
        directories: number of directories, without the top.
        bytes: total size of the files.
        archive_bytes: total size of the archives.
        seconds: wall time, including the scan of the tree.
        note: a remark for the user; may be empty.
    """

    pack: str
    shards: int
    files: int
    hard_links: int
    symbolic_links: int
    directories: int
    bytes: int
    archive_bytes: int
    seconds: float
    note: str


def pack(
    request: PackRequest,
    on_pack: OnPack = lambda *_: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> PackResult:
    """Pack a tree into shards: all of them, or none.

    Args:
        request: what to pack.
        on_pack: called with the progress.
        should_stop: called ten times a second; True ends packing with StagingStopped.

    Raises:
        InputError: source or destination cannot be used.
        CapacityError: it does not fit; found before anything is written.
        StagingError: part of the source cannot be read or has changed, or the destination cannot
            be written.
    """
    begin = time.monotonic()
    source, dest = _source(request.source), _dest(request)
    retry = Retry(should_stop=should_stop)
    try:
        tree = scan_tree(source, retry, verb="pack", outside_links=request.outside_links)
    except OSError as error:
        raise StagingError(f"cannot read {shown(request.source)}: {why(error)}") from error
    shards = list(_shards(tree, request.shard_bytes))
    above, name = os.path.split(dest)
    others = _others(above, name)
    # Next to the destination, so that the final rename stays within one file system and is atomic:
    # a pack is complete or absent, even after a crash.
    partial = f"{above}/.{name}.packing-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        os.makedirs(partial)
        need = sum(sum(map(_stored, shard)) + len(_END) for shard in shards)
        need += _BLOCK * 3 * (len(tree.directories) + len(tree.symlinks) + len(tree.hard_links))
        check_room(Need(need, len(shards) + 2), room_at(above), name="DEST", where=shown(above))
        # Lustre takes a file's striping from its directory when the file is created, so set it
        # before the first shard is written.
        note = _stripe(partial, request.shard_bytes)
        _write(tree, shards, partial, request.workers, retry, on_pack)
        # The shards' contents are on disk. Sync their names before the rename, and the new name
        # after it.
        fsync_dir(partial)
        archive_bytes = sum(os.stat(f"{partial}/{one}").st_size for one in os.listdir(partial))
        os.rename(partial, dest)
        fsync_dir(above)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if not isinstance(error, OSError):
            raise
        raise StagingError(f"cannot write {shown(request.dest)}: {why(error)}") from error
    return PackResult(
        pack=dest,
        shards=len(shards) + 1,
        files=len(tree.files),
        hard_links=len(tree.hard_links),
        symbolic_links=len(tree.symlinks),
        directories=len(tree.directories),
        bytes=tree.bytes,
        archive_bytes=archive_bytes,
        seconds=time.monotonic() - begin,
        note="; ".join(filter(None, [note, others])),
    )


def _source(path: str) -> str:
    if not is_directory(path):
        if not os.path.lexists(path):
            raise NotFoundError(f"no such directory: {shown(path)}")
        raise InputError("must be a directory", field="SOURCE", value=path)
    return os.path.realpath(path)


def _dest(request: PackRequest) -> str:
    if request.shard_bytes < _LEAST_SHARD_BYTES:
        raise InputError("must be at least 64K", field="--shard-size", value=request.shard_bytes)
    dest = os.path.realpath(request.dest)
    fault = ""
    if f"{dest}/".startswith(os.path.realpath(request.source).rstrip("/") + "/"):
        fault = "must not be inside SOURCE"
    elif os.path.lexists(dest) and not os.path.isdir(dest):
        fault = "is not a directory"
    elif os.path.isdir(dest) and os.listdir(dest):
        fault = "is not empty"
    if fault:
        hint = "take an empty directory, or one that is not there yet"
        raise InputError(fault, field="DEST", value=request.dest, hint=hint)
    return dest


def _others(above: str, name: str) -> str:
    prefix = f".{name}.packing-"
    with contextlib.suppress(OSError):
        left = [f"{above}/{one}" for one in os.listdir(above) if one.startswith(prefix)]
        if left:
            names = " ".join(map(shown, left))
            return f"if no other hpml pack is at work, remove what a killed one left: {names}"
    return ""


def _shards(tree: CopyPlan, shard_bytes: int) -> Iterator[list[TreeEntry]]:
    """Yield the files of each shard, sample by sample; samples are never split."""
    shard: list[TreeEntry] = []
    sample: list[TreeEntry] = []
    size = len(_END)
    keyed = sorted((_place(os.fsencode(entry.path)), entry) for entry in tree.files)
    last = None
    for key, entry in [*keyed, (None, None)]:
        if entry is not None and key is not None and key[:2] == last:
            sample.append(entry)
            continue
        # Keep a sample's files in one shard, even if it grows too large: webdataset reads a sample
        # from consecutive members.
        more = sum(map(_stored, sample))
        if shard and size + more > shard_bytes:
            yield shard
            shard, size = [], len(_END)
        shard += sample
        size += more
        sample, last = ([entry], key[:2]) if entry is not None and key is not None else ([], None)
    if shard:
        yield shard


def _place(name: bytes) -> tuple[bytes, bytes, bytes]:
    """Return the sort key of a name: directory, name up to its first dot, name.

    By webdataset's convention, the files of a sample have the first two in common. Plain order
    would split samples: `a.d/x` sorts between `a.cls` and `a.jpg`.

    >>> sorted([b"a.jpg", b"a.d/x", b"b", b"a.cls"], key=_place)
    [b'a.cls', b'a.jpg', b'b', b'a.d/x']
    """
    directory, _, base = name.rpartition(b"/")
    return directory, base.partition(b".")[0], base


def _stored(entry: TreeEntry) -> int:
    """Return the bytes that a file takes in an archive, rounded up."""
    name = len(os.fsencode(entry.path))
    head = _BLOCK
    if name > _LONGEST_NAME or entry.size >= _LARGEST:
        head += 2 * _BLOCK + name
    return head + entry.size + -(head + entry.size) % _BLOCK


def _write(
    tree: CopyPlan,
    shards: Sequence[Sequence[TreeEntry]],
    directory: str,
    workers: int,
    retry: Retry,
    on_pack: OnPack,
) -> None:
    """Write all archives; each worker takes the next shard."""
    problems = Problems(f"cannot pack {shown(tree.source_root)}")
    numbers = {entry.path: number for number, entry in enumerate(tree.files)}
    sums = [0, 0]

    def on_report(size: int, files: int) -> None:
        sums[:] = sums[0] + size, sums[1] + files
        on_pack(sums[0], sums[1], tree.bytes, len(tree.files))

    def on_result(found: list[tuple[str, str]]) -> None:
        for path, reason in found:
            problems.add(path, reason)

    # Pad numbers to equal length, so that names sort in the order of the shards.
    digits = max(5, len(str(len(shards))))

    @contextlib.contextmanager
    def begin(report: Report) -> Iterator[Callable[[int], list[tuple[str, str]]]]:
        writer = _Writer(tree, report)

        def write(number: int) -> list[tuple[str, str]]:
            with _new_file(f"{directory}/data-{number:0{digits}d}.tar") as out:
                for entry in shards[number]:
                    writer.add(numbers[entry.path], out)
            return writer.take_problems()

        yield write

    if shards:
        run_forked(
            len(shards),
            begin,
            workers=min(workers or len(os.sched_getaffinity(0)), len(shards)),
            on_result=on_result,
            on_report=on_report,
            heartbeat=retry.check_stop,
        )
    problems.raise_any("if the tree is being written, wait until it is complete")
    with _new_file(f"{directory}/{TREE_SHARD}") as out:
        comment = {"comment": f"{PACK_COMMENT}{len(shards)}"}
        out.write(tarfile.TarInfo.create_pax_global_header(comment))
        # Python's tarfile rejects an archive that ends after a global header.
        for header in list(_tree_headers(tree)) or [_header("./", tree.top, kind=tarfile.DIRTYPE)]:
            out.write(header)
    # Directory times reveal files that were added or removed while shards were written.
    check_directories(tree, retry, problems)
    problems.raise_any("wait until the tree is complete")


@contextlib.contextmanager
def _new_file(path: str) -> Iterator[IO[bytes]]:
    """Yield a new archive; at the end of the block, write the end marker and sync it to disk."""
    with open(path, "xb", buffering=WRITE_BYTES) as out:
        try:
            yield out
        except _ArchiveError as error:
            raise error.cause from error
        out.write(_END)
        out.flush()
        os.fsync(out.fileno())


class _Writer:
    """Adds files to archives; records those that cannot be read, and continues."""

    def __init__(self, tree: CopyPlan, report: Report) -> None:
        self._files = tree.files
        self._retry = Retry()
        self._reader = TreeSource(tree.source_root, self._retry).reader(tree)
        self._faulty = False  # when set, files are only read, to find further faults
        self._problems: list[tuple[str, str]] = []
        self._tally = Tally(report)

    def add(self, number: int, out: IO[bytes]) -> None:
        """Copy one file."""
        entry = self._files[number]
        self._write(out, _header(entry.path, entry))
        try:
            pieces = self._retry(lambda: self._reader.read(number))  # this reads small files
            while (data := next(pieces, None)) is not None:
                self._write(out, data)
                self._tally.bytes += len(data)
                self._tally.report_sometimes()
        except (OSError, SourceChangedError) as error:
            self._faulty = True
            reason = _CHANGED if isinstance(error, SourceChangedError) else why(error)
            self._problems.append((entry.path, reason))
        self._write(out, bytes(-entry.size % _BLOCK))
        self._tally.files += 1

    def take_problems(self) -> list[tuple[str, str]]:
        """Return (path, reason) of files that failed since the last call; report the progress."""
        self._tally.report()
        found, self._problems = self._problems, []
        return found

    def _write(self, out: IO[bytes], data: Buffer) -> None:
        if not self._faulty:
            try:
                out.write(data)
            except OSError as error:
                raise _ArchiveError(error) from error


class _ArchiveError(Exception):
    """An archive cannot be written; a plain OSError would be attributed to the source."""

    def __init__(self, cause: OSError) -> None:
        super().__init__(str(cause))
        self.cause = cause


def _header(
    name: str,
    entry: TreeEntry | None,
    *,
    kind: bytes = tarfile.REGTYPE,
    link: str = "",
    mtime: int = 0,
) -> bytes:
    """Return a member's ustar header, with user and group 0 and without their names.

    A name, size or time that does not fit gets an extended header (pax).
    """
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode, info.mtime = kind, link, 0o777, mtime // _NANO
    if entry is not None:
        info.mode, info.mtime = stat.S_IMODE(entry.mode) & 0o777, entry.mtime_ns // _NANO
        info.size = entry.size if kind == tarfile.REGTYPE else 0
    try:
        return info.tobuf(tarfile.USTAR_FORMAT, "utf-8", "surrogateescape")
    except ValueError:
        # It does not fit. pax headers are UTF-8, so other names need GNU tar's format.
        is_text = not _SURROGATES.search(name + link)
        if is_text:
            return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
        return info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")


def _tree_headers(tree: CopyPlan) -> Iterator[bytes]:
    """Yield headers of links, then of directories, because a new link would change their times.

    Directories come right before their contents, `a/x` before `a-b`: GNU tar sets the time of `a`
    at the first name outside of it.
    """
    named = {hard.first for hard in tree.hard_links}
    firsts = {entry.path: entry for entry in tree.files if entry.path in named}
    for hard in sorted(tree.hard_links):
        yield _header(hard.path, firsts[hard.first], kind=tarfile.LNKTYPE, link=hard.first)
    for link in sorted(tree.symlinks):
        yield _header(link.path, None, kind=tarfile.SYMTYPE, link=link.target, mtime=link.mtime_ns)
    for entry in sorted(tree.directories, key=lambda entry: entry.path.split("/")):
        yield _header(entry.path, entry, kind=tarfile.DIRTYPE)


def _stripe(directory: str, shard_bytes: int) -> str:
    """Stripe new archives over Lustre's servers by their size; return an error message or ""."""
    if file_system_type(directory) != "lustre":
        return ""
    count = max(1, min(_MOST_STRIPES, -(-shard_bytes // _PER_STRIPE_BYTES)))
    words = ["lfs", "setstripe", "-c", str(count), directory]
    try:
        subprocess.run(words, capture_output=True, timeout=_LFS_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"lfs setstripe failed: {error}; the archives have the default striping"
    return ""
