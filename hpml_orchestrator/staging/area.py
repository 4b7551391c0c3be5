"""The directories that hold a job's data on a node, and their end.

    {base}/hpml-{uid}/            root, mode 0700
        .hpml-staging             marker: nothing is removed under a root without it
        .lock                     held while job directories come and go
        {job_key}/
            .owner.json           the process that answers for it
            .lease                shared flock: in use
            .{name}.lock          one stager for this name at a time
            .{name}.manifest      what was published
            .{name}.partial-*     a copy that is being made, or was when its stager died
            {name}/               the data
        .new-*, .trash-*          a job directory before and after its life

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
from hpml_orchestrator.records.owner import Owner, owner_is_alive, this_owner
from hpml_orchestrator.staging.capacity import file_system_type
from hpml_orchestrator.staging.faults import shown, why
from hpml_orchestrator.staging.files import remove_tree, try_lock, unlock
from hpml_orchestrator.staging.request import check_job_key, target_path

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["MARKER", "StagingArea"]

MARKER = ".hpml-staging"
LOCK = ".lock"
OWNER = ".owner.json"
LEASE = ".lease"
_NEW, _TRASH = ".new-", ".trash-"
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
_FILE = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
SHARED_TYPES = frozenset(
    "afs beegfs ceph cifs fhgfs fuse.glusterfs fuse.sshfs gpfs lustre ncpfs nfs nfs4 ocfs2 "
    "orangefs panfs pvfs2 smb3 smbfs wekafs".split()
)


class _RootGoneError(Exception):
    """The root was removed by another job between two steps: begin again."""


class StagingArea:
    """One job's directory under one base; the same for every process of the job on this node.

    Args:
        base: an existing directory on the node, for example /dev/shm.
        job_key: names the job on this node, for example "<job id>.<restart>".
        uid: whose root, `hpml-{uid}`; the caller's when left out.
        owner_pid: the process whose end makes the data stale; the calling one when left out.
        proc_root: where to look for processes and mounts.
    """

    def __init__(
        self,
        base: str,
        job_key: str,
        *,
        uid: int | None = None,
        owner_pid: int | None = None,
        proc_root: str = "/proc",
    ) -> None:
        check_job_key(job_key)
        if not os.path.isabs(base):
            raise InputError("must be an absolute path", field="target", value=base)
        self.base = base
        self.job_key = job_key
        self.uid = os.getuid() if uid is None else uid
        self.job_dir = target_path(base, self.uid, job_key, "").rstrip("/")
        self.root = os.path.dirname(self.job_dir)
        self._owner_pid = owner_pid
        self._proc_root = proc_root
        self._lease = -1

    def path_of(self, name: str) -> str:
        """Return where data of that name is published."""
        return target_path(self.base, self.uid, self.job_key, name)

    def open(self) -> None:
        """Create what is missing, record the owner and mark the job directory as in use.

        Raises:
            InputError: the base is no directory, or on a file system that nodes share.
            StagingError: the root is not ours to use: a link, another user's, without our marker.
        """
        if self._lease >= 0:
            return
        self._check_base()
        with self._root(create=True), _as_staging_error(self.job_dir):
            owner = this_owner(self.job_key, self._owner_pid, proc_root=self._proc_root)
            if not os.path.lexists(self.job_dir):
                new = f"{self.root}/{_NEW}{self.job_key}-{secrets.token_hex(4)}"
                os.mkdir(new, 0o700)
                os.chmod(new, 0o700)  # whatever the umask
                owner.write(f"{new}/{OWNER}")
                os.rename(new, self.job_dir)
            elif not self._owned():
                owner.write(f"{self.job_dir}/{OWNER}")
            self._lease = os.open(f"{self.job_dir}/{LEASE}", _FILE, 0o600)
            fcntl.flock(self._lease, fcntl.LOCK_SH)

    def close(self) -> None:
        """Give up the lease but leave the data."""
        if self._lease >= 0:
            unlock(self._lease)
            self._lease = -1

    def cleanup(self) -> bool:
        """Remove the job directory, and the root when it is empty then.

        Returns:
            False when another process of the job still uses it: the last one removes it.

        Raises:
            StagingError: the root is not ours, or something in it cannot be removed.
        """
        self.close()
        with self._root(create=False) as there, _as_staging_error(self.job_dir):
            if not there:
                return True
            trash = self._retire(self.job_key) if os.path.lexists(self.job_dir) else ""
            if trash is None:
                return False
        self._sweep([trash] if trash else [])
        return True

    def remove_stale(self, is_alive: Callable[[Owner], bool] | None = None) -> list[str]:
        """Remove what dead jobs of this user left under this base.

        A job directory stays when its owner lives or cannot be judged, when a process holds its
        lease, or when it is this area's own.

        Returns:
            The job keys that were removed.
        """
        alive = is_alive or (lambda owner: owner_is_alive(owner, proc_root=self._proc_root))
        removed, trash = [], []
        with self._root(create=False) as there, _as_staging_error(self.root):
            for name in sorted(os.listdir(self.root)) if there else ():
                if name.startswith((_NEW, _TRASH)):
                    trash.append(f"{self.root}/{name}")
                if name.startswith(".") or name == self.job_key:
                    continue
                owner = Owner.read(f"{self.root}/{name}/{OWNER}")
                if owner is None or owner.job_key != name or alive(owner):
                    continue
                retired = self._retire(name)
                if retired:
                    removed.append(name)
                    trash.append(retired)
        self._sweep(trash)
        return removed

    def _check_base(self) -> None:
        if not os.path.isdir(self.base):
            raise InputError("no such directory on this node", field="target", value=self.base)
        kind = file_system_type(self.base, proc_root=self._proc_root)
        if kind in SHARED_TYPES:
            raise InputError(
                f"lies on {kind}, which nodes share; staging is for the node's own storage",
                field="target",
                value=self.base,
            )

    def _owned(self) -> bool:
        """Say whether a living process answers for the job directory already."""
        owner = Owner.read(f"{self.job_dir}/{OWNER}")
        return owner is not None and owner_is_alive(owner, proc_root=self._proc_root)

    def _retire(self, job_key: str) -> str | None:
        """Move a job directory aside, under the root's lock; None when it is in use."""
        path = f"{self.root}/{job_key}"
        lease = os.open(f"{path}/{LEASE}", _FILE, 0o600)
        try:
            if not try_lock(lease, exclusive=True):
                return None
            trash = f"{self.root}/{_TRASH}{job_key}-{secrets.token_hex(4)}"
            os.rename(path, trash)
            return trash
        finally:
            unlock(lease)

    def _sweep(self, trash: list[str]) -> None:
        """Remove what was moved aside, then the root if nothing of any job is in it."""
        for path in trash:
            with _as_staging_error(path):
                remove_tree(path)
        with self._root(create=False) as there, _as_staging_error(self.root):
            if there and set(os.listdir(self.root)) <= {MARKER, LOCK}:
                for name in (MARKER, LOCK):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(f"{self.root}/{name}")
                with contextlib.suppress(OSError):  # another job came: it takes the empty root over
                    os.rmdir(self.root)

    @contextlib.contextmanager
    def _root(self, *, create: bool) -> Iterator[bool]:
        """Hold the root's lock; yields False, without a lock, when there is no root."""
        fds: tuple[int, int] | None = None
        while fds is None:
            try:
                with _as_staging_error(self.root):
                    if create:
                        with contextlib.suppress(FileExistsError):
                            os.mkdir(self.root, 0o700)
                    fds = self._lock_root()
            except _RootGoneError:
                if not create and not os.path.lexists(self.root):
                    yield False
                    return
        try:
            yield True
        finally:
            unlock(fds[1])
            os.close(fds[0])

    def _lock_root(self) -> tuple[int, int]:
        """Return (root, lock) of a root that is ours and is still there once it is locked."""
        try:
            root = os.open(self.root, _DIRECTORY)
        except FileNotFoundError:
            raise _RootGoneError from None
        except OSError as error:
            if error.errno not in {errno.ENOTDIR, errno.ELOOP}:
                raise
            raise StagingError(f"{shown(self.root)} is a link or a file: not used") from None
        try:
            self._check_root(root)
            try:
                lock = os.open(LOCK, _FILE, 0o600, dir_fd=root)
            except FileNotFoundError:
                raise _RootGoneError from None
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not _same(root, self.root) or not _same(lock, f"{self.root}/{LOCK}"):
                    raise _RootGoneError
                os.close(os.open(MARKER, _FILE, 0o600, dir_fd=root))
            except BaseException:
                unlock(lock)
                raise
        except BaseException:
            os.close(root)
            raise
        return root, lock

    def _check_root(self, root: int) -> None:
        info = os.fstat(root)
        if info.st_uid != os.geteuid():
            raise StagingError(f"{shown(self.root)} belongs to user {info.st_uid}: not used")
        if stat.S_IMODE(info.st_mode) & 0o022:
            raise StagingError(f"{shown(self.root)} can be written by others: not used")
        names = set(os.listdir(root))
        if MARKER not in names and not names <= {LOCK}:
            try:
                os.stat(MARKER, dir_fd=root, follow_symlinks=False)
            except FileNotFoundError:
                raise StagingError(
                    f"{shown(self.root)} holds data but not hpml's marker {MARKER}: not used",
                    hint="move it away; hpml only works in directories that it made itself",
                ) from None


def _same(fd: int, path: str) -> bool:
    """Say whether a path still leads to an open file."""
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def _as_staging_error(path: str) -> Iterator[None]:
    try:
        yield
    except (InputError, StagingError):
        raise
    except HpmlError as error:
        raise StagingError(f"{error}", hint="is the node's storage full?") from error
    except OSError as error:
        raise StagingError(f"cannot use {shown(path)}: {why(error)}") from error
