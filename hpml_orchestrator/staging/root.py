"""A user's root on a node's storage: who may use it, its lock, and removal within it.

    {base}/hpml-{uid}/            mode 0700
        .hpml-staging             marker: nothing is removed under a root without it
        .lock                     held while directories of jobs and of the cache come and go
        {job_key}/                see area.py
        .cache/{key}/             see cache.py
        .new-*, .trash-*          a directory before and after its life

All locks are flocks on the node's own file system; a killed process leaves none.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import HpmlError, InputError, StagingError
from hpml_orchestrator.records.owner import Owner, owner_is_alive
from hpml_orchestrator.staging.capacity import file_system_type
from hpml_orchestrator.staging.faults import is_directory, shown, why
from hpml_orchestrator.staging.files import is_locked, remove_tree, try_lock, unlock
from hpml_orchestrator.staging.mounts import SHARED_TYPES

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "CACHE",
    "LEASE",
    "MARKER",
    "OWNER",
    "Root",
    "as_staging_error",
    "base_above",
    "new_directory",
]

MARKER = ".hpml-staging"
LOCK = ".lock"
OWNER = ".owner.json"
LEASE = ".lease"
CACHE = ".cache"
NEW, TRASH = ".new-", ".trash-"
FILE = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW


def base_above(path: str) -> str:
    """Return the base of the root of this user that a path lies in; "" where it lies in none."""
    above, inside, _ = f"{path}/".partition(f"/hpml-{os.getuid()}/")
    return inside and (above or "/")


class _RootGoneError(Exception):
    """The root was removed by another job between two steps: begin again."""


class Root:
    """The directory `{base}/hpml-{uid}`.

    Args:
        base: an absolute directory on the node, for example /dev/shm.
        proc_root: where to look for processes and mounts.
    """

    def __init__(self, base: str, *, proc_root: str = "/proc") -> None:
        if not os.path.isabs(base):
            raise InputError("must be an absolute path", field="target", value=base)
        self.base = base
        self.path = f"{base.rstrip('/')}/hpml-{os.getuid()}"
        self.cache = f"{self.path}/{CACHE}"
        self.proc_root = proc_root

    def check_base(self) -> None:
        """Refuse a base that is no directory or that nodes share.

        Raises:
            InputError: says which.
            StagingError: a directory above it is closed to this user.
        """
        if not is_directory(self.base):
            raise InputError("no such directory on this node", field="target", value=self.base)
        kind = file_system_type(self.base, proc_root=self.proc_root)
        if kind in SHARED_TYPES:
            raise InputError(
                f"lies on {kind}, which nodes share; staging is for the node's own storage",
                field="target",
                value=self.base,
                hint="shm and local are the node's own; `findmnt -T DIR` says where others lie",
            )

    @contextlib.contextmanager
    def hold(self, *, create: bool) -> Iterator[bool]:
        """Hold the root's lock; yields False, without a lock, when there is no root.

        Raises:
            StagingError: the root is not ours to use: a link, another user's, without our marker.
        """
        fds: tuple[int, int] | None = None
        while fds is None:
            try:
                with as_staging_error(self.path):
                    if create:
                        with contextlib.suppress(FileExistsError):
                            os.mkdir(self.path, 0o700)
                    fds = self._lock()
            except _RootGoneError:
                if not create and not os.path.lexists(self.path):
                    yield False
                    return
        try:
            yield True
        finally:
            unlock(fds[1])
            os.close(fds[0])

    def job_keys(self) -> list[str]:
        """Return the names of all job directories; the root is held."""
        return [name for name in _directories(self.path) if not name.startswith(".")]

    def cache_keys(self) -> list[str]:
        """Return the names of all entries of the cache; the root is held.

        Raises:
            StagingError: the cache is a link.
        """
        try:
            self.check_cache()
            return _directories(self.cache)
        except FileNotFoundError:
            return []

    def check_cache(self) -> None:
        """Refuse a cache that is a link: what is removed in it would lie outside the root.

        Raises:
            StagingError: it is one, or a file.
            FileNotFoundError: there is none.
        """
        if not stat.S_ISDIR(os.lstat(self.cache).st_mode):
            raise StagingError(f"{shown(self.cache)} is a link or a file: not used")

    def owner_of(self, directory: str) -> Owner | None:
        """Return who answers for a directory of a job or of the cache."""
        return Owner.read(f"{directory}/{OWNER}")

    def user_of(self, directory: str) -> str:
        """Return who uses a directory, in words; "" when nothing does. The root is held."""
        owner = self.owner_of(directory)
        is_job = os.path.dirname(directory) == self.path
        if is_job and owner is not None and self.is_alive(owner):
            return f"process {owner.pid}"
        return "a process" if is_locked(f"{directory}/{LEASE}") else ""

    def retire(self, directory: str) -> str | None:
        """Move a directory aside, under the root's lock; None when a process uses it."""
        lease = os.open(f"{directory}/{LEASE}", FILE, 0o600)
        try:
            if not try_lock(lease, exclusive=True):
                return None
            name = os.path.basename(directory)
            trash = f"{self.path}/{TRASH}{name}-{secrets.token_hex(4)}"
            os.rename(directory, trash)
            return trash
        finally:
            unlock(lease)

    def leftovers(self) -> list[str]:
        """Return what a crash left half made or half removed; the root is held."""
        names = sorted(os.listdir(self.path))
        return [f"{self.path}/{name}" for name in names if name.startswith((NEW, TRASH))]

    def sweep(self, trash: list[str]) -> None:
        """Remove what was moved aside, then the root if nothing of any job is in it.

        Raises:
            StagingError: something cannot be removed.
        """
        for path in trash:
            with as_staging_error(path):
                remove_tree(path)
        with self.hold(create=False) as there, as_staging_error(self.path):
            if not there:
                return
            with contextlib.suppress(OSError):  # none, or not empty
                os.rmdir(self.cache)
            if set(os.listdir(self.path)) <= {MARKER, LOCK}:
                for name in (MARKER, LOCK):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(f"{self.path}/{name}")
                with contextlib.suppress(OSError):  # another job came: it takes the empty root over
                    os.rmdir(self.path)

    def is_alive(self, owner: Owner) -> bool:
        """Say whether an owner lives; one that cannot be judged from here counts as alive."""
        return owner_is_alive(owner, proc_root=self.proc_root)

    def _lock(self) -> tuple[int, int]:
        """Return (root, lock) of a root that is ours and is still there once it is locked."""
        try:
            root = os.open(self.path, _DIRECTORY)
        except FileNotFoundError:
            raise _RootGoneError from None
        except OSError as error:
            if error.errno not in {errno.ENOTDIR, errno.ELOOP}:
                raise
            raise StagingError(f"{shown(self.path)} is a link or a file: not used") from None
        try:
            self._check(root)
            try:
                lock = os.open(LOCK, FILE, 0o600, dir_fd=root)
            except FileNotFoundError:
                raise _RootGoneError from None
            except OSError:
                with contextlib.suppress(OSError):  # made in vain, or not empty
                    os.rmdir(self.path)
                raise
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not _same(root, self.path) or not _same(lock, f"{self.path}/{LOCK}"):
                    raise _RootGoneError
                self._mark(root)
            except BaseException:
                unlock(lock)
                raise
        except BaseException:
            os.close(root)
            raise
        return root, lock

    def _mark(self, root: int) -> None:
        """See to the marker; a root that cannot have one goes again. The root is held."""
        try:
            os.close(os.open(MARKER, FILE, 0o600, dir_fd=root))
        except OSError:
            if os.listdir(root) == [LOCK]:
                with contextlib.suppress(OSError):
                    os.unlink(LOCK, dir_fd=root)
                    os.rmdir(self.path)
            raise

    def _check(self, root: int) -> None:
        info = os.fstat(root)
        if info.st_uid != os.geteuid():
            raise StagingError(f"{shown(self.path)} belongs to user {info.st_uid}: not used")
        if stat.S_IMODE(info.st_mode) & 0o022:
            raise StagingError(f"{shown(self.path)} can be written by others: not used")
        names = set(os.listdir(root))
        if MARKER not in names and not names <= {LOCK}:
            try:
                os.stat(MARKER, dir_fd=root, follow_symlinks=False)
            except FileNotFoundError:
                raise StagingError(
                    f"{shown(self.path)} holds data but not hpml's marker {MARKER}: not used",
                    hint="move it away; hpml only works in directories that it made itself",
                ) from None


def new_directory(root: Root, path: str, owner: Owner) -> None:
    """Make a directory with its owner's record and its lease in one step; the root is held."""
    new = f"{root.path}/{NEW}{os.path.basename(path)}-{secrets.token_hex(4)}"
    os.mkdir(new, 0o700)
    try:
        os.chmod(new, 0o700)  # whatever the umask
        owner.write(f"{new}/{OWNER}")
        os.close(os.open(f"{new}/{LEASE}", FILE, 0o600))
        os.rename(new, path)
    except BaseException:
        with contextlib.suppress(OSError):
            remove_tree(new)
        raise


@contextlib.contextmanager
def as_staging_error(path: str) -> Iterator[None]:
    """Turn what the system says about a path into a StagingError."""
    try:
        yield
    except (InputError, StagingError):
        raise
    except HpmlError as error:
        raise StagingError(f"{error}", hint="is the node's storage full?") from error
    except OSError as error:
        raise StagingError(f"cannot use {shown(path)}: {why(error)}") from error


def _directories(path: str) -> list[str]:
    """Return the names of the directories in a directory, links left out."""
    with os.scandir(path) as entries:
        return sorted(one.name for one in entries if one.is_dir(follow_symlinks=False))


def _same(fd: int, path: str) -> bool:
    """Say whether a path still leads to an open file."""
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except FileNotFoundError:
        return False
