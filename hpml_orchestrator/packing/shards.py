"""Write one archive of a pack, or find that an earlier run has finished it."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from xxhash import xxh3_128, xxh3_128_digest

from hpml_orchestrator.errors import StagingError
from hpml_orchestrator.packing import ustar
from hpml_orchestrator.packing.layout import TREE_FILE, file_header
from hpml_orchestrator.records.files import fsync_dir
from hpml_orchestrator.staging.copying import check_same
from hpml_orchestrator.staging.faults import FULL, Retry, SourceChangedError, shown, why

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpml_orchestrator.packing.layout import Layout, Shard
    from hpml_orchestrator.packing.workers import Tell
    from hpml_orchestrator.staging.hashing import Buffer
    from hpml_orchestrator.staging.plan import Entry

__all__ = ["DONE", "TEMPORARY", "Part", "ShardWriter", "publish", "read_part", "write_all"]

DONE = ".done"
"""How the name of the note ends that is written before a finished archive gets its name."""
TEMPORARY = ".writing"
"""How the name of a file ends that is being written."""

_CHUNK_BYTES = 1 << 20
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_ZEROS = bytes(ustar.BLOCK_BYTES)
_CHANGED = "changed while it was packed"


@dataclass
class Part:
    """What is known of a finished archive.

    Attributes:
        number: of the archive.
        plan: the digest of what it was to hold.
        bytes: size of the archive.
        digest: XXH3-128 of the archive.
        digests: XXH3-128 of each file in it, one behind the other.
        kept: an earlier run had finished it.
        problems: (path, reason) of files that kept it from being finished.
    """

    number: int
    plan: str
    bytes: int = 0
    digest: str = ""
    digests: str = ""
    kept: bool = False
    problems: list[tuple[str, str]] = field(default_factory=list)


class ShardWriter:
    """Writes archives of a layout; called in worker processes.

    Args:
        layout: the whole pack.
        directory: of the pack.
    """

    def __init__(self, layout: Layout, directory: str) -> None:
        self._layout = layout
        self._directory = directory
        self._root = -1  # each worker opens its own
        self._retry = Retry()

    def __call__(self, number: int, tell: Tell) -> Part:
        """Write an archive unless it is there.

        Raises:
            StagingError: it cannot be written, or the source cannot be opened.
        """
        if self._root < 0:
            self._root = _open_root(self._layout.tree.source_root)
        shard = self._layout.shards[number]
        try:
            return self._kept(number, shard, tell) or self._write(number, shard, tell)
        except OSError as error:
            hint = ""
            if error.errno in FULL:
                hint = "finished shards are kept: make room, then go on with --resume"
            path = os.path.join(self._directory, shard.file)
            raise StagingError(f"cannot write {shown(path)}: {why(error)}", hint=hint) from error

    def _kept(self, number: int, shard: Shard, tell: Tell) -> Part | None:
        part = read_part(self._directory, shard, number)
        path = os.path.join(self._directory, shard.file)
        if part is None or not os.path.exists(path):
            return None
        digest = xxh3_128()
        size = 0
        with open(path, "rb", buffering=0) as stream:
            while piece := stream.read(_CHUNK_BYTES):
                digest.update(piece)
                size += len(piece)
        if size != shard.bytes or digest.hexdigest() != part.digest:
            return None
        part.kept = True
        tell.add(_data_bytes(self._layout, shard), shard.end - shard.first)
        return part

    def _write(self, number: int, shard: Shard, tell: Tell) -> Part:
        part = Part(number, shard.plan)
        with contextlib.suppress(_Abandoned), publish(self._directory, shard.file) as fd:
            out = _Out(fd)
            digests = []
            for entry in self._layout.files[shard.first : shard.end]:
                try:
                    digests.append(self._add(entry, out, tell, only_look=bool(part.problems)))
                except SourceChangedError:
                    part.problems.append((entry.path, _CHANGED))
                except _SourceError as error:
                    part.problems.append((entry.path, str(error)))
            if part.problems:
                raise _Abandoned
            if shard.file == TREE_FILE:
                out.add(self._layout.tail)
            out.add(ustar.END)
            out.flush()
            if out.bytes != shard.bytes:
                raise StagingError(f"{shard.file} has {out.bytes} bytes, planned: {shard.bytes}")
            part.bytes, part.digest = out.bytes, out.digest.hexdigest()
            part.digests = b"".join(digests).hex()
            _write_part(self._directory, shard, part)
        return part

    def _add(self, entry: Entry, out: _Out, tell: Tell, *, only_look: bool) -> bytes:
        """Copy one file and return its digest; after a first problem only look for others."""
        fd = self._open(entry.path)
        try:
            if not only_look and entry.size <= _CHUNK_BYTES:
                return self._add_small(entry, fd, out, tell)
            check_same(entry, os.fstat(fd))
            if only_look:
                return b""
            out.add(file_header(entry))
            digest = self._copy(fd, entry.size, out, tell)
            check_same(entry, os.fstat(fd))
        finally:
            os.close(fd)
        tell.add(0, 1)
        return digest

    def _add_small(self, entry: Entry, fd: int, out: _Out, tell: Tell) -> bytes:
        """Copy a file that is read at once: one look behind the reading tells of all changes."""
        header = file_header(entry)
        try:
            data = self._read(fd, entry.size, 0)
        finally:
            check_same(entry, os.fstat(fd))
        if len(data) != entry.size:
            raise SourceChangedError
        out.add(header, data, _ZEROS[: -entry.size % ustar.BLOCK_BYTES])
        tell.add(entry.size, 1)
        return xxh3_128_digest(data)

    def _open(self, path: str) -> int:
        try:
            return self._retry(lambda: os.open(path, _READ, dir_fd=self._root))
        except OSError as error:
            raise _SourceError(why(error)) from error

    def _copy(self, fd: int, size: int, out: _Out, tell: Tell) -> bytes:
        digest = xxh3_128()
        done = 0
        while done < size:
            data = self._read(fd, min(_CHUNK_BYTES, size - done), done)
            if not data:
                raise SourceChangedError
            digest.update(data)
            out.add(data)
            done += len(data)
            tell.add(len(data), 0)
        out.add(bytes(ustar.padding(size)))
        return digest.digest()

    def _read(self, fd: int, count: int, offset: int) -> bytes:
        try:
            return self._retry(lambda: os.pread(fd, count, offset))
        except OSError as error:
            raise _SourceError(why(error)) from error


class _Out:
    """The archive that is being written: gathers small pieces, hashes on the way out."""

    def __init__(self, fd: int) -> None:
        self.bytes = 0
        self.digest = xxh3_128()
        self._fd = fd
        self._pieces: list[bytes] = []
        self._waiting = 0

    def add(self, *pieces: bytes) -> None:
        self._pieces += pieces
        self._waiting += sum(map(len, pieces))
        if self._waiting >= _CHUNK_BYTES:
            self.flush()

    def flush(self) -> None:
        data = b"".join(self._pieces)
        self._pieces.clear()
        self._waiting = 0
        self.bytes += len(data)
        self.digest.update(data)
        write_all(self._fd, data)


class _SourceError(Exception):
    """A file cannot be read; an OSError would be taken for one of the archive."""


class _Abandoned(Exception):  # noqa: N818 - ends the writing of an archive whose problems are told
    """The archive is given up."""


def read_part(directory: str, shard: Shard, number: int) -> Part | None:
    """Return the note of a finished archive; None where there is none, or it is of another plan.

    Args:
        directory: the pack.
        shard: as it is planned now.
        number: of the archive.
    """
    try:
        with open(os.path.join(directory, f".{shard.file}{DONE}"), encoding="utf-8") as stream:
            part = Part(**json.load(stream))
    except (OSError, ValueError, TypeError):
        return None
    return (
        part if (part.plan, part.number, part.bytes) == (shard.plan, number, shard.bytes) else None
    )


@contextlib.contextmanager
def publish(directory: str, name: str, *, durable: bool = True) -> Iterator[int]:
    """Yield a new file's descriptor; the file gets its name when the block ends without an error.

    Args:
        directory: where it is to be.
        name: of the file.
        durable: whether it outlives a power failure, whole; else it may be gone or damaged then.

    Raises:
        OSError: it cannot be written.
    """
    temporary = os.path.join(directory, f".{name}.{os.getpid()}-{secrets.token_hex(4)}{TEMPORARY}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        yield fd
        if durable:
            os.fsync(fd)
        os.rename(temporary, os.path.join(directory, name))
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    finally:
        os.close(fd)
    if durable:
        fsync_dir(directory)


def write_all(fd: int, data: Buffer) -> None:
    """Write all of the data, in as many calls as it takes.

    Raises:
        OSError: it cannot be written.
    """
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]


def _write_part(directory: str, shard: Shard, part: Part) -> None:
    # Whoever resumes believes it only where the archive has the digest that it tells.
    with publish(directory, f".{shard.file}{DONE}", durable=False) as fd:
        write_all(fd, json.dumps(asdict(part)).encode())


def _open_root(path: str) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise StagingError(f"cannot read {shown(path)}: {why(error)}") from error


def _data_bytes(layout: Layout, shard: Shard) -> int:
    return sum(entry.size for entry in layout.files[shard.first : shard.end])
