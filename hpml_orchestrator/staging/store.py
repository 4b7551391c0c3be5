"""A user's staged data on a node: one directory per entry, with one flock on its `.lease`.

    {base}/hpml-{uid}/       mode 0700
        {entry}/             the data of one source, or what a job writes itself
            .lease           locked exclusively while the entry is filled or removed, shared while
                             it is used. Its mtime is the last use; its text is the progress of
                             the copy and, after completion, the boot in which all contents were
                             verified
            .data.manifest   what was published: written before the data gets its name
            .data.partial-*  a copy in progress, or one whose stager died
            .data.damaged    `hpml stage verify` found damage
            .by-hand         a user staged it: it stays until `hpml stage clean PATH`
            data/            the data

An entry that outlives its job is named {name}-{digest of its source}, one that is removed with its
job {name}-{digest}@{job}; @{job} has the directories that the job writes to.

The kernel releases a flock however its holder dies. So an entry with a free lease is unused, and
the next process removes it if it is incomplete or belonged to a job. A directory without `.lease`
is not ours and is never removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import sys
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from hpml_orchestrator.errors import HpmlError, InputError, StagingError
from hpml_orchestrator.records.mounts import SHARED_TYPES, file_system_type
from hpml_orchestrator.records.owner import boot_id
from hpml_orchestrator.records.process import environment_of
from hpml_orchestrator.records.texts import age_text
from hpml_orchestrator.staging.manifest import is_whole, published_manifest, verify
from hpml_orchestrator.staging.request import is_directory, shown, why
from hpml_orchestrator.staging.space import fits, room_without, usage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hpml_orchestrator.staging.copy import OnProgress
    from hpml_orchestrator.staging.manifest import Manifest
    from hpml_orchestrator.staging.request import Retry
    from hpml_orchestrator.staging.space import Need, Room

DATA, LEASE, BY_HAND = "data", ".lease", ".by-hand"
PARTIAL, _MANIFEST = f".{DATA}.partial-", f".{DATA}.manifest"
_POLL_SECONDS = 0.2  # plus the retries of a lock
_POLLS_PER_REPORT = 5
_POLLS_OF_DAMAGED = 5
_LEASE_BYTES = 256
_TRIES, _TRY_SECONDS = 5, 0.02  # another process may just be testing whether a lease is free
CREATE_OR_OPEN = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_REMOVALS = 5  # attempts for a tree in which others create files


def try_lock(fd: int, *, exclusive: bool) -> bool:
    """Try to take a flock; False if another process holds it."""
    kind = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
    try:
        # flock, because the kernel releases it however its holder dies: no lock is ever stale.
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(fd: int) -> None:
    """Release a flock and close; explicit, because a forked child may share the descriptor."""
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def remove_tree(path: str) -> None:
    """Remove a file, or a directory that others may be removing too; follows no links.

    Raises:
        OSError: it cannot be removed.
    """
    if os.path.islink(path) or os.path.isfile(path):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        return
    for _ in range(_REMOVALS):
        try:
            _remove(path)
        except PermissionError:  # a job may have made its directories read-only
            _open_up(path)
        except OSError:
            continue  # a process was still creating files in it
        else:
            return
    _remove(path)


def _remove(path: str) -> None:
    def fault(_call: object, _path: str, found: object) -> None:
        error = found[1] if isinstance(found, tuple) else found
        if isinstance(error, BaseException) and not isinstance(error, FileNotFoundError):
            raise error

    words: dict[str, Any] = {"onexc" if sys.version_info >= (3, 12) else "onerror": fault}
    shutil.rmtree(path, **words)


def _open_up(path: str) -> None:
    with contextlib.suppress(OSError):
        os.chmod(path, 0o700)
    for directory, names, _ in os.walk(path):
        for name in names:
            full = os.path.join(directory, name)
            if not os.path.islink(full):
                with contextlib.suppress(OSError):
                    os.chmod(full, 0o700)


class ChangedError(StagingError):
    """Data that a user staged has changed since; only the user may remove it."""

    def __init__(self, data: str) -> None:
        where = shown(data)
        super().__init__(
            f"{where} was changed after you staged it",
            hint=f"`hpml stage verify {where}` shows how; `hpml stage clean {where}` removes it",
        )


class BusyError(StagingError):
    """Another process has the lease."""

    def __init__(self) -> None:
        super().__init__("another process is staging this")


def base_above(path: str) -> str:
    """Return the base of this user's store that contains a path; "" if none does."""
    above, inside, _ = f"{path}/".partition(f"/hpml-{os.getuid()}/")
    return inside and (above or "/")


def job_of(entry: str) -> str:
    """Return the key of the job that an entry belongs to; "" if it is kept for later jobs."""
    return os.path.basename(entry).partition("@")[2]


class Entry:
    """An entry whose lease this process has locked.

    Attributes:
        path: its directory.
        data: path of its published data, which may not exist yet.
    """

    def __init__(self, path: str, lease: int) -> None:
        self.path = path
        self.data = f"{path}/{DATA}"
        self._lease = lease

    @property
    def name(self) -> str:
        """The name of its directory."""
        return os.path.basename(self.path)

    def manifest(self) -> Manifest | None:
        """Return the manifest if names and sizes of the data are right, else None."""
        found = published_manifest(self.data)
        return found if found is not None and is_whole(self.data, found) else None

    def tell(self, *figures: int) -> None:
        """Write the progress of a copy for waiting processes."""
        self._write(" ".join(map(str, figures)))

    def heard(self) -> list[int]:
        """Read the progress that the holder of the lease has written; empty if none."""
        words = os.pread(self._lease, _LEASE_BYTES, 0).split()
        return [int(word) for word in words if word.isdigit()]

    def trust(self) -> None:
        """Mark all contents as verified until the machine restarts."""
        self._write(f"boot {boot_id()}")

    def is_trusted(self) -> bool:
        """Return whether `trust` was called since the machine started."""
        words = os.pread(self._lease, _LEASE_BYTES, 0).decode(errors="replace").split()
        return words == ["boot", boot_id()]

    def _write(self, text: str) -> None:
        # Others may read meanwhile: the space ends the last word even if part of an older text
        # follows.
        data = f"{text} ".encode()
        with contextlib.suppress(OSError):  # a full disk must not mask why the copy failed
            os.pwrite(self._lease, data, 0)
            os.ftruncate(self._lease, len(data))

    def keep_by_hand(self) -> None:
        """Keep it until a user removes it."""
        os.close(os.open(f"{self.path}/{BY_HAND}", CREATE_OR_OPEN, 0o600))

    def share(self) -> bool:
        """Downgrade an exclusive lock to a shared one; False if the entry was removed then."""
        # The kernel drops the exclusive lock before it takes the shared one.
        return _locked(self._lease, exclusive=False) and self.is_current()

    def is_current(self) -> bool:
        """Return whether the locked lease is still the entry's lease."""
        try:
            return os.path.samestat(os.fstat(self._lease), os.lstat(f"{self.path}/{LEASE}"))
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Release the lease; the data stays until it is unneeded or its room is."""
        if self._lease >= 0:
            with contextlib.suppress(OSError):  # read-only: affects only the order of eviction
                os.utime(self._lease)
            unlock(self._lease)
            self._lease = -1

    def empty(self) -> None:
        """Remove everything except the lease, which must be held exclusively, and a user's mark."""
        names = [name for name in os.listdir(self.path) if name not in {LEASE, BY_HAND}]
        # The manifest first, so that what a crash leaves counts as incomplete.
        for name in sorted(names, key=lambda name: (name != _MANIFEST, name)):
            remove_tree(f"{self.path}/{name}")

    def remove(self) -> None:
        """Remove the entry; its lease must be held exclusively."""
        self.empty()
        # The lease last: as long as it exists, no other process can begin to fill the directory.
        for name in (BY_HAND, LEASE):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{self.path}/{name}")
        _remove_empty(self.path)

    def discard(self) -> None:
        """Remove as much of the entry as possible; its lease must be held exclusively."""
        with contextlib.suppress(HpmlError, OSError):
            if self.is_current():
                self.remove()
        self.release()


def _remove_empty(entry: str) -> None:
    """Remove the directories of an entry and of the store, unless another process uses them."""
    for path in (entry, os.path.dirname(entry)):
        with contextlib.suppress(OSError):
            os.rmdir(path)


def _locked(lease: int, *, exclusive: bool) -> bool:
    for _ in range(_TRIES):
        if try_lock(lease, exclusive=exclusive):
            return True
        time.sleep(_TRY_SECONDS)
    return False


class NodeStore:
    """The directory `{base}/hpml-{uid}`; raises StagingError if it does not belong to this user.

    Args:
        base: an absolute directory on the node, for example /dev/shm.
        proc_root: where to read mounts.

    Attributes:
        path: path of the directory.
    """

    def __init__(self, base: str, *, proc_root: str = "/proc") -> None:
        if not os.path.isabs(base):
            raise InputError("must be an absolute path", field="target", value=base)
        self.base = base
        self.path = f"{base.rstrip('/')}/hpml-{os.getuid()}"
        self._proc_root = proc_root

    def check_base(self) -> None:
        """Refuse a base that is not a directory or that nodes share.

        Raises:
            InputError: it is one of these.
            StagingError: this user may not enter a parent directory.
        """
        if not is_directory(self.base):
            there = os.path.lexists(self.base)
            fault = "is not a directory" if there else "no such directory on this node"
            hint = "" if there else "a new directory is made only in one that is there"
            raise InputError(fault, field="target", value=self.base, hint=hint)
        if base_above(self.base):
            raise InputError(
                "must not be in a directory of staged data", field="target", value=self.base
            )
        kind = file_system_type(self.base, proc_root=self._proc_root)
        if kind in SHARED_TYPES:
            raise InputError(
                f"is on {kind}, which nodes share; staging is for the node's own storage",
                field="target",
                value=self.base,
                hint="shm and local are the node's own; others: see `findmnt -T DIR`",
            )

    def entries(self) -> list[str]:
        """Return the paths of all entries."""
        with as_staging_error(self.path):
            if not self._is_there():
                return []
            paths = []
            # The last job may be removing the store right now.
            with contextlib.suppress(FileNotFoundError), os.scandir(self.path) as found:
                paths = sorted(one.path for one in found if one.is_dir(follow_symlinks=False))
        return [path for path in paths if os.path.lexists(f"{path}/{LEASE}")]

    def lock(self, name: str, *, exclusive: bool, create: bool = False) -> Entry | None:
        """Return an entry with a lock on its lease; None if there is none.

        Raises:
            BusyError: another process has a lock that excludes this one.
        """
        path = f"{self.path}/{name}"
        with as_staging_error(self.path):
            while True:
                if create:
                    self._make(path)
                elif not self._is_there():
                    return None
                flags = CREATE_OR_OPEN if create else CREATE_OR_OPEN & ~os.O_CREAT
                try:
                    lease = os.open(f"{path}/{LEASE}", flags, 0o600)
                except FileNotFoundError:
                    if create:
                        continue  # another process has just removed the entry
                    return None
                except OSError:
                    _remove_empty(path)  # useless without a lease, which a full disk prevents
                    raise
                if not _locked(lease, exclusive=exclusive):
                    os.close(lease)
                    raise BusyError
                entry = Entry(path, lease)
                # Another process may have removed the entry between the two calls: this lock would
                # then be on a deleted file.
                if entry.is_current():
                    return entry
                unlock(lease)

    def _make(self, path: str) -> None:
        for one in (self.path, path):
            try:
                os.mkdir(one, 0o700)
                with contextlib.suppress(FileNotFoundError):  # already removed by the last job
                    os.chmod(one, 0o700)  # regardless of the umask
            except FileExistsError:
                pass
            except FileNotFoundError:
                if one == self.path:  # the base is gone, or is read-only, like /proc
                    raise
            self._is_there()  # before anything is created in it

    def _is_there(self) -> bool:
        try:
            info = os.lstat(self.path)
        except FileNotFoundError:
            return False
        if not stat.S_ISDIR(info.st_mode):
            raise StagingError(f"{shown(self.path)} is a link or a file: not used")
        if info.st_uid != os.geteuid():
            raise StagingError(f"{shown(self.path)} belongs to user {info.st_uid}: not used")
        if stat.S_IMODE(info.st_mode) & 0o022:
            raise StagingError(f"{shown(self.path)} can be written by others: not used")
        return True

    def claim(
        self,
        name: str,
        retry: Retry,
        *,
        make: bool,
        patience: float = float("inf"),
        on_wait: OnProgress | None = None,
    ) -> tuple[Entry, Manifest | None] | None:
        """Return an entry in use with its manifest, or an empty one held exclusively.

        Args:
            name: name of the entry.
            retry: holds the stop condition, checked while another process copies.
            make: create an entry to be filled if none has complete data.
            patience: seconds to wait for another process's copy.
            on_wait: called about once a second with the other process's progress.

        Returns:
            None if there is none and none may be made, if it is damaged but in use by others (then
            it stays theirs), or if another process still copies after `patience`.

        Raises:
            ChangedError: a user staged it, and it has changed since.
            StagingError: the entry cannot be read or emptied.
        """
        polls = damaged = 0
        while True:
            retry.check_stop()
            is_damaged = False
            try:
                entry = self.lock(name, exclusive=False)
                if entry is not None:
                    manifest = self._verified(entry, retry)
                    if manifest is not None:
                        return entry, manifest
                    entry.release()
                    is_damaged = True
                entry = self.lock(name, exclusive=True, create=make)
            except BusyError:
                damaged = damaged + 1 if is_damaged else 0  # 0: another process copies it
                if damaged >= _POLLS_OF_DAMAGED or polls * _POLL_SECONDS >= patience:
                    return None
                polls += 1
                self._wait(name, retry, on_wait if polls % _POLLS_PER_REPORT == 0 else None)
                continue
            if entry is None:
                return None
            manifest = entry.manifest()
            if manifest is None or not entry.is_trusted():
                return (entry, None) if self._emptied(entry, manifest, make=make) else None
            entry.release()  # another process has published it meanwhile

    def _emptied(self, entry: Entry, manifest: Manifest | None, *, make: bool) -> bool:
        """Empty an entry that this process holds exclusively; without `make`, remove it."""
        # Names and sizes are right, but without digests the contents cannot be verified after a
        # restart.
        is_unknown = manifest is not None and not manifest.digest
        if is_published(entry.path) and not _may_go(entry.path) and not is_unknown:
            entry.release()
            raise ChangedError(entry.data)
        if not make:
            entry.discard()
            return False
        try:
            with as_staging_error(entry.path):
                entry.empty()
        except BaseException:
            entry.discard()
            raise
        entry.tell(0)  # overwrites the boot of earlier data
        return True

    def _verified(self, entry: Entry, retry: Retry) -> Manifest | None:
        """Return the manifest of complete data; the first use after a restart reads all contents.

        After a crash, names and sizes may be on disk while recently written contents are not.
        """
        manifest = entry.manifest()
        if manifest is None or entry.is_trusted():
            return manifest
        report = verify(entry.data, should_stop=retry.stops)
        if not report.hashed or report.count:
            return None
        entry.trust()
        return manifest

    def _wait(self, name: str, retry: Retry, on_wait: OnProgress | None) -> None:
        with contextlib.suppress(OSError):
            lease = os.open(f"{self.path}/{name}/{LEASE}", os.O_RDONLY | os.O_CLOEXEC)
            try:
                figures = Entry("", lease).heard()
            finally:
                os.close(lease)
            if on_wait is not None and len(figures) == 4:  # noqa: PLR2004 - as `OnProgress` has them
                on_wait(*figures)
        retry.sleep(_POLL_SECONDS - _TRIES * _TRY_SECONDS)

    def remove(self, name: str, needless: Callable[[str], bool] = lambda _: True) -> bool:
        """Remove an entry, unless another process uses it or `needless` returns False.

        Args:
            name: name of the entry.
            needless: called with its path while nobody else can use it.

        Raises:
            StagingError: it cannot be removed.
        """
        try:
            entry = self.lock(name, exclusive=True)
        except BusyError:
            return False
        if entry is None:
            return False
        try:
            if not needless(entry.path):
                return False
            with as_staging_error(entry.path):
                entry.remove()
        finally:
            entry.release()
        return True

    def sweep(self) -> None:
        """Remove leftovers of this user's dead processes: incomplete data, and data of dead jobs.

        Raises:
            StagingError: something cannot be removed.
        """
        for path in self.entries():
            if _is_leftover(path) and is_free(path):
                self.remove(os.path.basename(path), _is_leftover)
        self.remove_if_empty()

    def remove_if_empty(self) -> None:
        """Remove the store's directory if it has no entries."""
        with contextlib.suppress(OSError):  # missing or not empty
            os.rmdir(self.path)

    def idle(self) -> list[str]:
        """Return kept entries that nothing uses, least recently used first."""
        found = [
            path for path in self.entries() if not job_of(path) and _may_go(path) and is_free(path)
        ]
        return sorted(found, key=last_used)

    def room_without_idle(self, room: Room) -> Room:
        """Return the room that there would be without unused entries."""
        return room_without(room, self.idle())

    def make_room(self, need: Need, measure: Callable[[], Room]) -> list[str]:
        """Remove unused entries, least recently used first, until there is enough room.

        Nothing is removed if even that would not make enough room.

        Returns:
            the sources of what was removed.
        """
        room = measure()
        if fits(need, room):
            return []
        idle = self.idle()
        # All or nothing: do not evict kept data for a request that fails anyway.
        if not fits(need, room_without(room, idle)):
            return []
        removed = []
        for path in idle:
            manifest = published_manifest(f"{path}/{DATA}")
            with contextlib.suppress(StagingError):  # continue with the next entry
                if self.remove(os.path.basename(path), _may_go):
                    removed.append(manifest.source if manifest else os.path.basename(path))
            # Measure instead of summing up: other jobs write to the same file system meanwhile.
            if fits(need, measure()):
                break
        return removed


def is_published(path: str) -> bool:
    """Return whether an entry has data and a manifest, whatever their state."""
    return all(os.path.lexists(f"{path}/{name}") for name in (DATA, _MANIFEST))


def _is_leftover(path: str) -> bool:
    """Return whether an entry is useless once its lease is free."""
    return bool(job_of(path)) or not is_published(path)


def _may_go(path: str) -> bool:
    """Return whether an entry may be evicted: no user staged it by hand."""
    return not os.path.lexists(f"{path}/{BY_HAND}")


def is_free(path: str) -> bool:
    """Return whether nothing uses an entry."""
    try:
        lease = os.open(f"{path}/{LEASE}", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return True
    free = try_lock(lease, exclusive=True)
    if free:
        unlock(lease)
    else:
        os.close(lease)
    return free


def last_used(path: str) -> float:
    """Return when an entry was last used, in seconds since the epoch."""
    for one in (f"{path}/{LEASE}", path):
        with contextlib.suppress(OSError):
            return os.lstat(one).st_mtime
    return time.time()


@contextlib.contextmanager
def as_staging_error(path: str) -> Iterator[None]:
    """Convert errors of the system to a StagingError that names the path."""
    try:
        yield
    except (InputError, StagingError):
        raise
    except HpmlError as error:
        raise StagingError(f"{error}", hint="is the node's storage full?") from error
    except OSError as error:
        raise StagingError(f"cannot use {shown(path)}: {why(error)}") from error


# Inventory: list a user's staged data on a node, and remove what nothing uses.

_OWN = ("local.dir", "shm.dir")


@dataclass(frozen=True)
class StoredData:
    """One staged tree, complete or not.

    Attributes:
        base: directory on the node that contains its store.
        path: path of the data.
        name: the job's name for it, or the first part of the entry's name.
        job: key of the job that it belongs to; "" if it stays.
        by_hand: a user staged it, so it stays until `hpml stage clean`.
        in_use: what uses it, in words; "" if nothing does.
        since, last_used: seconds since the epoch.
        state: "ok", "damaged" (sizes or count are wrong), "incomplete" (was never published) or
            "own" (the job's own directory, for what it writes).
        source, kind, method, bytes, files, digest: as published; empty if incomplete.
    """

    base: str
    path: str
    name: str
    job: str = ""
    by_hand: bool = False
    in_use: str = ""
    since: float = 0.0
    last_used: float = 0.0
    state: str = "incomplete"
    source: str = ""
    kind: str = ""
    method: str = ""
    bytes: int = 0
    files: int = 0
    digest: str = ""


@dataclass
class Cleaned:
    """Result of `clean`.

    Attributes:
        removed: the removed data.
        kept: (data, reason) of everything that stays.
        failed: (path, reason) of what could not be read or removed.
    """

    removed: list[StoredData] = field(default_factory=list)
    kept: list[tuple[StoredData, str]] = field(default_factory=list)
    failed: list[tuple[str, str]] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """Total size of the removed data."""
        return sum(staged.bytes for staged in self.removed)


def list_staged(bases: Sequence[str]) -> list[StoredData]:
    """Return this user's data in some bases.

    Raises:
        StagingError: a store does not belong to this user.
    """
    entries = [(base, path) for base in bases for path in NodeStore(base).entries()]
    return [one for base, path in entries for one in _look(base, path)]


def clean(
    bases: Sequence[str],
    *,
    only: Sequence[str] = (),
    everything: bool = False,
    older_seconds: float | None = None,
    now: float = 0.0,
    dry_run: bool = False,
) -> Cleaned:
    """Remove leftovers of dead jobs, and incomplete or damaged data.

    Data in use and data of other users is never removed.

    Args:
        bases: directories to search.
        only: paths of data to remove; nothing else is removed then.
        everything: also remove data that was staged by hand or kept.
        older_seconds: also remove data that was unused for this long.
        now: seconds since the epoch.
        dry_run: only report what would be removed.
    """
    done = Cleaned()
    for base in bases:
        store = NodeStore(base)
        try:
            paths = store.entries()
        except HpmlError as error:
            done.failed.append((store.path, str(error)))
            continue
        for path in paths:
            for staged in _look(base, path):
                if only and not {path, staged.path} & {*only}:
                    continue
                idle_seconds = max(0.0, now - staged.last_used)
                is_old = older_seconds is not None and idle_seconds >= older_seconds
                is_wanted = staged.state == "ok" or (staged.by_hand and staged.state == "damaged")
                stays = is_wanted and not staged.job
                if staged.in_use:
                    done.kept.append((staged, f"in use by {staged.in_use}"))
                elif stays and not (only or everything or is_old):
                    by = "staged by hand" if staged.by_hand else "kept for later jobs"
                    by += ", changed since" if staged.state == "damaged" else ""
                    why = f"{by}, last used {age_text(idle_seconds)} ago"
                    done.kept.append((staged, why))
                else:
                    _clean_entry(store, path, staged, done, dry_run=dry_run)
        if not dry_run:
            store.remove_if_empty()
    return done


def _clean_entry(
    store: NodeStore, path: str, staged: StoredData, done: Cleaned, *, dry_run: bool
) -> None:
    try:
        if dry_run or store.remove(os.path.basename(path)) or not os.path.lexists(path):
            done.removed.append(staged)
        else:
            done.kept.append((staged, "in use by a process"))
    except HpmlError as error:
        done.failed.append((path, str(error)))


def user_of(path: str, *, proc_root: str = "/proc") -> str:
    """Return what uses an entry, in words; "" if nothing does."""
    if is_free(path):
        return ""
    with contextlib.suppress(OSError):
        info = os.stat(f"{path}/{LEASE}")
        place = f"{os.major(info.st_dev):02x}:{os.minor(info.st_dev):02x}:{info.st_ino}"
        with open(f"{proc_root}/locks", encoding="ascii") as stream:
            rows = [line.split() for line in stream]
        pids = [row[4] for row in rows if row[1] == "FLOCK" and row[5] == place]
        jobs = {job: None for pid in pids if (job := _job_of_process(pid, proc_root))}
        if jobs:
            return f"job {', '.join(jobs)}"
        if pids:
            return f"process {pids[0]}"
    return "a process"


def _job_of_process(pid: str, proc_root: str) -> str:
    for word in environment_of(pid, proc_root):
        if word.startswith(b"SLURM_JOB_ID="):
            return os.fsdecode(word.partition(b"=")[2])
    return ""


def _look(base: str, path: str) -> list[StoredData]:
    """Describe an entry; a job's own entry may hold several directories, or none."""
    try:
        names = sorted(os.listdir(path))
    except FileNotFoundError:
        return []
    common = StoredData(
        base,
        path,
        os.path.basename(path).partition("@")[0].partition("-")[0],
        job=job_of(path),
        by_hand=BY_HAND in names,
        in_use=user_of(path),
        since=os.lstat(path).st_mtime,
        last_used=last_used(path),
    )
    inner = [name for name in names if name in (DATA, *_OWN) or name.startswith(PARTIAL)]
    return [_described(replace(common, path=f"{path}/{name}"), name) for name in inner] or [common]


def _described(staged: StoredData, name: str) -> StoredData:
    manifest = published_manifest(staged.path) if name == DATA else None
    if manifest is None:
        taken = usage(staged.path)
        if name in _OWN:
            staged = replace(staged, name=name, state="own")
        return replace(staged, bytes=taken.bytes, files=taken.files)
    return replace(
        staged,
        state="ok" if is_whole(staged.path, manifest) else "damaged",
        bytes=manifest.bytes,
        files=manifest.files,
        digest=manifest.digest,
        source=manifest.source,
        kind=manifest.kind,
        method=manifest.method,
    )
