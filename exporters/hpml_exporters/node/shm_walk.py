"""A walk through /dev/shm, where users put anything they like.

Nothing is followed, no file is opened that might wait, and no other file system is touched: each
entry is held first, then asked for its mount, and only then looked at (see `Held`), so that no file
system of a user's that never answers can hold the exporter, whenever it is mounted.

A file of several names is counted with each by its share, so that all of them make it once, with
no list of what was seen; a name in a place that the exporter cannot read takes its share with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from hpml_exporters.node.held import Held

__all__ = ["Found", "Walk"]

_BLOCK_BYTES = 512  # of st_blocks, whatever the file system's own
_MAX_DEPTH = 32
_MANIFEST_BYTES = 65536
_ROOT = "hpml-"
_CACHED = "../.cache/"
_CACHED_DEPTH = 4  # ../.cache/{key}/data


@dataclass
class Found:
    """Bytes of jobs, by job id, and of other files, by user."""

    of_job: dict[tuple[int, str], int] = field(default_factory=dict)
    of_user: dict[int, int] = field(default_factory=dict)


class _Seen(NamedTuple):
    """What lies at a name.

    Attributes:
        told: its inode.
        fd: of a directory, to read it; -1 of everything else.
    """

    told: os.stat_result
    fd: int


class Walk:
    """One walk through /dev/shm, in pieces.

    Args:
        root: where it is.
        size: bytes that no manifest can exceed.
        staged_only: leave out what hpml did not stage.

    Raises:
        OSError: no descriptor is left.
    """

    def __init__(self, root: str, size: int, *, staged_only: bool = False) -> None:
        self.found = Found()
        self._staged_only = staged_only
        self._size = size
        self._held = Held()
        self._mount = b""
        self._steps = self._top(root)

    def go_on(self, entries: int) -> bool:
        """Look at so many entries; True once all were looked at."""
        return any(next(self._steps, self) is self for _ in range(entries))

    def close(self) -> None:
        """Close the directories that are open."""
        self._steps.close()
        self._held.close()

    def _top(self, root: str) -> Generator[None, None, None]:
        try:
            top = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            return
        try:
            self._held.hold(".", top)
            self._mount = self._held.mount()
        except OSError:
            os.close(top)
            raise
        for entry in _entries(top):
            yield
            seen = self._look(entry.name, top)
            if seen is None:
                continue
            uid = seen.told.st_uid
            if seen.fd >= 0 and entry.name == f"{_ROOT}{uid}":
                yield from self._staged(seen.fd, uid)
            elif not self._staged_only:
                yield from self._other(seen, 1)
            elif seen.fd >= 0:
                os.close(seen.fd)

    def _staged(self, user: int, uid: int) -> Iterator[None]:
        """Look at the directory of a user, which holds one of each job."""
        for entry in _entries(user):
            yield
            jobid = entry.name.rpartition("-")[2]
            if entry.name.startswith(".") or not (jobid.isascii() and jobid.isdigit()):
                continue
            job = self._look(entry.name, user)
            if job is None or job.fd < 0:
                continue
            key = uid, jobid
            for one in _entries(job.fd):
                yield
                amount = self._published(one, job.fd, user)
                if amount is None:
                    amount = yield from self._tree(one.name, job.fd, 3)
                self.found.of_job[key] = self.found.of_job.get(key, 0) + amount

    def _published(self, entry: os.DirEntry[str], job: int, user: int) -> int | None:
        """Return the size of published data; None of what is none, or not published yet."""
        name = entry.name
        if name.startswith("."):
            return None
        if entry.is_symlink():
            try:
                target = os.readlink(name, dir_fd=job)
            except OSError:
                return 0
            if not target.startswith(_CACHED) or target.count("/") + 1 != _CACHED_DEPTH:
                return 0
            amount = self._cached_bytes(target.split("/")[2], user)
        else:
            amount = self._manifest_bytes(f".{name}.manifest", job)
        return None if amount is None else min(amount, self._size)

    def _cached_bytes(self, key: str, user: int) -> int | None:
        """Return the size of a cached dataset in the directory of a user."""
        if key in {"", ".", ".."}:
            return None
        folder = user
        with contextlib.ExitStack() as opened:
            for name in (".cache", key):
                seen = self._look(name, folder)
                if seen is None or seen.fd < 0:
                    return None
                folder = seen.fd
                opened.callback(os.close, folder)
            return self._manifest_bytes(".data.manifest", folder)

    def _manifest_bytes(self, name: str, parent: int) -> int | None:
        """Return the size in a manifest's first line; None where there is none."""
        if not self._hold(name, parent):
            return None
        try:
            if not stat.S_ISREG(os.fstat(self._held.fd).st_mode):
                return None
            fd = self._held.file()
            try:
                line = os.read(fd, _MANIFEST_BYTES).partition(b"\n")[0]
            finally:
                os.close(fd)
        except OSError:
            return None
        with contextlib.suppress(ValueError, RecursionError):
            told = json.loads(line)
            amount = told.get("bytes") if isinstance(told, dict) else None
            if type(amount) is int and amount >= 0:
                return amount
        return None

    def _other(self, seen: _Seen, depth: int) -> Iterator[None]:
        """Add what no job staged to its user's."""
        mine = self.found.of_user
        uid = seen.told.st_uid
        mine[uid] = mine.get(uid, 0) + _share(seen.told)
        if seen.fd < 0:
            return
        for entry in _entries(seen.fd):
            yield
            inner = self._look(entry.name, seen.fd, depth + 1)
            if inner is not None:
                yield from self._other(inner, depth + 1)

    def _tree(self, name: str, parent: int, depth: int) -> Generator[None, None, int]:
        """Return the size of a file, or of all that a directory holds."""
        seen = self._look(name, parent, depth)
        if seen is None:
            return 0
        size = _share(seen.told)
        if seen.fd >= 0:
            for entry in _entries(seen.fd):
                yield
                size += yield from self._tree(entry.name, seen.fd, depth + 1)
        return size

    def _look(self, name: str, parent: int, depth: int = 1) -> _Seen | None:
        """Return what an entry is, unless it is another file system, or gone.

        A directory that is not too deep is open then, for the caller to close.
        """
        if not self._hold(name, parent):
            return None
        try:
            told = os.fstat(self._held.fd)
        except OSError:
            return None
        fd = -1
        if stat.S_ISDIR(told.st_mode) and depth < _MAX_DEPTH:
            with contextlib.suppress(OSError):  # not for us
                fd = self._held.directory()
        return _Seen(told, fd)

    def _hold(self, name: str, parent: int) -> bool:
        """Hold what lies there; False where nothing does, or another file system."""
        try:
            self._held.hold(name, parent)
            return self._held.mount() == self._mount
        except OSError:
            return False


def _entries(fd: int) -> Iterator[os.DirEntry[str]]:
    """Yield a directory's entries, and close it; none where it cannot be read."""
    try:
        with os.scandir(fd) as entries:
            yield from entries
    except OSError:
        return
    finally:
        os.close(fd)


def _share(told: os.stat_result) -> int:
    """Return the bytes of a file that one of its names stands for."""
    taken = told.st_blocks * _BLOCK_BYTES
    return taken if stat.S_ISDIR(told.st_mode) else taken // max(1, told.st_nlink)
