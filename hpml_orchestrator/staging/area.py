"""One job's area in the store of a node, and the entries that it uses; store.py has the layout."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import HpmlError, InputError, StagingError
from hpml_orchestrator.records.owner import Owner, this_owner
from hpml_orchestrator.staging.faults import shown
from hpml_orchestrator.staging.files import (
    CREATE_OR_OPEN,
    BusyError,
    NameLock,
    remove_tree,
    try_lock,
    unlock,
)
from hpml_orchestrator.staging.manifest import verify
from hpml_orchestrator.staging.request import check_job_key, target_path
from hpml_orchestrator.staging.store import (
    CACHE,
    DATA,
    LEASE,
    OWNER,
    PARTIAL,
    NodeStore,
    as_staging_error,
    job_of,
    whole,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpml_orchestrator.staging.faults import Retry
    from hpml_orchestrator.staging.manifest import Manifest
    from hpml_orchestrator.staging.progress import OnProgress
    from hpml_orchestrator.staging.request import StageRequest

    Fill = Callable[[str, NameLock], Manifest]
    # publishes data in an entry's directory and writes its progress to the lock


class StoreEntry:
    """An entry on which this process has a lease.

    Attributes:
        path: its directory.
        data: path of its published data, which may not exist yet.
    """

    def __init__(self, path: str, lease: int) -> None:
        self.path = path
        self.data = f"{path}/{DATA}"
        self.lease = lease
        self.touch()

    def touch(self) -> None:
        """Record that it is used now."""
        with contextlib.suppress(OSError):  # read-only file system: only the LRU order suffers
            os.utime(self.lease)

    def link_from(self, path: str) -> None:
        """Make a path of a job lead to the data, in one step."""
        directory, name = os.path.split(path)
        # symlink() cannot replace an existing link. Renaming over it can, and a process that opens
        # the path meanwhile sees either the old data or the new, never nothing.
        temporary = f"{directory}/.{name}.partial-link-{secrets.token_hex(4)}"
        os.symlink(f"../{CACHE}/{os.path.basename(self.path)}/{DATA}", temporary)
        os.rename(temporary, path)

    def release(self) -> None:
        """Give up the lease; the data stays until its room is needed."""
        if self.lease >= 0:
            self.touch()
            unlock(self.lease)
            self.lease = -1


class JobArea:
    """One job's area under one base; the same for every process of the job on this node.

    Args:
        base: an existing directory on the node, for example /dev/shm.
        job_key: names the job on this node, for example "<job id>.<restart>".
        owner_pid: the process whose end makes the data stale; the calling one if left out.
        proc_root: where to look for processes and mounts.
    """

    def __init__(
        self,
        base: str,
        job_key: str,
        *,
        owner_pid: int | None = None,
        proc_root: str = "/proc",
    ) -> None:
        check_job_key(job_key)
        self.store = NodeStore(base, proc_root=proc_root)
        self.job_key = job_key
        self.path = target_path(base, os.getuid(), job_key, "").rstrip("/")
        self._owner_pid = owner_pid
        self._lease = -1

    def path_of(self, name: str) -> str:
        """Return where data of that name is published."""
        return f"{self.path}/{name}"

    def check_apart(self, request: StageRequest) -> None:
        """Refuse a request whose source contains the target, or is in it."""
        source = os.path.realpath(request.source) + "/"
        target = os.path.realpath(self.path) + "/"
        published = f"{target}{request.name}/"
        if target.startswith(source) or source.startswith(published):
            message = "one of source and target contains the other; the target is "
            raise InputError(message + shown(published), field="source", value=request.source)

    def owner(self) -> Owner:
        """Describe the process that owns everything in this area."""
        return this_owner(self.job_key, self._owner_pid, proc_root=self.store.proc_root)

    def open(self) -> None:
        """Create what is missing, record the owner and mark the area as in use.

        Raises:
            InputError: the base is not a directory, or on a file system that nodes share.
            StagingError: the store is not ours to use: a link, another user's, without our marker.
        """
        if self._lease >= 0:
            return
        self.store.check_base()
        try:
            with self.store.hold(create=True):
                if not os.path.lexists(self.path):
                    self.store.make(self.path, self.owner())
                else:
                    # A later process of the job takes the area over from a dead one. With the dead
                    # owner's record left in place, the next job would remove the area as stale.
                    owner = self.store.owner_of(self.path)
                    if owner is None or not self.store.is_alive(owner):
                        self.owner().write(f"{self.path}/{OWNER}")
                # Take the lease before releasing the store's lock: another job that cleans up in
                # between would find an area that nothing uses.
                self._lease = _leased(self.path)
        except BaseException:
            with contextlib.suppress(HpmlError):  # remove a store that was created in vain
                self.store.sweep()
            raise

    def close(self) -> None:
        """Give up the lease but leave the data."""
        if self._lease >= 0:
            unlock(self._lease)
            self._lease = -1

    def is_empty(self) -> bool:
        """Return whether nothing is published here."""
        try:
            return all(name.startswith(".") for name in os.listdir(self.path))
        except OSError:
            return True

    def cleanup(self) -> bool:
        """Remove the area and the job's own entries, and the store if it is empty then.

        Returns:
            False if another process of the job still uses it: the last one removes it.

        Raises:
            StagingError: the store is not ours, or something in it cannot be removed.
        """
        self.close()
        with self.store.hold() as there:
            if not there:
                return True
            trash = [self.store.retire(self.path)] if os.path.lexists(self.path) else []
            if None in trash:
                return False
            with contextlib.suppress(StagingError):  # the cache is a link, so it was never used
                own = [entry for entry in self.store.entries() if job_of(entry) == self.job_key]
                trash += map(self.store.retire, own)
        # Removing many files takes long, so it happens here, without the store's lock: other jobs
        # start and end meanwhile. Under the lock there are only renames.
        self.store.sweep(*filter(None, trash))
        return True

    def remove_stale(self) -> None:
        """Remove everything that dead jobs of this user left under this base.

        An area stays if its owner is alive or unknown, if a process holds its lease, or if it is
        this one. Only two kinds of entries are removed: those that a killed stager left incomplete,
        and those that belong to a dead job.
        """
        store = self.store
        with store.hold() as there:
            trash = store.leftovers() if there else []
            for group in store.groups() if there else []:
                empty = [one for one in group if store.is_entry(one) and not _has_data(one)]
                is_ours = os.path.basename(group[0]) == self.job_key
                stays = is_ours or store.reason_to_keep(group[0], everything=group == empty)
                trash += filter(None, map(store.retire, empty if stays else group))
        store.sweep(*trash)

    def take(self, key: str, *, create: bool) -> StoreEntry | None:
        """Return an entry with a lease on it, or None if there is none; it may be empty.

        Raises:
            StagingError: the store is not ours to use, or cannot be written.
        """
        path = f"{self.store.cache}/{key}"
        with self.store.hold(create=create) as there:
            if not there:
                return None
            if create:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(self.store.cache, 0o700)
            if path not in self.store.entries():
                if not create:
                    return None
                self.store.make(path, self.owner())
            return StoreEntry(path, _leased(path))

    def obtain(
        self,
        key: str,
        fill: Fill | None,
        retry: Retry,
        *,
        waits: bool = True,
        on_progress: OnProgress | None = None,
    ) -> tuple[StoreEntry, Manifest] | None:
        """Return an entry with complete data: find it, wait for another job's copy, or fill it.

        Args:
            key: its name.
            fill: publishes the data; None: only look for an entry, do not make one.
            retry: asked whether to stop while another job copies.
            waits: until another job's copy is done. Two jobs that copy from node to node could wait
                for each other on different nodes: they must not.
            on_progress: called with the other job's progress while this one waits for it.

        Returns:
            None if there is none and none may be made, if the entry is damaged but other jobs use
            it (it stays theirs), and if another job is busy with it and `waits` is not set.

        Raises:
            StagingError: the copy failed.
        """
        entry = self.take(key, create=fill is not None)
        if entry is None:
            return None
        manifest = None
        most_seconds = None if waits else 0.0
        path = f"{entry.path}/.{DATA}.lock"
        try:
            with NameLock(path, retry, on_wait=on_progress, most_seconds=most_seconds) as lock:
                manifest = self._filled(entry, fill, retry, lock)
        except BusyError:
            pass
        except BaseException:
            with contextlib.suppress(HpmlError, OSError):  # the first error is the one to report
                self._leave(entry)
            entry.release()
            raise
        if manifest is None:
            self._leave(entry)
            return None
        return entry, manifest

    def _filled(
        self, entry: StoreEntry, fill: Fill | None, retry: Retry, lock: NameLock
    ) -> Manifest | None:
        with as_staging_error(entry.path):
            # This process holds the entry's lock, so whoever wrote a partial copy is dead.
            for found in os.listdir(entry.path):
                if found.startswith(PARTIAL):
                    remove_tree(f"{entry.path}/{found}")
            manifest = whole(entry.data)
            if manifest is not None and self._is_sure(entry, retry):
                return manifest
            if os.path.lexists(entry.data) and not self._take_away(entry):
                return None
        if fill is None:
            return None
        return fill(entry.path, lock)

    def _is_sure(self, entry: StoreEntry, retry: Retry) -> bool:
        """Return whether contents are right; the first use after a restart reads them all.

        After a crash, names and sizes may be on disk while the last seconds' contents are not.
        """
        made, owner = self.store.owner_of(entry.path), self.owner()
        if made is not None and made.boot_id == owner.boot_id:
            return True
        report = verify(entry.data, should_stop=retry.stops)
        if not report.hashed or report.count:
            return False
        owner.write(f"{entry.path}/{OWNER}")
        return True

    def drop(self, key: str) -> None:
        """Remove the job's own entry, to which its name no longer links; its lock is held."""
        path = f"{self.store.cache}/{key}"
        with self.store.hold() as there:
            trash = self.store.move_aside(path) if there and os.path.lexists(path) else ""
        if trash:
            remove_tree(trash)

    def _take_away(self, entry: StoreEntry) -> bool:
        """Remove an entry's damaged data; False if another job uses it."""
        key = os.path.basename(entry.path)
        with self.store.hold():
            others = self.store.jobs_using(key, besides=self.job_key)
            alone = not others and try_lock(entry.lease, exclusive=True)
            # Move the data away only if this job is alone with it: another job may be reading files
            # that are not damaged, and its ranks must not lose them.
            trash = self.store.move_aside(entry.data) if alone else ""
            # Converting a flock is not atomic: the kernel drops the shared lock first. If the
            # exclusive one is refused, none is left, and the entry could be evicted.
            fcntl.flock(entry.lease, fcntl.LOCK_SH)
        if trash:
            remove_tree(trash)
        return bool(trash)

    def _leave(self, entry: StoreEntry) -> None:
        trash = None
        with self.store.hold() as there:
            entry.release()
            if there and os.path.lexists(entry.path) and not _has_data(entry.path):
                trash = self.store.retire(entry.path)
        if trash:
            self.store.sweep(trash)


def _leased(directory: str) -> int:
    # This flock never blocks: leases are only locked exclusively under the store's lock, which the
    # caller holds.
    lease = os.open(f"{directory}/{LEASE}", CREATE_OR_OPEN, 0o600)
    fcntl.flock(lease, fcntl.LOCK_SH)
    return lease


def _has_data(entry: str) -> bool:
    return os.path.lexists(f"{entry}/{DATA}")
