"""The manifest of published data, which later stagers use to check that the data is complete.

A manifest has two lines of JSON: the manifest, with a BLAKE2b-128 of the second line, and the
listing. Names that are not UTF-8 keep their bytes; the digests form one hexadecimal string. They
are XXH3-128 if the interpreter has xxhash, else BLAKE2b with 128 bits: the node agent runs without
site-packages, but loads xxhash from there.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.machinery
import importlib.util
import json
import os
import stat
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from hpml_orchestrator.errors import NotFoundError
from hpml_orchestrator.records.files import SCHEMA_VERSION, write_text
from hpml_orchestrator.staging.request import (
    PATHS_TOLD,
    StagingStopped,
    is_directory,
    shown,
    why,
)
from hpml_orchestrator.staging.source import BLOCK_BYTES
from hpml_orchestrator.staging.workers import run_forked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import ModuleType

    from hpml_orchestrator.staging.plan import CopyPlan
    from hpml_orchestrator.staging.source import Buffer

DIGEST_BYTES = 16


class Digest(Protocol):
    """A hash object, as in hashlib."""

    def update(self, data: Buffer, /) -> object:
        """Add data."""

    def digest(self) -> bytes:
        """Return the 16 bytes."""


class Hashing(NamedTuple):
    """A way to hash; `name` is "xxh3_128" or "blake2b_128"."""

    name: str
    new: Callable[[], Digest]


def _blake2b() -> Digest:
    return hashlib.blake2b(digest_size=DIGEST_BYTES)


@functools.cache
def hashing() -> Hashing:
    """Return the fastest hashing that this interpreter has."""
    return hashing_named("xxh3_128") or Hashing("blake2b_128", _blake2b)


def hashing_named(name: str) -> Hashing | None:
    """Return a hashing by its name; None if this interpreter does not have it."""
    if name == "blake2b_128":
        return Hashing(name, _blake2b)
    module = _xxhash()
    return Hashing(name, module.xxh3_128) if name == "xxh3_128" and module else None


def hashed(blocks: Iterable[Buffer], how: Hashing) -> bytes:
    """Return the digest of a sequence of blocks."""
    digest = how.new()
    for data in blocks:
        digest.update(data)
    return digest.digest()


def _xxhash() -> ModuleType | None:
    try:
        return importlib.import_module("xxhash")
    except ImportError:
        pass
    # The agent runs with -S, so sys.path has no site-packages. Load only this one package from
    # there, to keep the rest of the user's environment out of the agent.
    prefix = os.path.dirname(os.path.dirname(sys.executable))
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    places = [f"{prefix}/{lib}/{version}/site-packages" for lib in ("lib", "lib64")]
    spec = importlib.machinery.PathFinder.find_spec("xxhash", places)
    if spec is None or spec.loader is None:
        return None
    module = importlib.util.module_from_spec(spec)
    # Register it before executing, as the import system does: the package imports its submodules.
    sys.modules["xxhash"] = module
    try:
        spec.loader.exec_module(module)
    except ImportError:  # built for another Python
        del sys.modules["xxhash"]
        return None
    return module


_MOST_WORKERS = 16
_MOST_TASKS = 1024


@dataclass(frozen=True)
class Listing:
    """The contents of a published directory; all paths are relative to it.

    Attributes:
        files: names of files; for hard links, the first name.
        sizes: sizes of the files, in bytes.
        digests: digests of the files, or empty.
        hard_links: (name, first name).
        directories: names, parents before children.
        symlinks: (name, text).
    """

    files: list[str] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    hard_links: list[tuple[str, str]] = field(default_factory=list)
    directories: list[str] = field(default_factory=list)
    symlinks: list[tuple[str, str]] = field(default_factory=list)

    @classmethod
    def of(cls, plan: CopyPlan, digests: list[bytes]) -> Listing:
        """Return the listing of a copied plan."""
        return cls(
            [entry.path for entry in plan.files],
            [entry.size for entry in plan.files],
            digests,
            [(link.path, link.first) for link in plan.hard_links],
            [entry.path for entry in plan.directories],
            [(link.path, link.target) for link in plan.symlinks],
        )


@dataclass(frozen=True)
class Manifest:
    """The record of one published directory; bytes count each inode once, files each name.

    Attributes:
        name: the job's name for the data.
        source: path of the source.
        kind: kind of the source.
        method: how the data was brought here.
        bytes: total size of its files.
        files: number of file names.
        digest: digest of the tree, as "xxh3_128:<hex>"; "" without hashing.
        listing: the contents.
    """

    name: str
    source: str
    kind: str
    method: str
    bytes: int
    files: int
    digest: str = ""
    listing: Listing = field(default_factory=Listing)

    def write(self, path: str) -> None:
        """Write the manifest durably.

        Raises:
            RecordError: the directory cannot be written.
        """
        listing = {**vars(self.listing), "digests": b"".join(self.listing.digests).hex()}
        body = json.dumps(listing, ensure_ascii=False).encode("utf-8", "surrogateescape")
        head = {**vars(self), "schema_version": SCHEMA_VERSION, "body": _sum(body)}
        del head["listing"]
        write_text(path, json.dumps(head).encode() + b"\n" + body)

    @classmethod
    def read(cls, path: str) -> Manifest | None:
        """Read a manifest; return None if it is missing or damaged."""
        try:
            with open(path, "rb") as stream:
                line, _, body = stream.read().partition(b"\n")
            head = json.loads(line)
            if head.pop("schema_version") != SCHEMA_VERSION or head.pop("body") != _sum(body):
                return None
            lists = json.loads(body.decode("utf-8", "surrogateescape"))
            sums = bytes.fromhex(lists.pop("digests"))
            digests = [sums[at : at + DIGEST_BYTES] for at in range(0, len(sums), DIGEST_BYTES)]
            for links in ("hard_links", "symlinks"):
                lists[links] = list(map(tuple, lists[links]))
            return cls(**head, listing=Listing(**lists, digests=digests))
        except (OSError, KeyError, TypeError, ValueError, AttributeError):
            return None


def _sum(body: bytes) -> str:
    return hashlib.blake2b(body, digest_size=DIGEST_BYTES).hexdigest()


def tree_digest(listing: Listing, how: Hashing) -> str:
    """Return a digest of all names, types, sizes, contents and link texts; "" without digests.

    It does not depend on how the tree was staged: hard links count as files, and modes and times
    are left out. It hashes one record per name, sorted by name: name, NUL, type (f, d or l), size
    in
    8 bytes (little-endian), and the file's digest, or the link's text and NUL.
    """
    if len(listing.digests) != len(listing.files):
        return ""
    code = sys.getfilesystemencoding()
    records = [
        b"%b\0f%b%b" % (name.encode(code, "surrogateescape"), size.to_bytes(8, "little"), digest)
        for name, size, digest in zip(listing.files, listing.sizes, listing.digests)
    ]
    if listing.hard_links:
        at = {name: number for number, name in enumerate(listing.files)}
        for name, first in listing.hard_links:
            size = listing.sizes[at[first]].to_bytes(8, "little")
            records.append(b"%b\0f%b%b" % (os.fsencode(name), size, listing.digests[at[first]]))
    records += [b"%b\0d" % os.fsencode(name) for name in listing.directories]
    for name, text in listing.symlinks:
        target = os.fsencode(text)
        records.append(
            b"%b\0l%b%b\0" % (os.fsencode(name), len(target).to_bytes(8, "little"), target)
        )
    # Sort, because a scan, an archive and a pack list the same tree in different orders.
    records.sort()
    whole = how.new()
    whole.update(b"".join(records))
    return f"{how.name}:{whole.digest().hex()}"


def verify_tree(directory: str, manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Yield (path, fault) of all differences from the manifest: names, types, sizes, link texts.

    Raises:
        OSError: the directory cannot be read.
    """
    listing = manifest.listing
    sizes = dict(zip(listing.files, listing.sizes))
    sizes.update([(name, sizes[first]) for name, first in listing.hard_links])
    others: dict[str, str | None] = {**dict.fromkeys(listing.directories), **dict(listing.symlinks)}
    todo = [""]
    while todo:
        prefix = todo.pop()
        with os.scandir(f"{directory}/{prefix}") as entries:
            for entry in sorted(entries, key=_name):
                path = prefix + entry.name
                is_directory = entry.is_dir(follow_symlinks=False)
                if is_directory:
                    todo.append(f"{path}/")
                size = sizes.pop(path, None)
                if size is not None:
                    info = entry.stat(follow_symlinks=False)
                    if not stat.S_ISREG(info.st_mode) or info.st_size != size:
                        yield path, "is not a file of the size that was staged"
                elif path not in others:
                    yield path, "was not staged"
                else:
                    text = os.readlink(entry.path) if entry.is_symlink() else None
                    if others.pop(path) != text or (text is None and not is_directory):
                        yield path, "is not the directory or link that was staged"
    for path in [*sizes, *others]:
        yield path, "is missing"


def _name(entry: os.DirEntry[str]) -> str:
    return entry.name


def content_digest(path: str, how: Hashing) -> bytes:
    """Return the digest of a file's contents.

    Raises:
        OSError: it cannot be read.
    """
    buffer = memoryview(bytearray(BLOCK_BYTES))
    with open(path, "rb", buffering=0) as stream:
        return hashed((buffer[:count] for count in iter(lambda: stream.readinto(buffer), 0)), how)


def manifest_path(data: str) -> str:
    """Return the path of the manifest next to published data."""
    data = os.path.realpath(data)
    return f"{os.path.dirname(data)}/.{os.path.basename(data)}.manifest"


def damage_path(data: str) -> str:
    """Return the path of the file that marks published data as damaged."""
    data = os.path.realpath(data)
    return f"{os.path.dirname(data)}/.{os.path.basename(data)}.damaged"


def published_manifest(data: str) -> Manifest | None:
    """Read the manifest of published data."""
    return Manifest.read(manifest_path(data))


def is_whole(directory: str, manifest: Manifest) -> bool:
    """Return whether published data matches its manifest, contents aside, and is not marked."""
    if os.path.lexists(damage_path(directory)):
        return False
    try:
        return next(verify_tree(directory, manifest), None) is None
    except OSError:
        return False


@dataclass
class VerifyReport:
    """Result of a comparison.

    Attributes:
        path: path of the data.
        files: number of staged file names.
        bytes: total size of the files that were read.
        seconds: wall time.
        hashed: contents were compared; otherwise only names, types, sizes and links, because there
            are no digests or this Python lacks their hash.
        count: number of paths with faults.
        problems: (path below the data, fault) of the first 20.
    """

    path: str
    files: int = 0
    bytes: int = 0
    seconds: float = 0.0
    hashed: bool = False
    count: int = 0
    problems: list[tuple[str, str]] = field(default_factory=list)

    def add(self, path: str, fault: str) -> None:
        """Add a path with a fault."""
        self.count += 1
        if len(self.problems) < PATHS_TOLD:
            self.problems.append((path, fault))


def verify(
    path: str,
    *,
    workers: int | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> VerifyReport:
    """Compare published data with its manifest.

    Damaged data is marked, so that it is not used again and `clean` may remove it.

    Args:
        path: path of the data.
        workers: number of reading processes; by default one per CPU, at most 16.
        should_stop: called ten times a second.

    Raises:
        NotFoundError: the data or its manifest does not exist.
        StagingStopped: should_stop returned True.
        StagingError: a worker died, or this user may not enter a parent directory.
        OSError: the data cannot be read.
    """
    began = time.monotonic()
    manifest = published_manifest(path)
    if manifest is None:
        there = is_directory(path) or os.path.lexists(path)
        what = "is not staged data, or its manifest is gone" if there else "does not exist"
        raise NotFoundError(f"{shown(path)} {what}", hint="`hpml stage ls` shows what is staged")
    listing = manifest.listing
    how = hashing_named(manifest.digest.partition(":")[0]) if listing.digests else None
    report = VerifyReport(path, files=manifest.files, hashed=how is not None)
    faulty = set()
    # Names and sizes first: reading files that are known to be damaged would only waste time.
    for name, fault in verify_tree(path, manifest):
        report.add(name, fault)
        faulty.add(name)
    if how is not None:
        numbers = [at for at, name in enumerate(listing.files) if name not in faulty]
        report.bytes = sum(listing.sizes[number] for number in numbers)
        count = workers or min(_MOST_WORKERS, len(os.sched_getaffinity(0)))
        _compare(path, listing, numbers, how, count, report, should_stop)
    _mark(path, damaged=report.count > 0)
    report.seconds = time.monotonic() - began
    return report


def _mark(path: str, *, damaged: bool) -> None:
    mark = damage_path(path)
    with contextlib.suppress(OSError):
        if not damaged:
            os.unlink(mark)
        # Root must not mark a user's data: root would own the mark in the user's directory.
        elif os.stat(os.path.dirname(mark)).st_uid == os.geteuid():
            os.close(os.open(mark, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))


def _compare(
    path: str,
    listing: Listing,
    numbers: list[int],
    how: Hashing,
    workers: int,
    report: VerifyReport,
    should_stop: Callable[[], bool],
) -> None:
    def faults(task: int) -> list[tuple[str, str]]:
        found = []
        for number in numbers[task::tasks]:
            name = listing.files[number]
            try:
                same = content_digest(f"{path}/{name}", how) == listing.digests[number]
            except OSError as error:
                found.append((name, why(error)))
            else:
                if not same:
                    found.append((name, "its contents differ from what was staged"))
        return found

    def add(found: list[tuple[str, str]]) -> None:
        for name, fault in found:
            report.add(name, fault)

    def heartbeat() -> None:
        if should_stop():
            raise StagingStopped

    heartbeat()
    tasks = min(_MOST_TASKS, len(numbers))
    run_forked(
        tasks,
        lambda _report: contextlib.nullcontext(faults),
        workers=max(1, min(workers, tasks)),
        on_result=add,
        heartbeat=heartbeat,
    )
