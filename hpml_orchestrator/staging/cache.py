"""Data that outlives jobs: the entries of a root's cache, for all jobs of its user on this node.

    {root}/.cache/{key}/
        .owner.json            the process that made it
        .lease                 shared flock: in use; its modification time: last used
        .data.lock             one stager at a time
        .data.manifest    what was published
        .data.damaged     `hpml stage verify` found that it is not that any more
        .data.partial-*        a copy that is being made, or was when its stager died
        data/

The key is a digest of all that a look at the source tells, so a source that changed is another
entry. An entry is in use while a process holds its lease, and while a job directory links to it
whose owner lives: a shell that staged something goes on without hpml.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import os
import secrets
import stat
from typing import TYPE_CHECKING, NamedTuple

from hpml_orchestrator.errors import CapacityError, HpmlError, StagingError
from hpml_orchestrator.records.owner import Owner
from hpml_orchestrator.staging.capacity import Need, Room, fits
from hpml_orchestrator.staging.files import remove_tree, try_lock, unlock
from hpml_orchestrator.staging.manifest import is_whole, published_head, published_manifest
from hpml_orchestrator.staging.namelock import BusyError, NameLock
from hpml_orchestrator.staging.request import StagingStopped
from hpml_orchestrator.staging.root import (
    CACHE,
    FILE,
    LEASE,
    OWNER,
    TRASH,
    Root,
    as_staging_error,
    new_directory,
)
from hpml_orchestrator.staging.verify import verify

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from hpml_orchestrator.staging.faults import Retry
    from hpml_orchestrator.staging.manifest import Manifest
    from hpml_orchestrator.staging.plan import Plan
    from hpml_orchestrator.staging.progress import OnProgress

__all__ = [
    "DATA",
    "Cache",
    "Kept",
    "Obtained",
    "entry_key",
    "entry_users",
    "last_used",
    "linked_key",
    "whole",
]

DATA = "data"
_KEY_BYTES = 16
_STAT_BLOCK_BYTES = 512
_ROOM_TO_BEGIN = Need(1 << 20, 64)


def entry_key(plan: Plan | None, *, source: str, kind: str, options: Iterable[str] = ()) -> str:
    """Return the name of the entry for a source as it is now, as 32 hexadecimal digits.

    Over the real path and its status, the kind, the options, and names, sizes, times, modes and
    links of everything in the plan; without a plan the source's own status stands for all in it.
    BLAKE2b, which every Python has: the name must not depend on which of them looks.

    Raises:
        OSError: the source cannot be looked at.
    """
    real = os.path.realpath(source)
    info = os.stat(real)
    digest = hashlib.blake2b(digest_size=_KEY_BYTES)

    def add(*values: object) -> None:
        for value in values:
            data = os.fsencode(value) if isinstance(value, str) else repr(value).encode()
            digest.update(b"%d:" % len(data))
            digest.update(data)

    add(real, kind, sorted(options))
    if plan is not None:
        digest.update(plan.fingerprint)
    if plan is None or not stat.S_ISDIR(info.st_mode):
        add(info.st_size, info.st_mtime_ns, info.st_ino)
    return digest.hexdigest()


def linked_key(path: str) -> str:
    """Return the key of the entry that a path of a job links to; "" when it is no such link."""
    try:
        parts = os.readlink(path).split("/")
    except OSError:
        return ""
    return parts[2] if parts[:2] == ["..", CACHE] and parts[3:] == [DATA] else ""


class Kept:
    """An entry that this process holds a lease on.

    Attributes:
        key: its name.
        path: its directory.
        data: the published data in it, if there is any.
    """

    def __init__(self, root: Root, key: str, lease: int) -> None:
        self.key = key
        self.path = f"{root.cache}/{key}"
        self.data = f"{self.path}/{DATA}"
        self.lease = lease
        self.touch()

    def touch(self) -> None:
        """Note that it is used now."""
        with contextlib.suppress(OSError):  # a read-only file system: the order is lost, no more
            os.utime(self.lease)

    def link_from(self, path: str) -> None:
        """Make a path of a job lead to the data, in one step."""
        temporary = f"{os.path.dirname(path)}/.{os.path.basename(path)}.partial-link-"
        temporary += secrets.token_hex(4)
        os.symlink(f"../{CACHE}/{self.key}/{DATA}", temporary)
        os.rename(temporary, path)

    def release(self) -> None:
        """Give up the lease; the data stays until its room is needed."""
        if self.lease >= 0:
            self.touch()
            unlock(self.lease)
            self.lease = -1


class Obtained(NamedTuple):
    """An entry with whole data, and whether it was there already."""

    entry: Kept
    manifest: Manifest
    reused: bool


class Cache:
    """The entries of one root, as one job sees them.

    Args:
        root: of the user, on one base.
        owner: the process that answers for entries made here; its job key is this job's.
        retry: asked whether to stop while another job copies.
        on_progress: told how far the other job's copy is, while this one waits for it.
    """

    def __init__(
        self,
        root: Root,
        owner: Owner,
        retry: Retry,
        *,
        on_progress: OnProgress | None = None,
    ) -> None:
        self._root = root
        self._owner = owner
        self._retry = retry
        self._on_progress = on_progress

    def obtain(
        self,
        key: str,
        check: Callable[[str], Manifest | None],
        fill: Callable[[str, str, NameLock], Manifest] | None,
        *,
        waits: bool = True,
    ) -> Obtained | None:
        """Return the entry with whole data in it: found, waited for, or made.

        Args:
            key: see `entry_key`.
            check: returns the manifest of the data at a path if that is whole, else None.
            fill: publishes data by a name in a directory, and tells the lock how far it is; None:
                do not make an entry, only look for it.
            waits: until another job's copy is done. Two jobs that copy from node to node could wait
                for each other on different nodes: they must not.

        Returns:
            None when there is none and none is to be made, when the entry is damaged but other
            jobs use it (it stays theirs), and when another job is busy with it and `waits` is not.

        Raises:
            StagingError: the copy failed, here or in the job that this one waited for.
        """
        entry = self.take(key, create=fill is not None)
        if entry is None:
            return None
        try:
            obtained = self._obtain(entry, check, fill, waits=waits)
        except BusyError:
            obtained = None
        except BaseException:
            with contextlib.suppress(HpmlError, OSError):  # the first error is the one to tell
                self._leave(entry)
            entry.release()
            raise
        if obtained is None:
            self._leave(entry)
        return obtained

    def _obtain(
        self,
        entry: Kept,
        check: Callable[[str], Manifest | None],
        fill: Callable[[str, str, NameLock], Manifest] | None,
        *,
        waits: bool,
    ) -> Obtained | None:
        lock = NameLock(
            f"{entry.path}/.{DATA}.lock",
            self._retry,
            on_wait=self._on_progress,
            waits=waits,
        )
        with lock:
            with as_staging_error(entry.path):
                for name in os.listdir(entry.path):
                    if name.startswith(f".{DATA}.partial-"):
                        remove_tree(f"{entry.path}/{name}")
                manifest = check(entry.data)
                if manifest is not None and self._is_sure(entry):
                    return Obtained(entry, manifest, reused=True)
                if os.path.lexists(entry.data) and not self._take_away(entry):
                    return None
            if fill is None:
                return None
            lock.raise_reason("another job failed to stage the same data")
            try:
                return Obtained(entry, fill(entry.path, DATA, lock), reused=False)
            except (StagingStopped, CapacityError):
                raise  # the next one that waits takes over: it may have more time, or memory
            except Exception as error:
                lock.fail(str(error) or type(error).__name__)
                raise

    def _is_sure(self, entry: Kept) -> bool:
        """Say whether contents are right: looked at once after the machine has started anew.

        Names and sizes may outlive a crash where the last seconds of contents did not.

        Raises:
            StagingStopped: should_stop said so.
        """
        path = f"{entry.path}/{OWNER}"
        made = Owner.read(path)
        if made is not None and made.boot_id == self._owner.boot_id:
            return True
        report = verify(entry.data, should_stop=self._retry.stops)
        if not report.hashed or report.count:
            return False
        self._owner.write(path)
        return True

    def take(self, key: str, *, create: bool) -> Kept | None:
        """Return an entry with a lease on it, or None when there is none; it may be empty.

        Raises:
            StagingError: the root is not ours to use, or cannot be written.
        """
        path = f"{self._root.cache}/{key}"
        with self._root.hold(create=create) as there, as_staging_error(path):
            if not there:
                return None
            if create:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(self._root.cache, 0o700)
            if key not in self._root.cache_keys():
                if not create:
                    return None
                new_directory(self._root, path, self._owner)
            lease = os.open(f"{path}/{LEASE}", FILE, 0o600)
            fcntl.flock(lease, fcntl.LOCK_SH)
            return Kept(self._root, key, lease)

    def idle(self) -> list[tuple[float, str]]:
        """Return (last use, key) of the entries that nothing uses, the oldest first.

        Raises:
            StagingError: the root is not ours to use.
        """
        found = []
        with self._root.hold(create=False) as there, as_staging_error(self._root.cache):
            for key in self._root.cache_keys() if there else []:
                path = f"{self._root.cache}/{key}"
                if not self._root.user_of(path) and not entry_users(self._root, key):
                    found.append((last_used(path), key))
        return sorted(found)

    def remove(self, key: str) -> bool:
        """Remove an entry unless something uses it.

        Raises:
            StagingError: it cannot be removed.
        """
        path = f"{self._root.cache}/{key}"
        with self._root.hold(create=False) as there, as_staging_error(path):
            if not there or key not in self._root.cache_keys() or entry_users(self._root, key):
                return False
            trash = self._root.retire(path)
        if trash:
            self._root.sweep([trash])
        return bool(trash)

    def most_room(self, room: Room, own: str) -> Room:
        """Return the room that there would be without all entries, and without a job's own data.

        What is wanted may be one of them, also one that is in use, or take the place of another: up
        to there it has to be counted.

        Args:
            room: that is there.
            own: where the job's data lie or are linked, if there are any.

        Raises:
            StagingError: the root is not ours to use.
        """
        with self._root.hold(create=False) as there, as_staging_error(self._root.cache):
            keys = self._root.cache_keys() if there else []
        entries = {os.path.realpath(f"{self._root.cache}/{key}/{DATA}") for key in keys}
        more = 0
        for data in entries | {os.path.realpath(own)}:
            size, files = _size_of(data)
            more += size + files * room.block_bytes
        return dataclasses.replace(room, bytes=room.bytes + more)

    def room_without_idle(self, room: Room) -> Room:
        """Return the room that there would be without the entries that nothing uses.

        Raises:
            StagingError: the root is not ours to use.
        """
        more = files_more = 0
        for _, key in self.idle():
            size, files = _size_of(f"{self._root.cache}/{key}/{DATA}")
            more += size
            files_more += files
        inodes = None if room.inodes is None else room.inodes + files_more
        return dataclasses.replace(room, bytes=room.bytes + more, inodes=inodes)

    def make_room_to_begin(self, measure: Callable[[], Room]) -> list[str]:
        """Remove entries until a job's directory and records fit; see `make_room`."""
        return self.make_room(_ROOM_TO_BEGIN, measure)

    def make_room(self, need: Need, measure: Callable[[], Room]) -> list[str]:
        """Remove entries that nothing uses, least recently used first, until a need is met.

        None is removed when even all of them would not make enough room.

        Returns:
            the sources of what was removed.

        Raises:
            StagingError: the root is not ours to use.
        """
        room = measure()
        if fits(need, room):
            return []
        idle = [key for _, key in self.idle()]
        held = [_usage(f"{self._root.cache}/{key}") for key in idle]
        inodes = None if room.inodes is None else room.inodes + sum(item.inodes for item in held)
        most = room.bytes + sum(item.bytes for item in held)
        if not fits(need, dataclasses.replace(room, bytes=most, inodes=inodes)):
            return []
        removed = []
        for key in idle:
            head = published_head(f"{self._root.cache}/{key}/{DATA}")
            with contextlib.suppress(StagingError):  # one that resists must not stop the others
                if self.remove(key):
                    removed.append(str(head.get("source", key)))
            if fits(need, measure()):
                break
        return removed

    def _take_away(self, entry: Kept) -> bool:
        """Remove an entry's damaged data; False when another job uses it."""
        with self._root.hold(create=False):
            others = entry_users(self._root, entry.key, besides=self._owner.job_key)
            alone = not others and try_lock(entry.lease, exclusive=True)
            if alone:
                trash = f"{self._root.path}/{TRASH}{entry.key}-{secrets.token_hex(4)}"
                os.rename(entry.data, trash)
            # a refused change of a flock gives up the one that was held
            fcntl.flock(entry.lease, fcntl.LOCK_SH)
        if alone:
            remove_tree(trash)
        return alone

    def _leave(self, entry: Kept) -> None:
        """Give up an entry, and remove it when nothing was published in it by anyone."""
        trash = None
        with self._root.hold(create=False) as there:
            entry.release()
            if there and os.path.lexists(entry.path) and not os.path.lexists(entry.data):
                trash = self._root.retire(entry.path)
        if trash:
            self._root.sweep([trash])


def entry_users(root: Root, key: str, *, besides: str = "") -> list[str]:
    """Return the jobs whose directories link to an entry and live; the root is held."""
    found = []
    for job_key in root.job_keys():
        directory = f"{root.path}/{job_key}"
        if job_key != besides and _links(directory, key) and root.user_of(directory):
            found.append(job_key)
    return found


def whole(data: str) -> Manifest | None:
    """Return the manifest of published data if its names and sizes are right, else None."""
    manifest = published_manifest(data)
    return manifest if manifest is not None and is_whole(data, manifest) else None


def last_used(directory: str) -> float:
    """Return when an entry was last used, in seconds since the epoch."""
    for path in (f"{directory}/{LEASE}", directory):
        with contextlib.suppress(OSError):
            return os.lstat(path).st_mtime
    return 0.0


def _links(directory: str, key: str) -> bool:
    """Say whether a job directory links to an entry."""
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        return any(one.is_symlink() and linked_key(one.path) == key for one in entries)
    return False


def _size_of(data: str) -> tuple[int, int]:
    """Return bytes and files of published data by its manifest; zeros if it has none."""
    head = published_head(data)
    size, files = head.get("bytes"), head.get("files")
    if not isinstance(size, int) or not isinstance(files, int):  # nobody knows what others wrote
        return 0, 0
    return max(0, size), max(0, files)


def _usage(directory: str) -> Need:
    """Return what a directory takes on its file system."""
    size = inodes = 0
    seen: set[int] = set()
    for parent, directories, files in os.walk(directory):
        for name in (*directories, *files):
            with contextlib.suppress(OSError):
                info = os.lstat(f"{parent}/{name}")
                if info.st_nlink > 1 and not stat.S_ISDIR(info.st_mode):
                    if info.st_ino in seen:
                        continue
                    seen.add(info.st_ino)
                size += info.st_blocks * _STAT_BLOCK_BYTES
                inodes += 1
    return Need(size, inodes + 1)
