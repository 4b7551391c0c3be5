"""A user's directory on a node: areas of jobs, kept data, leases, and rules of removal.

    {base}/hpml-{uid}/            mode 0700
        .hpml-staging             marker: nothing is removed in a directory without it
        .lock                     held while areas and entries come and go
        {job_key}/                the area of a job
            .owner.json           the process that answers for it
            .lease                shared flock: in use
            .{name}.lock          one stager for this name at a time
            {name}                a link to ../.cache/{key}/data
        .cache/{key}/             an entry: the data of one source
            .owner.json, .lease   as above; the lease's modification time is its last use
            .data.lock            one stager for this entry at a time
            .data.manifest        what was published
            .data.damaged         `hpml stage verify` found damage
            .data.partial-*       a copy in progress, or one whose stager died
            data/                 the data
        .new-*, .trash-*          a directory before and after its life

The key of an entry that is kept for later jobs is a digest of its source. Data that are removed
with their job are in its own entry, with the key {name}@{job_key}. An entry is in use while a
process holds its lease, and while the area of a living job links to it: a shell that has staged
something uses the data without any process of hpml.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
import time
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import HpmlError, InputError, StagingError
from hpml_orchestrator.records.mounts import SHARED_TYPES, file_system_type
from hpml_orchestrator.records.owner import Owner, owner_is_alive
from hpml_orchestrator.records.texts import age_text
from hpml_orchestrator.staging.faults import is_directory, shown, why
from hpml_orchestrator.staging.files import (
    CREATE_OR_OPEN,
    is_locked,
    remove_tree,
    try_lock,
    unlock,
)
from hpml_orchestrator.staging.manifest import is_whole, published_manifest
from hpml_orchestrator.staging.space import fits, room_without

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hpml_orchestrator.staging.manifest import Manifest
    from hpml_orchestrator.staging.space import Need, Room

MARKER = ".hpml-staging"
DATA = "data"
LOCK = ".lock"
OWNER = ".owner.json"
LEASE = ".lease"
CACHE = ".cache"
NEW, TRASH = ".new-", ".trash-"
PARTIAL = f".{DATA}.partial-"
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW


def base_above(path: str) -> str:
    """Return the base of this user's store that contains a path; "" if none does."""
    above, inside, _ = f"{path}/".partition(f"/hpml-{os.getuid()}/")
    return inside and (above or "/")


def linked_key(path: str) -> str:
    """Return the key of the entry that a path of a job links to; "" if it is not such a link."""
    try:
        parts = os.readlink(path).split("/")
    except OSError:
        return ""
    return parts[2] if parts[:2] == ["..", CACHE] and parts[3:] == [DATA] else ""


def own_key(name: str, job_key: str) -> str:
    """Return the key of the entry of data that go with their job."""
    return f"{name}@{job_key}"


def job_of(entry: str) -> str:
    """Return the key of the job that an entry goes with; "" if it is kept for later jobs."""
    return os.path.basename(entry).partition("@")[2]


def whole(data: str) -> Manifest | None:
    """Return the manifest of published data if its names and sizes are right, else None."""
    manifest = published_manifest(data)
    return manifest if manifest is not None and is_whole(data, manifest) else None


class NodeStore:
    """The directory `{base}/hpml-{uid}`.

    Args:
        base: an absolute directory on the node, for example /dev/shm.
        proc_root: where to look for processes and mounts.

    Attributes:
        path: of the directory.
        cache: of its entries.
    """

    def __init__(self, base: str, *, proc_root: str = "/proc") -> None:
        if not os.path.isabs(base):
            raise InputError("must be an absolute path", field="target", value=base)
        self.base = base
        self.path = f"{base.rstrip('/')}/hpml-{os.getuid()}"
        self.cache = f"{self.path}/{CACHE}"
        self.proc_root = proc_root

    def check_base(self) -> None:
        """Refuse a base that is not a directory or that nodes share.

        Raises:
            InputError: one of these.
            StagingError: a directory above it is closed to this user.
        """
        if not is_directory(self.base):
            raise InputError("no such directory on this node", field="target", value=self.base)
        kind = file_system_type(self.base, proc_root=self.proc_root)
        if kind in SHARED_TYPES:
            raise InputError(
                f"is on {kind}, which nodes share; staging is for the node's own storage",
                field="target",
                value=self.base,
                hint="shm and local are the node's own; others: see `findmnt -T DIR`",
            )

    @contextlib.contextmanager
    def hold(self, *, create: bool = False) -> Iterator[bool]:
        """Hold the store's lock; yield False, without a lock, if the store does not exist.

        Raises:
            StagingError: it cannot be used: a link, another user's, without our marker.
        """
        fds: tuple[int, int] | None = None
        while fds is None:
            with as_staging_error(self.path):
                if create:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(self.path, 0o700)
                # Another job may remove the store between these two calls; then make it again.
                fds = self._lock()
            if fds is None and not create and not os.path.lexists(self.path):
                yield False
                return
        try:
            with as_staging_error(self.path):
                yield True
        finally:
            unlock(fds[1])
            os.close(fds[0])

    def _lock(self) -> tuple[int, int] | None:
        """Return (directory, lock); None if another job removed the store in between."""
        with contextlib.ExitStack() as stack:
            try:
                root = os.open(self.path, _DIRECTORY)
            except FileNotFoundError:
                return None
            except OSError as error:
                if error.errno not in {errno.ENOTDIR, errno.ELOOP}:
                    raise
                raise StagingError(f"{shown(self.path)} is a link or a file: not used") from None
            stack.callback(os.close, root)
            self._check(root)
            try:
                lock = os.open(LOCK, CREATE_OR_OPEN, 0o600, dir_fd=root)
            except FileNotFoundError:
                return None
            except OSError:
                with contextlib.suppress(OSError):  # remove it again, unless it is in use
                    os.rmdir(self.path)
                raise
            stack.callback(unlock, lock)
            fcntl.flock(lock, fcntl.LOCK_EX)
            # While this process waited for the lock, the holder may have removed the store. This
            # lock is then on a deleted file and protects nothing.
            if not _same(root, self.path) or not _same(lock, f"{self.path}/{LOCK}"):
                return None
            self._mark(root)
            stack.pop_all()
        return root, lock

    def _check(self, root: int) -> None:
        info = os.fstat(root)
        if info.st_uid != os.geteuid():
            raise StagingError(f"{shown(self.path)} belongs to user {info.st_uid}: not used")
        if stat.S_IMODE(info.st_mode) & 0o022:
            raise StagingError(f"{shown(self.path)} can be written by others: not used")
        # A store that another process has just made may not have its marker yet, only the lock
        # file. If there is more, the marker may have come since the listing, so look once more.
        names = set(os.listdir(root))
        if MARKER not in names and not names <= {LOCK}:
            try:
                os.stat(MARKER, dir_fd=root, follow_symlinks=False)
            except FileNotFoundError:
                raise StagingError(
                    f"{shown(self.path)} holds data but not hpml's marker {MARKER}: not used",
                    hint="move it away; hpml only works in directories that it made itself",
                ) from None

    def _mark(self, root: int) -> None:
        """Write the marker; a store that cannot have one is removed again. The lock is held."""
        try:
            os.close(os.open(MARKER, CREATE_OR_OPEN, 0o600, dir_fd=root))
        except OSError:
            if os.listdir(root) == [LOCK]:
                with contextlib.suppress(OSError):
                    os.unlink(LOCK, dir_fd=root)
                    os.rmdir(self.path)
            raise

    # What follows, up to `sweep`, needs the lock.

    def areas(self) -> list[str]:
        """Return the paths of the areas of all jobs."""
        return [path for path in _directories(self.path) if os.path.basename(path)[0] != "."]

    def entries(self) -> list[str]:
        """Return the paths of all entries.

        Raises:
            StagingError: the cache is a link: what is removed in it would lie outside the store.
        """
        if not os.path.lexists(self.cache):
            return []
        if not stat.S_ISDIR(os.lstat(self.cache).st_mode):
            raise StagingError(f"{shown(self.cache)} is a link or a file: not used")
        return _directories(self.cache)

    def groups(self) -> list[list[str]]:
        """Return the areas of jobs, each with the job's own entries, and all other entries."""
        groups = {os.path.basename(area): [area] for area in self.areas()}
        for entry in self.entries():
            groups.setdefault(job_of(entry) or entry, []).append(entry)
        return list(groups.values())

    def is_entry(self, directory: str) -> bool:
        """Return whether a directory is an entry, and not an area."""
        return os.path.dirname(directory) == self.cache

    def owner_of(self, directory: str) -> Owner | None:
        """Return the owner of an area or entry; None if it is unknown."""
        return Owner.read(f"{directory}/{OWNER}")

    def is_alive(self, owner: Owner) -> bool:
        """Return whether an owner lives; one that cannot be judged from here counts as alive."""
        return owner_is_alive(owner, proc_root=self.proc_root)

    def user_of(self, directory: str) -> str:
        """Return what uses an area or entry, in words; "" if nothing does."""
        job = job_of(directory)
        if self.is_entry(directory) and not job:
            jobs = self.jobs_using(os.path.basename(directory))
            if jobs:
                return f"job {', '.join(jobs)}"
        else:
            owner = self.owner_of(f"{self.path}/{job}" if job else directory)
            if owner is not None and self.is_alive(owner):
                return f"process {owner.pid}"
        return "a process" if is_locked(f"{directory}/{LEASE}") else ""

    def reason_to_keep(
        self, directory: str, *, everything: bool, older_seconds: float | None = None
    ) -> str:
        """Return why an area or entry stays; "" if it may go.

        Args:
            directory: of it.
            everything: kept data may go, too.
            older_seconds: kept data may go that was not used for so long.
        """
        used_by = self.user_of(directory)
        if used_by:
            return f"in use by {used_by}"
        if not self.is_entry(directory):
            owner = self.owner_of(directory)
            known = owner is not None and owner.job_key == os.path.basename(directory)
            return "" if known else "its owner is unknown"
        idle_seconds = max(0.0, time.time() - self.last_used(directory))
        is_old = older_seconds is not None and idle_seconds >= older_seconds
        if everything or is_old or job_of(directory):
            return ""
        return f"kept for later jobs, last used {age_text(idle_seconds)} ago"

    def jobs_using(self, key: str, *, besides: str = "") -> list[str]:
        """Return the keys of the living jobs whose areas link to an entry."""
        found = []
        for area in self.areas():
            job_key = os.path.basename(area)
            if job_key != besides and _links(area, key) and self.user_of(area):
                found.append(job_key)
        return found

    def last_used(self, directory: str) -> float:
        """Return when an area or entry was last used, in seconds since the epoch."""
        for path in (f"{directory}/{LEASE}", directory):
            with contextlib.suppress(OSError):
                return os.lstat(path).st_mtime
        return 0.0

    def make(self, path: str, owner: Owner) -> None:
        """Make an area or entry, with its owner and lease, in one step."""
        # Built under another name and renamed: no process ever sees an area or entry without its
        # owner and lease, and what a crash leaves is recognized by the name.
        new = f"{self.path}/{NEW}{os.path.basename(path)}-{secrets.token_hex(4)}"
        os.mkdir(new, 0o700)
        try:
            os.chmod(new, 0o700)  # whatever the umask
            owner.write(f"{new}/{OWNER}")
            os.close(os.open(f"{new}/{LEASE}", CREATE_OR_OPEN, 0o600))
            os.rename(new, path)
        except BaseException:
            with contextlib.suppress(OSError):
                remove_tree(new)
            raise

    def retire(self, directory: str) -> str | None:
        """Move an area or entry aside; None if a process holds its lease."""
        # An exclusive lock on the lease proves that no process uses it. No new one can come
        # meanwhile: taking a lease needs the store's lock, which the caller holds.
        lease = os.open(f"{directory}/{LEASE}", CREATE_OR_OPEN, 0o600)
        try:
            return self.move_aside(directory) if try_lock(lease, exclusive=True) else None
        finally:
            unlock(lease)

    def move_aside(self, path: str) -> str:
        """Rename a path before its removal; returns the new path, for `sweep`."""
        # A rename is quick whatever the size, so the slow removal needs no lock. After a crash,
        # `leftovers` finds the rest.
        trash = f"{self.path}/{TRASH}{os.path.basename(path)}-{secrets.token_hex(4)}"
        os.rename(path, trash)
        return trash

    def leftovers(self) -> list[str]:
        """Return directories that a crash left half made or half removed."""
        names = sorted(os.listdir(self.path))
        return [f"{self.path}/{name}" for name in names if name.startswith((NEW, TRASH))]

    def sweep(self, *trash: str) -> None:
        """Remove what was moved aside, then the store if nothing of any job is in it.

        Raises:
            StagingError: something cannot be removed.
        """
        for path in trash:
            with as_staging_error(path):
                remove_tree(path)
        with self.hold() as there:
            if not there:
                return
            with contextlib.suppress(OSError):  # none, or not empty
                os.rmdir(self.cache)
            if set(os.listdir(self.path)) <= {MARKER, LOCK}:
                # Marker first: a crash in between leaves an empty directory with a lock file, which
                # `_check` accepts. A lock file that is gone makes waiting processes start over, see
                # `_lock`.
                for name in (MARKER, LOCK):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(f"{self.path}/{name}")
                with contextlib.suppress(OSError):  # another job has begun to use it
                    os.rmdir(self.path)

    def idle(self) -> list[str]:
        """Return the entries that nothing uses, the least recently used first.

        Raises:
            StagingError: the store cannot be used.
        """
        with self.hold() as there:
            found = [path for path in self.entries() if not self.user_of(path)] if there else []
        return sorted(found, key=self.last_used)

    def remove(self, entry: str) -> bool:
        """Remove an entry unless something uses it.

        Raises:
            StagingError: it cannot be removed.
        """
        with self.hold() as there:
            # The list of idle entries was made earlier: a job may have linked to this one, or
            # removed it.
            if not there or entry not in self.entries():
                return False
            trash = None if self.jobs_using(os.path.basename(entry)) else self.retire(entry)
        if trash:
            self.sweep(trash)
        return bool(trash)

    def room_without_idle(self, room: Room) -> Room:
        """Return the room that there would be without the entries that nothing uses.

        Raises:
            StagingError: the store cannot be used.
        """
        return room_without(room, self.idle())

    def make_room(self, need: Need, measure: Callable[[], Room]) -> list[str]:
        """Remove entries that nothing uses, least recently used first, until a need is met.

        None is removed if even all of them would not make enough room.

        Returns:
            the sources of what was removed.

        Raises:
            StagingError: the store cannot be used.
        """
        room = measure()
        if fits(need, room):
            return []
        idle = self.idle()
        # All or nothing: data kept for later jobs must not go for a request that fails anyway.
        if not fits(need, room_without(room, idle)):
            return []
        removed = []
        for entry in idle:
            manifest = published_manifest(f"{entry}/{DATA}")
            with contextlib.suppress(StagingError):  # an entry that cannot be removed stops none
                if self.remove(entry):
                    removed.append(manifest.source if manifest else os.path.basename(entry))
            # Measured, not summed up: other jobs write to the same file system meanwhile.
            if fits(need, measure()):
                break
        return removed


@contextlib.contextmanager
def as_staging_error(path: str) -> Iterator[None]:
    """Turn errors of the system into a StagingError that names the path."""
    try:
        yield
    except (InputError, StagingError):
        raise
    except HpmlError as error:
        raise StagingError(f"{error}", hint="is the node's storage full?") from error
    except OSError as error:
        raise StagingError(f"cannot use {shown(path)}: {why(error)}") from error


def _directories(path: str) -> list[str]:
    with os.scandir(path) as entries:
        return sorted(one.path for one in entries if one.is_dir(follow_symlinks=False))


def _same(fd: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except FileNotFoundError:
        return False


def _links(area: str, key: str) -> bool:
    with contextlib.suppress(OSError), os.scandir(area) as entries:
        return any(one.is_symlink() and linked_key(one.path) == key for one in entries)
    return False
