"""Which file of a tree goes into which shard, and where: decided before a byte is written."""

from __future__ import annotations

import os
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from xxhash import xxh3_128

from hpml_orchestrator.packing import ustar
from hpml_orchestrator.staging.packindex import TREE_FILE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hpml_orchestrator.staging.plan import Entry, Plan

__all__ = ["TREE_FILE", "Layout", "Shard", "file_header", "lay_out", "place", "sample"]

_DIGITS = 5
_NANO = 1_000_000_000


@dataclass(frozen=True)
class Shard:
    """One archive: its file, which of the layout's files it holds, its size and what it is of.

    Attributes:
        file: name of the archive.
        first: number of its first file.
        end: number behind its last one.
        bytes: size of the archive.
        plan: digest of all that its bytes depend on but for the files' contents.
    """

    file: str
    first: int
    end: int
    bytes: int
    plan: str


@dataclass
class Layout:
    """A tree as archives.

    Attributes:
        tree: what was found.
        files: in the order of the pack.
        offsets: where each file's data begin in its shard.
        tail: headers of directories and links.
        shards: the archives; the last one is TREE_FILE.
        shard_bytes: the size that was asked for.
    """

    tree: Plan
    files: Sequence[Entry]
    shard_bytes: int
    tail: bytes = b""
    offsets: array[int] = field(default_factory=lambda: array("Q"))
    shards: list[Shard] = field(default_factory=list)

    @property
    def archive_bytes(self) -> int:
        """Size of all archives."""
        return sum(shard.bytes for shard in self.shards)

    def digest(self) -> str:
        """Return a digest of all that the pack's bytes depend on but for the files' contents."""
        whole = xxh3_128(b"%d\n" % self.shard_bytes)
        for entry in self.files:
            mtime = entry.mtime_ns // _NANO
            whole.update(os.fsencode(entry.path))
            whole.update(b"\0%d %d %d\n" % (entry.mode & 0o777, mtime, entry.size))
        whole.update(self.tail)
        return whole.hexdigest()


def lay_out(tree: Plan, shard_bytes: int) -> Layout:
    """Fill shards up to a size in the pack's order; a sample is never torn apart.

    Args:
        tree: what is to be packed.
        shard_bytes: a shard grows larger only where one sample alone does.
    """
    keyed = sorted((place(os.fsencode(entry.path)), entry) for entry in tree.files)
    layout = Layout(tree, [entry for _, entry in keyed], shard_bytes, _tail(tree))
    cuts: list[tuple[int, int, int]] = []  # first, end, bytes
    begin = at = 0
    for first, end in _samples(layout.files):
        offsets = []
        grown = at
        for entry in layout.files[first:end]:
            start = grown + ustar.header_bytes(os.fsencode(entry.path), entry.size)
            offsets.append(start)
            grown = start + entry.size + ustar.padding(entry.size)
        if grown + len(ustar.END) > shard_bytes and first > begin:
            cuts.append((begin, first, at))
            offsets = [offset - at for offset in offsets]
            begin, grown = first, grown - at
        layout.offsets.extend(offsets)
        at = grown
    if layout.files:
        cuts.append((begin, len(layout.files), at))
    digits = max(_DIGITS, len(str(len(cuts) - 1)))
    for number, (first, end, size) in enumerate(cuts):
        name = f"data-{number:0{digits}d}.tar"
        plan = _plan(layout.files[first:end])
        layout.shards.append(Shard(name, first, end, size + len(ustar.END), plan))
    count = len(layout.files)
    size = len(layout.tail) + len(ustar.END)
    plan = xxh3_128(layout.tail).hexdigest()
    layout.shards.append(Shard(TREE_FILE, count, count, size, plan))
    return layout


def place(name: bytes) -> tuple[bytes, bytes, bytes]:
    """Return what names are sorted by: directory, name up to its first dot, name.

    Plain order would tear samples apart: `a.d/x` stands between `a.cls` and `a.jpg`.

    >>> sorted([b"a.jpg", b"a.d/x", b"b", b"a.cls"], key=place)
    [b'a.cls', b'a.jpg', b'b', b'a.d/x']
    """
    directory, _, base = name.rpartition(b"/")
    return directory, base.partition(b".")[0], base


def sample(name: bytes) -> tuple[bytes, bytes]:
    """Return what the files of one sample have in common, by webdataset's convention.

    >>> sample(b"train/0001.jpg") == sample(b"train/0001.seg.png")
    True
    """
    return place(name)[:2]


def file_header(entry: Entry) -> bytes:
    """Return the header of a regular file."""
    return ustar.header(
        os.fsencode(entry.path),
        mode=entry.mode,
        mtime=entry.mtime_ns // _NANO,
        size=entry.size,
    )


def _samples(files: Sequence[Entry]) -> Iterator[tuple[int, int]]:
    """Yield the first number of each sample and the one behind its last."""
    first = 0
    last = None
    for number, entry in enumerate(files):
        here = sample(os.fsencode(entry.path))
        if here != last and number:
            yield first, number
            first = number
        last = here
    if files:
        yield first, len(files)


def _plan(files: Sequence[Entry]) -> str:
    digest = xxh3_128()
    for entry in files:
        digest.update(os.fsencode(entry.path))
        digest.update(b"\0%d %d %d\n" % (entry.mode, entry.mtime_ns, entry.size))
    return digest.hexdigest()


def _tail(tree: Plan) -> bytes:
    """Return headers of links, then of directories: making a link would change their times."""
    found: list[bytes] = []
    named = {hard.first for hard in tree.hard_links}
    firsts = {entry.path: entry for entry in tree.files if entry.path in named}
    for hard in sorted(tree.hard_links, key=lambda one: place(os.fsencode(one.path))):
        first = firsts[hard.first]
        found.append(
            ustar.header(
                os.fsencode(hard.path),
                ustar.HARD_LINK,
                mode=first.mode,
                mtime=first.mtime_ns // _NANO,
                link=os.fsencode(hard.first),
            )
        )
    found += (
        ustar.header(
            os.fsencode(link.path),
            ustar.SYMLINK,
            mode=0o777,
            mtime=link.mtime_ns // _NANO,
            link=os.fsencode(link.target),
        )
        for link in sorted(tree.symlinks, key=lambda one: place(os.fsencode(one.path)))
    )
    for entry in sorted(tree.directories, key=lambda one: os.fsencode(one.path).split(b"/")):
        name = os.fsencode(entry.path)
        mtime = entry.mtime_ns // _NANO
        found.append(ustar.header(name, ustar.DIRECTORY, mode=entry.mode, mtime=mtime))
    return b"".join(found)
