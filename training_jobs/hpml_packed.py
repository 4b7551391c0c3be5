"""Read a data set that `hpml pack` packed, or the same tree unpacked; copy this one file.

    from hpml_packed import open_data

    data = open_data("/scratch/imagenet-packed")   # or "/scratch/imagenet"
    len(data), data.name(0), data.read(0), data.read("train/n01440764/10026.JPEG")

    from hpml_packed import PackedDataset   # imports torch
    data = PackedDataset(path, decode)
    loader = DataLoader(data, batch_size=64, sampler=DistributedSampler(data), num_workers=8)

A pack and its tree give the same names in the same order with the same bytes, so a script works
with either. Files have numbers from 0 on, in an order that puts the files of one sample (all that
has the same name up to the first dot) next to each other.

Nothing is read before it is asked for: opening maps the index, which all processes of a node share
and which no fork copies. Files are read with `pread`, which moves no common position, so one object
serves threads, forked processes and DataLoader workers alike; pickled, it is its path, and opens
itself again. Standard library only, Python 3.9 and newer; `docs/packing.md` has the format.
"""

from __future__ import annotations

import abc
import bisect
import hashlib
import json
import os
import stat
import struct
import threading
from array import array
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.utils.data import Dataset

    Key = int | str

__all__ = [
    "Data",
    "PackError",
    "PackedData",
    "PackedDataset",
    "TreeData",
    "open_data",
    "place",
]

INDEX_FILE = "pack.index"
VERSION = 2
MAGIC = b"HPMLPACK"
RECORD = struct.Struct("<QQQqIBxH16s")
BODY_AT, HEADER_AT = 40, 48
PIECE_BYTES = 1 << 20


class PackError(Exception):
    """The data cannot be read; one line that says why."""


def open_data(path: str | os.PathLike[str], *, check: bool = True) -> Data:
    """Open a pack or a tree.

    Args:
        path: a directory that `hpml pack` made, or any other.
        check: compare the digest of a pack's index; reads the index once.

    Raises:
        PackError: it is no directory, or the index is damaged.
    """
    directory = os.fspath(path)
    if os.path.exists(os.path.join(directory, INDEX_FILE)):
        return PackedData(directory, check=check)
    if not os.path.isdir(directory):
        raise PackError(f"{directory}: no such directory")
    return TreeData(directory)


def place(name: str) -> tuple[bytes, bytes, bytes]:
    """Return what names are sorted by: directory, name up to its first dot, name."""
    directory, _, base = os.fsencode(name).rpartition(b"/")
    return directory, base.partition(b".")[0], base


class Data(abc.ABC):
    """Files with names and numbers; what packs and trees have in common."""

    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(path)

    @abc.abstractmethod
    def __len__(self) -> int:
        """Return how many files there are."""

    @abc.abstractmethod
    def name(self, number: int) -> str:
        """Return a file's path in the tree, `/` between its parts."""

    @abc.abstractmethod
    def size(self, key: Key) -> int:
        """Return a file's size in bytes."""

    @abc.abstractmethod
    def read(self, key: Key) -> bytes:
        """Return a file's contents.

        Args:
            key: its number or its name.

        Raises:
            KeyError: there is no file of that name.
            IndexError: there is no file of that number.
            PackError: it cannot be read.
        """

    def number(self, name: str) -> int:
        """Return a file's number.

        Raises:
            KeyError: there is no such file.
        """
        wanted, low, high = place(name), 0, len(self)
        while low < high:
            middle = (low + high) // 2
            if place(self.name(middle)) < wanted:
                low = middle + 1
            else:
                high = middle
        if low == len(self) or self.name(low) != name:
            raise KeyError(name)
        return low

    def __contains__(self, name: object) -> bool:
        try:
            self.number(str(name))
        except KeyError:
            return False
        return True

    def names(self) -> Iterator[str]:
        """Yield all names by number."""
        return (self.name(number) for number in range(len(self)))

    def samples(self) -> array[int]:
        """Return the number of each sample's first file; a sample ends where the next begins."""
        starts, last = array("Q"), None
        for number in range(len(self)):
            here = place(self.name(number))[:2]
            if here != last:
                starts.append(number)
            last = here
        return starts

    def _numbered(self, key: Key) -> int:
        if isinstance(key, str):
            return self.number(key)
        number = key + len(self) if key < 0 else key
        if not 0 <= number < len(self):
            raise IndexError(f"{self.path}: no file {key}, there are {len(self)}")
        return number


class PackedData(Data):
    """A pack: an index and tar archives."""

    def __init__(self, path: str, *, check: bool = True) -> None:
        super().__init__(path)
        self._lock = threading.Lock()
        self._open: dict[int, int] = {}
        self._index = index = os.path.join(self.path, INDEX_FILE)
        try:
            self._index_fd = self._open[-1] = os.open(index, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise PackError(f"{index}: {error.strerror or error}") from error
        if self._bytes(0, HEADER_AT)[: len(MAGIC)] != MAGIC:
            raise PackError(f"{index}: is no index of a pack")
        if check:
            self._check()
        version, length = struct.unpack("<II", self._bytes(BODY_AT, HEADER_AT - BODY_AT))
        if version != VERSION:
            raise PackError(f"{index}: has version {version}, this reader knows {VERSION}")
        told = json.loads(self._bytes(HEADER_AT, length))
        self._count: int = told["files"]
        self._names_bytes: int = told["names_bytes"]
        self._shards: list[str] = [one[0] for one in told["shards"]]
        self._records_at = HEADER_AT + length
        self._names_at = self._records_at + self._count * RECORD.size

    def _check(self) -> None:
        digest, at = hashlib.sha256(), BODY_AT
        while piece := os.pread(self._index_fd, PIECE_BYTES, at):
            digest.update(piece)
            at += len(piece)
        if digest.digest() != self._bytes(len(MAGIC), BODY_AT - len(MAGIC)):
            raise PackError(f"{self._index}: damaged, its digest is not that of its contents")

    def _bytes(self, at: int, count: int) -> bytes:
        """Read a part of the index: of a map, a file that was cut short would end the process."""
        data = os.pread(self._index_fd, count, at)
        if len(data) < count:
            raise PackError(f"{self._index}: damaged, too short")
        return data

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopened, (self.path,)

    def __len__(self) -> int:
        return self._count

    def __del__(self) -> None:
        for fd in getattr(self, "_open", {}).values():
            os.close(fd)

    def _record(self, number: int) -> tuple[Any, ...]:
        at = self._records_at + number * RECORD.size
        return RECORD.unpack(self._bytes(at, RECORD.size))

    def name(self, number: int) -> str:
        """Return a file's path in the tree, `/` between its parts."""
        number = self._numbered(number)
        start, end = self._record(number)[2], self._names_bytes
        if number + 1 < self._count:
            end = self._record(number + 1)[2]
        return os.fsdecode(self._bytes(self._names_at + start, end - start))

    def size(self, key: Key) -> int:
        """Return a file's size in bytes."""
        size: int = self._record(self._numbered(key))[1]
        return size

    def digest(self, key: Key) -> str:
        """Return a file's XXH3-128 in hexadecimal, as `xxhsum -H2` prints it."""
        digest: bytes = self._record(self._numbered(key))[-1]
        return digest.hex()

    def read(self, key: Key) -> bytes:
        """Return a file's contents, with one call to the file system (see `Data.read`)."""
        offset, size, _, _, shard, *_ = self._record(self._numbered(key))
        pieces, done = [], 0
        try:
            fd = self._shard(shard)
            while done < size:
                piece = os.pread(fd, size - done, offset + done)
                if not piece:
                    raise PackError(f"{self.path}/{self._shards[shard]}: cut short")
                pieces.append(piece)
                done += len(piece)
        except OSError as error:
            where = f"{self.path}/{self._shards[shard]}"
            raise PackError(f"{where}: {error.strerror or error}") from error
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _shard(self, number: int) -> int:
        """Return an archive's descriptor; a forked process uses those that its parent opened."""
        fd = self._open.get(number)
        if fd is None:
            with self._lock:
                fd = self._open.get(number)
                if fd is None:
                    path = os.path.join(self.path, self._shards[number])
                    fd = self._open[number] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return fd


class TreeData(Data):
    """The files of an unpacked tree; symbolic links to files in it count, as in a pack."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        top = os.path.realpath(self.path)
        names = []
        for directory, _, found in os.walk(top, onerror=_cannot_list):
            for name in found:
                full = os.path.join(directory, name)
                real = os.path.realpath(full) if os.path.islink(full) else full
                if real.startswith(top.rstrip("/") + "/") and os.path.isfile(real):
                    names.append(full[len(top.rstrip("/")) + 1 :])
        self._keys = sorted(place(name) for name in names)

    def __len__(self) -> int:
        return len(self._keys)

    def name(self, number: int) -> str:
        """Return a file's path in the tree, `/` between its parts."""
        directory, _, base = self._keys[self._numbered(number)]
        return os.fsdecode(directory + b"/" + base if directory else base)

    def number(self, name: str) -> int:
        """Return a file's number (see `Data.number`)."""
        at = bisect.bisect_left(self._keys, place(name))
        if at == len(self._keys) or self.name(at) != name:
            raise KeyError(name)
        return at

    def size(self, key: Key) -> int:
        """Return a file's size in bytes."""
        try:
            return os.stat(self._file(key)).st_size
        except OSError as error:
            raise PackError(f"{self._file(key)}: {error.strerror or error}") from error

    def read(self, key: Key) -> bytes:
        """Return a file's contents (see `Data.read`)."""
        path = self._file(key)
        try:
            with open(path, "rb", buffering=0) as stream:
                if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                    raise PackError(f"{path}: is no file any more")
                return stream.readall()
        except OSError as error:
            raise PackError(f"{path}: {error.strerror or error}") from error

    def _file(self, key: Key) -> str:
        return os.path.join(self.path, self.name(self._numbered(key)))


def _cannot_list(error: OSError) -> None:
    raise PackError(f"{error.filename}: {error.strerror or error}") from error


def _reopened(path: str) -> PackedData:
    """Open a pack that was pickled: its index was checked where it was opened first."""
    return PackedData(path, check=False)


if TYPE_CHECKING:

    class PackedDataset(Dataset[Any]):
        """Files or samples of a pack or a tree, as a map-style data set of PyTorch.

        Args:
            path: of the pack or tree.
            transform: called with (name, bytes); with `by_sample` with {ending: bytes}, where
                `__key__` is the name without its ending. None: gives its arguments back.
            endings: take only names that end so, such as (".jpg", ".png"); no use `by_sample`.
            by_sample: one item for all files that have the same name up to the first dot.
        """

        data: Data

        def __init__(
            self,
            path: str | os.PathLike[str],
            transform: Callable[..., Any] | None = None,
            *,
            endings: tuple[str, ...] = (),
            by_sample: bool = False,
        ) -> None: ...

        def __len__(self) -> int: ...

        def __getitem__(self, index: int) -> Any: ...


def _dataset_class() -> type:
    """Make the class; here, so that reading without torch does not import it."""
    from torch.utils.data import Dataset  # noqa: PLC0415

    class PackedDataset(Dataset):  # type: ignore[type-arg]
        def __init__(
            self,
            path: str | os.PathLike[str],
            transform: Callable[..., Any] | None = None,
            *,
            endings: tuple[str, ...] = (),
            by_sample: bool = False,
        ) -> None:
            self.data = open_data(path)
            self._transform = transform
            self._by_sample = by_sample
            if by_sample:
                self._numbers = self.data.samples()
            elif endings:
                names = enumerate(self.data.names())
                self._numbers = array("Q", (n for n, name in names if name.endswith(endings)))
            else:
                self._numbers = array("Q", range(len(self.data)))

        def __len__(self) -> int:
            return len(self._numbers)

        def __getitem__(self, index: int) -> Any:
            first = self._numbers[index]
            if not self._by_sample:
                item = (self.data.name(first), self.data.read(first))
                return self._transform(*item) if self._transform else item
            following = index % len(self) + 1
            end = self._numbers[following] if following < len(self) else len(self.data)
            sample: dict[str, Any] = {}
            for number in range(first, end):
                directory, _, base = self.data.name(number).rpartition("/")
                stem, _, ending = base.partition(".")
                sample["__key__"] = f"{directory}/{stem}" if directory else stem
                sample[ending] = self.data.read(number)
            return self._transform(sample) if self._transform else sample

    PackedDataset.__module__ = __name__
    PackedDataset.__qualname__ = "PackedDataset"  # so that it can be pickled by its name
    return PackedDataset


def __getattr__(name: str) -> Any:
    if name != "PackedDataset":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    made = globals()[name] = _dataset_class()
    return made
