"""Read tar archives, directories of tar shards and zip archives with the standard library.

Archives are untrusted: `tarfile` only reads headers, `Members` (plan.py) decides which members may
be written, and the copier writes them. A first pass reads all headers and makes the plan before
anything is written. Compressed archives are decompressed twice; the first pass stops as soon as
the contents cannot fit, which also limits decompression bombs.
"""

from __future__ import annotations

import bz2
import contextlib
import functools
import gzip
import io
import lzma
import os
import re
import shutil
import stat
import struct
import subprocess
import tarfile
import threading
import time
import zipfile
import zlib
from array import array
from typing import IO, TYPE_CHECKING, NamedTuple, NoReturn, cast

from hpml_orchestrator.errors import StagingError
from hpml_orchestrator.staging.plan import MOST_MEMBERS, Members, honest_bytes
from hpml_orchestrator.staging.request import TREE_SHARD, SourceChangedError, shards_of, shown, why
from hpml_orchestrator.staging.source import BLOCK_BYTES, Buffers
from hpml_orchestrator.staging.space import readers_for

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from hpml_orchestrator.staging.plan import CopyPlan
    from hpml_orchestrator.staging.request import Retry
    from hpml_orchestrator.staging.source import Buffer, SourceReader

    Row = tuple[bytes, str, int, int, int, int, str]
    # type, name, mode, mtime in ns, size, offset of the data, link

_NANO = 1_000_000_000
_BUFFER_BYTES = 1 << 13
_LONGEST_LINK_BYTES = 4096
_UNIX_HOSTS = frozenset({3, 19})  # 19: macOS
_ENCRYPTED, _UTF8, _DOS_DIRECTORY = 0x1, 0x800, 0x10
_EXTRA_TIME = 0x5455  # Info-ZIP, extrafld.txt: flags (1 byte), then seconds since the epoch, UTC
_TIME = struct.Struct("<l")
_DAMAGED = (zipfile.BadZipFile, struct.error, ValueError, EOFError, zlib.error, OverflowError)


class ZipSource:
    """A zip archive, read from front to back; checksums cover whole members.

    Args:
        path: the archive.
        retry: retries calls after transient faults.
        outside_links: accept symbolic links that leave the root, and copy them unchanged.

    Raises:
        StagingError: it is not a regular file.
        OSError: it cannot be opened.
    """

    kind = "zip"
    ordered = False

    def __init__(self, path: str, retry: Retry, *, outside_links: bool = False) -> None:
        self._path = path
        self._retry = retry
        self._outside_links = outside_links
        self._stamp, _ = look_at_archive(path, retry)
        self._archive: zipfile.ZipFile | None = None
        self._infos: list[zipfile.ZipInfo] = []

    def _opened(self) -> IO[bytes]:
        return io.BufferedReader(ArchiveFile(self._path, self._retry, self._stamp), _BUFFER_BYTES)

    def plan(self) -> CopyPlan:
        """Read the central directory; see `Source.plan`."""
        members = Members(self._path, self._stamp.mtime_ns, outside_links=self._outside_links)
        self._infos = []
        try:
            with self._opened() as stream:
                self._archive = zipfile.ZipFile(stream)
                members.check_count(len(self._archive.infolist()))
                # Sort by offset, whatever the order of the central directory: files are read front
                # to back.
                for info in sorted(self._archive.infolist(), key=lambda one: one.header_offset):
                    self._retry.check_stop()
                    self._take(info, members)
        except _DAMAGED as error:  # bad names or times
            raise not_whole(self._path, "zip", str(error)) from error
        except SourceChangedError as error:
            raise StagingError(f"{shown(self._path)}: changed while it was read") from error
        finally:
            drop_pages(self._path)
        members.problems.raise_any()
        members.check_bytes(self._stamp.size)
        members.plan.stamps = [self._stamp[1:]]
        return members.plan

    def _take(self, info: zipfile.ZipInfo, members: Members) -> None:
        on_unix = info.create_system in _UNIX_HOSTS
        # `filename` is cut at a NUL, which would hide a name that must be refused.
        name = info.orig_filename
        if on_unix and not info.flag_bits & _UTF8:  # zipfile decodes these bytes as cp437
            name = name.encode("cp437").decode("utf-8", "surrogateescape")
        mode = info.external_attr >> 16 if on_unix else 0
        kind = stat.S_IFMT(mode)
        is_directory = name.endswith("/") or kind == stat.S_IFDIR
        is_directory |= not on_unix and bool(info.external_attr & _DOS_DIRECTORY)
        mode = mode or (0o755 if is_directory else 0o644)  # keep a 0 only with a file type
        mtime_ns = _mtime(info) * _NANO
        size = info.file_size
        if info.flag_bits & _ENCRYPTED:
            members.refuse(name, "is encrypted")
        elif info.compress_type not in {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}:
            method = f"is compressed by method {info.compress_type}"
            members.refuse(name, f"{method}; only stored and deflated ones are read")
        elif is_directory:
            members.directory(name, mode & 0o7777, mtime_ns)
        elif kind == stat.S_IFLNK:
            if size > _LONGEST_LINK_BYTES:
                members.refuse(name, "symbolic link of absurd length")
            else:
                target = b"".join(map(bytes, self._contents(info)))
                members.symlink(name, target.decode("utf-8", "surrogateescape"), mtime_ns)
        elif kind not in {0, stat.S_IFREG}:
            members.refuse(name)
        elif members.file(name, mode & 0o7777, mtime_ns, size):
            self._infos.append(info)

    def _contents(self, info: zipfile.ZipInfo) -> Iterator[bytes]:
        size = 0
        try:
            with cast("zipfile.ZipFile", self._archive).open(info) as stream:
                while data := stream.read(BLOCK_BYTES):
                    size += len(data)
                    yield data
            if size != info.file_size:
                raise EOFError("it is shorter than announced")
        except _DAMAGED as error:
            raise StagingError(
                f"{shown(self._path)}: {shown(info.filename)} is damaged: {why(error)}",
                hint="make or copy the archive again; `unzip -t` lists what is damaged",
            ) from error

    def reader(self, plan: CopyPlan) -> SourceReader:  # noqa: ARG002 - the members are known since `plan`
        """Open the planned archive for reading; each worker has its own descriptor."""
        # Planning closed its descriptor. Workers open their own, because a descriptor from before
        # the fork would share its position with all of them.
        cast("zipfile.ZipFile", self._archive).fp = self._opened()
        return self

    def read(self, number: int) -> Iterator[Buffer]:
        """Yield a file; see `SourceReader`."""
        return self._contents(self._infos[number])

    def close(self) -> None:
        """Close the archive; see `drop_pages`."""
        if self._archive is not None:
            with contextlib.suppress(OSError):
                cast("IO[bytes]", self._archive.fp).close()
            drop_pages(self._path)


def _mtime(info: zipfile.ZipInfo) -> int:
    """Return the modification time in seconds: Info-ZIP's (UTC), else the DOS time (local)."""
    extra, at = info.extra, 0
    while at + 4 <= len(extra):
        key, length = struct.unpack_from("<2H", extra, at)
        told = extra[at + 4 : at + 4 + length]
        if key == _EXTRA_TIME and len(told) > _TIME.size and told[0] & 1:
            return int(_TIME.unpack_from(told, 1)[0])
        at += 4 + length
    try:
        return int(time.mktime((*info.date_time, 0, 0, -1)))
    except (OverflowError, ValueError):
        return 0


DAMAGED = (EOFError, zlib.error, lzma.LZMAError, ValueError, gzip.BadGzipFile)
"""What the decompressors raise; bz2 raises a plain OSError without an errno."""

_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
_MAGIC = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\0": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x04\x22\x4d\x18": "lz4",
    b"\x1f\x9d": "compress",
}
_LARGEST_WINDOW_LOG = 31  # `zstd --long=31`: 2 GiB


def compression_of(start: bytes) -> str:
    """Return a file's compression, detected from its first bytes; "" if it is not compressed.

    >>> compression_of(b"BZh91AY")
    'bzip2'
    """
    return next((name for magic, name in _MAGIC.items() if start.startswith(magic)), "")


def not_whole(path: str, kind: str, reason: str) -> StagingError:
    """Return the error for a truncated or damaged archive."""
    return StagingError(
        f"{shown(path)}: not a whole {kind} archive: {reason}",
        hint="the archive is cut short or damaged: make or copy it again",
    )


class Stamp(NamedTuple):
    """Status of an archive when it was planned."""

    path: str
    size: int
    mtime_ns: int
    inode: int
    ctime_ns: int  # not compared while reading: a new hard link also changes it


class ArchiveFile(io.FileIO):
    """A file that is read with retries and must not change.

    Args:
        path: path of the file.
        retry: retries calls after transient faults, and holds the stop condition.
        stamp: expected status; by default the current one.

    Raises:
        StagingError: it is not a regular file.
        SourceChangedError: it has changed since the stamp.
        OSError: it cannot be opened.
    """

    def __init__(self, path: str, retry: Retry, stamp: Stamp | None = None) -> None:
        super().__init__(retry(lambda: os.open(path, _READ)), "rb")
        try:
            if not stat.S_ISREG(os.fstat(self.fileno()).st_mode):
                raise StagingError(f"{shown(path)}: is not a regular file")
            self._retry = retry
            self.stamp = stamp or self._stamp_now(path)
            self.check()
        except BaseException:
            self.close()
            raise

    def _stamp_now(self, path: str) -> Stamp:
        info = os.fstat(self.fileno())
        return Stamp(path, info.st_size, info.st_mtime_ns, info.st_ino, info.st_ctime_ns)

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Read, then check that the file has not changed.

        Raises:
            SourceChangedError: it has changed.
        """
        self._retry.check_stop()
        # Compare after each read: reading a file that is being rewritten would mix two archives.
        count = self._retry(lambda: os.readv(self.fileno(), [buffer]))
        self.check()
        return count

    def check(self) -> None:
        """Compare the open file with its stamp.

        Raises:
            SourceChangedError: it has changed.
        """
        if self._stamp_now(self.stamp.path)[:-1] != self.stamp[:-1]:
            raise SourceChangedError


def look_at_archive(path: str, retry: Retry) -> tuple[Stamp, bytes]:
    """Return an archive's stamp and first bytes; raises as `ArchiveFile`."""
    with ArchiveFile(path, retry) as file:
        return file.stamp, retry(lambda: os.pread(file.fileno(), 8, 0))


def drop_pages(path: str) -> None:
    """Drop a file on a network file system from the page cache.

    The node has its own copy by now, and the source's pages would evict those of the copy.
    """
    if readers_for(path) > 1:
        with contextlib.suppress(OSError):
            fd = os.open(path, _READ)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def decompressed(file: ArchiveFile, raw: IO[bytes]) -> IO[bytes]:
    """Return a stream of the decompressed contents; seeking back restarts it or fails.

    Args:
        file: the open file.
        raw: the same file, buffered; the caller closes it.

    Raises:
        StagingError: the compression is unknown, or needs a program that is not installed.
    """
    kind = compression_of(os.pread(file.fileno(), 8, 0))
    opened: object = None
    if kind == "gzip":
        opened = gzip.GzipFile(fileobj=raw)
    elif kind == "bzip2":
        opened = bz2.BZ2File(raw)
    elif kind == "xz":
        opened = lzma.LZMAFile(raw)  # noqa: SIM115 - the caller closes it
    elif kind == "zstd":
        opened = _zstd(file)
    else:
        raise StagingError(
            f"{shown(file.stamp.path)}: is compressed with {kind}, which is not supported",
            hint="repack it, best as tar.zst or plain tar",
        )
    return cast("IO[bytes]", opened)


def _zstd(file: ArchiveFile) -> _Program:
    program = shutil.which("zstd")
    if program is None:
        raise StagingError(
            f"{shown(file.stamp.path)}: nothing here can decompress zstd",
            hint="install the program zstd on the nodes (package zstd)",
        )
    return _Program([program, "-dcq", f"--long={_LARGEST_WINDOW_LOG}"], file)


class _Program:
    """Output of a decompression program, read from front to back."""

    def __init__(self, words: list[str], file: ArchiveFile) -> None:
        self._name = os.path.basename(words[0])
        self._file = file
        self._at = 0
        self._process = subprocess.Popen(
            words, stdin=file.fileno(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    def read(self, count: int) -> bytes:
        """Return `count` bytes, fewer only at the end; raises EOFError if the program failed."""
        assert self._process.stdout is not None  # noqa: S101 - given above
        assert self._process.stderr is not None  # noqa: S101
        self._file.check()
        # A short read means the end of the output. Only the exit status now distinguishes a
        # complete archive from a truncated one.
        data = self._process.stdout.read(count)
        self._at += len(data)
        if len(data) < count:
            said = self._process.stderr.read().decode("utf-8", "replace").strip()
            status = self._process.wait()
            if status:
                raise EOFError(said.rpartition("\n")[2] or f"{self._name} ended with {status}")
        return data

    def tell(self) -> int:
        """Return the current offset."""
        return self._at

    def seek(self, offset: int) -> int:
        """Skip forward to an offset; seeking back is not supported."""
        if offset < self._at:
            raise ValueError("cannot go back")
        while self._at < offset and self.read(min(BLOCK_BYTES, offset - self._at)):
            pass
        return self._at

    def close(self) -> None:
        """End the program and discard its remaining output."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()


_MOST_DIGITS = 20
_EXTENSIONS = b"xgXLK"
_LARGEST_EXTENSION_BYTES = 16 << 20
"""Names and attributes are small: a larger extension is an attempt to exhaust memory."""
_GLOBAL_BYTES = 1 << 20  # tarfile keeps global headers in memory
_NEAR_BYTES, _SERVED_NEAR_BYTES = 1 << 12, 1 << 17
_AHEAD_BYTES = 1 << 18  # small, so that little is read past the end of a batch
_HEADER = struct.Struct("100s8s16x12s12s8s189x155s12x")
_SHARD = re.compile(r"data-(\d{5,})\.tar")
PACK_COMMENT = "hpml pack, shards with files: "
"""Comment in `tree.tar`, followed by the number of shards."""


def check_archive(path: str, kind: str) -> None:
    """Refuse a file that is not an archive, judging by its first block or its last 64 KiB.

    Args:
        path: the file.
        kind: from `kind_of`; kinds other than archives are not checked.

    Raises:
        StagingError: it is not an archive; staging would report the same message.
        OSError: it cannot be read.
    """
    if kind == "zip" and not zipfile.is_zipfile(path):
        raise not_whole(path, "zip", "it has no end of a central directory")
    if kind == "tar":
        with open(path, "rb", buffering=0) as stream:
            start = stream.read(tarfile.BLOCKSIZE)
        if not compression_of(start) and start != bytes(tarfile.BLOCKSIZE):
            try:
                tarfile.TarInfo.frombuf(start, "utf-8", "surrogateescape")
            except tarfile.TarError as error:
                raise not_whole(path, "tar", f"it does not begin as one does: {error}") from error


class TarSource:
    """A tar archive or a directory of shards; `ordered` if it is compressed.

    Args:
        path: the archive or directory.
        kind: "tar" or "pack".
        retry: retries calls after transient faults.
        most_bytes: planning stops once the members exceed this size.
        outside_links: accept symbolic links that leave the root, and copy them unchanged.

    Raises:
        InputError: the directory has no shards, or contains other files.
        StagingError: it is not a regular file, or a shard is compressed.
        OSError: it cannot be opened.
    """

    def __init__(
        self, path: str, kind: str, retry: Retry, *, most_bytes: int, outside_links: bool = False
    ) -> None:
        self.kind = kind
        self._path = path
        self._retry = retry
        self._most_bytes = most_bytes
        self._outside_links = outside_links
        self._starts = array("Q")
        self._which = array("L")
        self._comment = ""
        paths = shards_of(path) if kind == "pack" else [path]
        looks = [look_at_archive(one, retry) for one in paths]
        self._stamps = [stamp for stamp, _ in looks]
        compressed = [stamp.path for stamp, start in looks if compression_of(start)]
        self.ordered = kind == "tar" and bool(compressed)
        if compressed and not self.ordered:
            raise StagingError(
                f"{shown(compressed[0])}: is compressed, which shards of a pack are not",
                hint="decompress the shards, or stage the directory with kind: tree",
            )

    def plan(self) -> CopyPlan:
        """Read all headers; see `Source.plan`."""
        changed = os.stat(self._path).st_mtime_ns
        names = [os.path.basename(stamp.path) for stamp in self._stamps]
        self._starts, self._which = array("Q"), array("L")
        members = Members(
            self._path,
            changed,
            outside_links=self._outside_links,
            shard_of=lambda file: names[self._which[file]],
        )
        for number, rows in enumerate(self._rows(members)):
            members.shard = names[number]
            for row in rows:
                if self._judge(row, members):
                    self._starts.append(row[5])
                    self._which.append(number)
                # The data cannot fit, so stop here. `at_least` keeps this incomplete plan from
                # being published as the whole archive.
                if members.total_bytes > self._most_bytes:
                    members.plan.at_least = True
                    return members.plan
        if self.ordered:
            members.check_bytes(self._stamps[0].size)
        self._check_shards(names)
        members.problems.raise_any()
        members.plan.stamps = [stamp[1:] for stamp in self._stamps]
        return members.plan

    def _check_shards(self, names: list[str]) -> None:
        """Refuse a pack with missing shards; `tree.tar`, the last one, records their number."""
        if self.kind != "pack" or names[-1] != TREE_SHARD:
            return
        found = {int(match[1]) for match in map(_SHARD.fullmatch, names) if match}
        count = max(found, default=-1) + 1
        if self._comment.startswith(PACK_COMMENT):
            count = int(self._comment[len(PACK_COMMENT) :])
        for number in sorted(found ^ set(range(count))):
            what = "is missing" if number < count else "is too many"
            shard = f"data-{number:05d}.tar"
            raise StagingError(
                f"{shown(self._path)}: {shard} {what}: the pack has {count} such shards",
                hint="copy the pack again, whole, or make it again by `hpml pack`",
            )

    def _judge(self, row: Row, members: Members) -> bool:
        """Check a member; return True if it becomes a file of the plan."""
        kind, name, mode, mtime_ns, size, _, link = row
        if kind == tarfile.REGTYPE:
            return members.file(name, mode, mtime_ns, size)
        if kind == tarfile.DIRTYPE:
            members.directory(name, mode, mtime_ns)
        elif kind == tarfile.SYMTYPE:
            members.symlink(name, link, mtime_ns)
        elif kind == tarfile.LNKTYPE:
            members.hard_link(name, link)
        else:
            members.refuse(name)
        return False

    def _rows(self, members: Members) -> Iterator[Iterable[Row]]:
        """Yield the members of each archive; on a network file system, read many at once."""
        numbers = range(len(self._stamps))
        threads = min(readers_for(self._path), len(numbers))
        if threads > 1:
            from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415 - takes time

            with ThreadPoolExecutor(threads) as pool, contextlib.suppress(RuntimeError):
                # raises if the job's limit of threads is reached
                results = pool.map(lambda number: list(self._scan(number, None)), numbers)
                return (yield from results)
        # One member at a time, so that a bomb is detected while it is decompressed.
        yield from (self._scan(number, members) for number in numbers)

    def _scan(self, number: int, members: Members | None) -> Iterator[Row]:
        stamp = self._stamps[number]
        path, most = stamp.path, min(self._most_bytes, honest_bytes(stamp.size))
        try:
            with (
                self.opened(number) as data,
                tarfile.open(fileobj=data, mode="r:", tarinfo=_Info.of(path)) as tar,
            ):
                rows = _slow_rows(tar) if self.ordered else self._fast_rows(tar, data.fileno())
                for count, row in enumerate(rows):
                    if count >= MOST_MEMBERS:
                        raise StagingError(f"{shown(path)}: holds more than {MOST_MEMBERS} members")
                    yield row
                    if self.ordered and members is not None and members.total_bytes > most:
                        members.check_bytes(stamp.size)  # raises, so nothing more is read
                while self.ordered and data.read(BLOCK_BYTES):
                    pass  # read to the end, where the decompressor verifies its checksum
                self.archive(number).close()  # check that it has not changed
                self._comment = tar.pax_headers.get("comment", "")
        except SourceChangedError as error:
            raise StagingError(f"{shown(path)}: changed while it was read") from error
        except (tarfile.TarError, OverflowError, *DAMAGED) as error:
            raise not_whole(path, "tar", why(error)) from error
        except OSError as error:
            if error.errno is not None:
                raise
            raise not_whole(path, "tar", why(error)) from error  # how bz2 reports damage

    def _fast_rows(self, tar: tarfile.TarFile, fd: int) -> Iterator[Row]:
        """Yield all members; tarfile, ten times slower, reads only those with special headers."""
        near = _SERVED_NEAR_BYTES if readers_for(self._path) > 1 else _NEAR_BYTES
        head, start = b"", 0
        rows = _slow_rows(tar)
        row = next(rows, None)
        while row is not None:
            yield row
            at = tar.offset
            if not start <= at <= start + len(head) - tarfile.BLOCKSIZE:
                self._retry.check_stop()
                try:
                    head = os.pread(fd, near, at)
                except OSError as error:
                    head = self._retry.again(functools.partial(os.pread, fd, near, at), error)
                start = at
            block = head[at - start : at - start + tarfile.BLOCKSIZE]
            row = None if tar.pax_headers else _plain_row(block, at + tarfile.BLOCKSIZE)
            if row is None:  # or pax headers apply to all later members
                row = next(rows, None)
            else:
                tar.offset = row[5] + row[4] + -row[4] % tarfile.BLOCKSIZE

    @contextlib.contextmanager
    def opened(self, number: int) -> Iterator[IO[bytes]]:
        """Open an archive and yield its uncompressed contents."""
        file = self.archive(number)
        with io.BufferedReader(file, BLOCK_BYTES if self.ordered else _BUFFER_BYTES) as raw:
            data = decompressed(file, raw) if self.ordered else raw
            with contextlib.closing(data):
                yield data
        drop_pages(file.stamp.path)

    def reader(self, plan: CopyPlan) -> SourceReader:
        """Open the planned archives for reading."""
        return (_StreamReader if self.ordered else _ShardReader)(self, plan)

    def place_of(self, number: int) -> tuple[int, int]:
        """Return (number of the archive, offset in it) of a file of the plan."""
        return self._which[number], self._starts[number]

    def archive(self, number: int) -> ArchiveFile:
        """Open an archive and check that it has not changed."""
        stamp = self._stamps[number]
        return ArchiveFile(stamp.path, self._retry, stamp)

    def close(self) -> None:
        """Do nothing: no descriptor stays open."""


class _ShardReader:
    """Reads files from uncompressed archives, several small ones per read."""

    def __init__(self, source: TarSource, plan: CopyPlan) -> None:
        self._source = source
        self._files = plan.files
        self._local = threading.local()
        self._buffers = Buffers()
        self._open: list[ArchiveFile] = []
        # If several threads share a batch, another thread gets the next file: reading ahead is
        # useless.
        self._ahead = _AHEAD_BYTES if readers_for(plan.source_root) < 2 else 0  # noqa: PLR2004

    def read(self, number: int) -> Iterator[Buffer]:
        """Yield a file; see `SourceReader`."""
        size = self._files[number].size
        archive, start = self._source.place_of(number)
        mine = self._local
        if getattr(mine, "archive", -1) != archive:
            mine.file = self._source.archive(archive)
            mine.archive, mine.start, mine.data = archive, 0, memoryview(b"")
            self._open.append(mine.file)
        at = start - mine.start
        if not 0 <= at <= len(mine.data) - size:
            if size > BLOCK_BYTES:
                return self._pieces(mine.file, start, size)
            at, mine.start = 0, start
            mine.data = self._buffers.filled(mine.file.fileno(), start, max(size, self._ahead))
            mine.file.check()
            if len(mine.data) < size:
                raise SourceChangedError
        return iter((mine.data[at : at + size],))

    def _pieces(self, file: ArchiveFile, start: int, size: int) -> Iterator[Buffer]:
        yield from self._buffers.pieces(file.fileno(), start, start + size)
        file.check()

    def close(self) -> None:
        """Close all archives, once all threads have ended."""
        for file in self._open:
            file.close()
            drop_pages(file.stamp.path)


class _StreamReader:
    """Reads the files of a compressed archive one after another."""

    def __init__(self, source: TarSource, plan: CopyPlan) -> None:
        self._source = source
        self._files = plan.files
        self._stack = contextlib.ExitStack()
        self._stream = self._stack.enter_context(source.opened(0))

    def read(self, number: int) -> Iterator[Buffer]:
        """Yield a file; see `SourceReader`."""
        left = self._files[number].size
        if left:
            self._stream.seek(self._source.place_of(number)[1])
        while left:
            data = self._stream.read(min(left, BLOCK_BYTES))
            if not data:
                raise SourceChangedError
            yield data
            left -= len(data)
        if number == len(self._files) - 1:
            while self._stream.read(BLOCK_BYTES):
                pass  # read to the end, where the decompressor verifies its checksum

    def close(self) -> None:
        """Close the archive."""
        self._stack.close()


def _plain_row(block: bytes, start: int) -> Row | None:
    """Parse a regular file with a plain header; return None if tarfile must read it."""
    if len(block) < tarfile.BLOCKSIZE or block[156] != ord(tarfile.REGTYPE):
        return None
    name, mode, size, mtime, told, prefix = _HEADER.unpack(block)
    try:
        # Drop zeros first, because `sum` creates an int for each byte.
        if sum(block.translate(None, b"\0")) - sum(told) + 8 * ord(" ") != int(told[:6], 8):
            return None
        length, seconds = int(size.rstrip(b"\0"), 8), int(mtime.rstrip(b"\0"), 8)
        bits = int(mode.rstrip(b"\0"), 8) & 0o7777
    except ValueError:  # GNU tar's binary notation
        return None
    if length < 0:
        return None
    if prefix[0]:
        name = prefix.partition(b"\0")[0] + b"/" + name
    path = name.partition(b"\0")[0].decode("utf-8", "surrogateescape")
    return tarfile.REGTYPE, path, bits, seconds * _NANO, length, start, ""


def _slow_rows(tar: tarfile.TarFile) -> Iterator[Row]:
    for info in iter(tar.next, None):
        tar.members = []  # type: ignore[attr-defined] # tarfile keeps every one
        yield _row(cast("_Info", info))


def _row(info: _Info) -> Row:
    records = info.pax_headers
    # A float has 53 bits, and nanoseconds since 1970 need 61: parse the pax header's text instead.
    mtime_ns = int(info.mtime * _NANO) if "mtime" not in records else _nanoseconds(records["mtime"])
    if info.size < 0:  # tarfile would seek backwards and loop for ever
        raise EOFError("it holds a member with a negative size")
    if any(key.startswith("GNU.sparse") for key in records):
        info._sparse()  # noqa: SLF001 - of our class
    kind = tarfile.REGTYPE if info.isreg() else info.type
    length = info.size if info.isreg() else 0
    return kind, info.name, info.mode & 0o7777, mtime_ns, length, info.offset_data, info.linkname


def _nanoseconds(text: str) -> int:
    """Convert a pax header's decimal seconds to nanoseconds; 0 if they cannot be parsed."""
    sign = -1 if text[:1] == "-" else 1  # times before 1970
    whole, _, part = text[sign < 0 :].partition(".")
    if not whole.isdigit() or len(whole) > _MOST_DIGITS or (part and not part.isdigit()):
        return 0
    return sign * (int(whole) * _NANO + int(part[:9].ljust(9, "0")))


class _Info(tarfile.TarInfo):
    """A member as read by tarfile, with additional checks."""

    archive = ""
    kept_bytes = 0  # size of all global headers so far

    @classmethod
    def of(cls, archive: str) -> type[_Info]:
        """Return the class for one archive."""
        return type("Info", (cls,), {"archive": archive})

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _Info:
        """Read a header."""
        try:
            info = super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            if any(buf):  # tarfile would mistake a damaged header for the end of the archive
                raise tarfile.ReadError(f"a damaged header: {error}") from error
            raise
        if info.type == tarfile.GNUTYPE_SPARSE:
            info._sparse()  # noqa: SLF001 - its own
        if info.type in _EXTENSIONS:
            cls.kept_bytes += info.size if info.type == tarfile.XGLTYPE else 0
            if info.size > _LARGEST_EXTENSION_BYTES or cls.kept_bytes > _GLOBAL_BYTES:
                raise tarfile.ReadError("it holds a header of absurd size")
        return info

    def _proc_pax(self, tar: tarfile.TarFile) -> tarfile.TarInfo:
        try:
            found: tarfile.TarInfo = super()._proc_pax(tar)  # type: ignore[misc]
        except tarfile.HeaderError as error:  # newer Pythons mistake it for the end as well
            raise tarfile.ReadError(f"a damaged header: {error}") from error
        return found

    def _sparse(self, *_: object) -> NoReturn:
        raise StagingError(
            f"{shown(self.archive)}: {shown(self.name)} is a sparse member of GNU tar",
            hint="repack the archive without --sparse",
        )

    # tarfile would read the list of holes into memory, however long the archive claims it is.
    _proc_gnusparse_00 = _proc_gnusparse_01 = _proc_gnusparse_10 = _sparse
