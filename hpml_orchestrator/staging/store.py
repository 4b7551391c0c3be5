"""A user's staged data on a node: one directory per entry, with one flock on its `.lease`.

    {base}/hpml-{uid}/       mode 0700
        {entry}/             the data of one source, or what a job writes itself
            .lease           exclusive while the entry is filled or removed, shared while it is
                             used; its time is the last use, its text how far the copy is, and once
                             it is complete the boot of the machine that has seen all contents
            .data.manifest   what was published: written before the data get their name
            .data.partial-*  a copy in progress, or one whose stager died
            .data.damaged    `hpml stage verify` found damage
            .by-hand         a person staged it: it stays until `hpml stage clean PATH`
            data/            the data

An entry that outlives its job is named {name}-{digest of its source}. One that goes with its job is
named {name}-{digest}@{job}; @{job} has the directories that the job writes to.

The kernel releases a flock however its holder dies. So an entry whose lease is free is used by
nobody, and whoever comes next removes it if it is incomplete or went with a job. What has no
`.lease` is not ours and never removed.
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
_POLL_SECONDS = 0.2  # with the tries of a lock
_POLLS_PER_REPORT = 5
_POLLS_OF_DAMAGED = 5
_LEASE_BYTES = 256
_TRIES, _TRY_SECONDS = 5, 0.02  # another process may only be looking whether a lease is free
CREATE_OR_OPEN = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_REMOVALS = 5  # of a tree in which others make files


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
    """Remove a file, or a directory that others may be removing too; no links are followed.

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
    """What a person staged was changed since; it is theirs to remove."""

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
    """Return the key of the job that an entry goes with; "" if it is kept for later jobs."""
    return os.path.basename(entry).partition("@")[2]


class Entry:
    """An entry on whose lease this process has a lock.

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
        """Leave the progress of a copy for the processes that wait."""
        self._write(" ".join(map(str, figures)))

    def heard(self) -> list[int]:
        """Return the progress that the holder of the lease has left; empty if none."""
        words = os.pread(self._lease, _LEASE_BYTES, 0).split()
        return [int(word) for word in words if word.isdigit()]

    def trust(self) -> None:
        """Note that all contents are as published, until the machine starts again."""
        self._write(f"boot {boot_id()}")

    def is_trusted(self) -> bool:
        """Return whether `trust` was called since the machine started."""
        words = os.pread(self._lease, _LEASE_BYTES, 0).decode(errors="replace").split()
        return words == ["boot", boot_id()]

    def _write(self, text: str) -> None:
        # Others read meanwhile: the space ends the last word even if more of an older text follows.
        data = f"{text} ".encode()
        with contextlib.suppress(OSError):  # a full disk must not hide why the copy failed
            os.pwrite(self._lease, data, 0)
            os.ftruncate(self._lease, len(data))

    def keep_by_hand(self) -> None:
        """Keep it until a person removes it."""
        os.close(os.open(f"{self.path}/{BY_HAND}", CREATE_OR_OPEN, 0o600))

    def share(self) -> bool:
        """Make an exclusive lock a shared one; False if the entry was removed in between."""
        # The kernel drops the one before it takes the other.
        return _locked(self._lease, exclusive=False) and self.is_current()

    def is_current(self) -> bool:
        """Return whether the lease is still that of the entry."""
        try:
            return os.path.samestat(os.fstat(self._lease), os.lstat(f"{self.path}/{LEASE}"))
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Give up the lease; the data stay until nobody needs them, or their room is needed."""
        if self._lease >= 0:
            with contextlib.suppress(OSError):  # read-only: only the order of eviction suffers
                os.utime(self._lease)
            unlock(self._lease)
            self._lease = -1

    def empty(self) -> None:
        """Remove all but the lease, which this process has alone, and a person's mark."""
        names = [name for name in os.listdir(self.path) if name not in {LEASE, BY_HAND}]
        # The manifest first: what a crash leaves counts as incomplete.
        for name in sorted(names, key=lambda name: (name != _MANIFEST, name)):
            remove_tree(f"{self.path}/{name}")

    def remove(self) -> None:
        """Remove the entry, whose lease this process has alone."""
        self.empty()
        # The lease last: while it is there, another process cannot begin to fill the directory.
        for name in (BY_HAND, LEASE):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{self.path}/{name}")
        _remove_empty(self.path)

    def discard(self) -> None:
        """Remove the entry, whose lease this process has alone, as far as that can be done."""
        with contextlib.suppress(HpmlError, OSError):
            if self.is_current():
                self.remove()
        self.release()


def _remove_empty(entry: str) -> None:
    """Remove the directory of an entry and the store, unless another process uses them."""
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
    """The directory `{base}/hpml-{uid}`; raises StagingError if it is not ours to use.

    Args:
        base: an absolute directory on the node, for example /dev/shm.
        proc_root: where to look for mounts.

    Attributes:
        path: of the directory.
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
            InputError: one of these.
            StagingError: a directory above it is closed to this user.
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
            # The last job may be removing the store.
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
                    _remove_empty(path)  # of no use without a lease, on a full disk
                    raise
                if not _locked(lease, exclusive=exclusive):
                    os.close(lease)
                    raise BusyError
                entry = Entry(path, lease)
                # Between the two calls another process may have removed the entry: this lock would
                # be on a file that is gone.
                if entry.is_current():
                    return entry
                unlock(lease)

    def _make(self, path: str) -> None:
        for one in (self.path, path):
            try:
                os.mkdir(one, 0o700)
                with contextlib.suppress(FileNotFoundError):  # already removed by the last job
                    os.chmod(one, 0o700)  # whatever the umask
            except FileExistsError:
                pass
            except FileNotFoundError:
                if one == self.path:  # the base is gone, or takes no directories, as /proc
                    raise
            self._is_there()  # before anything is made in it

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
        """Return an entry in use, with its manifest, or an empty one that this process has alone.

        Args:
            name: of the entry.
            retry: asked whether to stop while another process copies.
            make: make an entry to be filled if there is none with complete data.
            patience: seconds to wait for another process's copy.
            on_wait: called with the other process's progress about once a second.

        Returns:
            None if there is none and none may be made, if it is damaged but others use it (it stays
            theirs), and if another process still copies after `patience`.

        Raises:
            ChangedError: a person has staged it, and it was changed since.
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
        """Empty an entry that this process has alone, or without `make` remove it."""
        # Its names and sizes are right, but without digests nobody can tell after a restart.
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
        entry.tell(0)  # not the boot of earlier data
        return True

    def _verified(self, entry: Entry, retry: Retry) -> Manifest | None:
        """Return the manifest of complete data; the first use after a restart reads all contents.

        After a crash, names and sizes may be on disk while the last seconds' contents are not.
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
        """Remove an entry unless another process uses it, or `needless` says that it stays.

        Args:
            name: of the entry.
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
        """Remove what dead processes of this user left: incomplete data, and data of their jobs.

        Raises:
            StagingError: something cannot be removed.
        """
        for path in self.entries():
            if _is_leftover(path) and is_free(path):
                self.remove(os.path.basename(path), _is_leftover)
        self.remove_if_empty()

    def remove_if_empty(self) -> None:
        """Remove the store's directory if no entry is in it."""
        with contextlib.suppress(OSError):  # none, or not empty
            os.rmdir(self.path)

    def idle(self) -> list[str]:
        """Return what jobs kept and nothing uses, the least recently used first."""
        found = [
            path for path in self.entries() if not job_of(path) and _may_go(path) and is_free(path)
        ]
        return sorted(found, key=last_used)

    def room_without_idle(self, room: Room) -> Room:
        """Return the room that there would be without the entries that nothing uses."""
        return room_without(room, self.idle())

    def make_room(self, need: Need, measure: Callable[[], Room]) -> list[str]:
        """Remove entries that nothing uses, least recently used first, until a need is met.

        None is removed if even all of them would not make enough room.

        Returns:
            the sources of what was removed.
        """
        room = measure()
        if fits(need, room):
            return []
        idle = self.idle()
        # All or nothing: data kept for later jobs must not go for a request that fails anyway.
        if not fits(need, room_without(room, idle)):
            return []
        removed = []
        for path in idle:
            manifest = published_manifest(f"{path}/{DATA}")
            with contextlib.suppress(StagingError):  # an entry that cannot be removed stops none
                if self.remove(os.path.basename(path), _may_go):
                    removed.append(manifest.source if manifest else os.path.basename(path))
            # Measured, not summed up: other jobs write to the same file system meanwhile.
            if fits(need, measure()):
                break
        return removed


def is_published(path: str) -> bool:
    """Return whether an entry has data and their manifest, whatever their state."""
    return all(os.path.lexists(f"{path}/{name}") for name in (DATA, _MANIFEST))


def _is_leftover(path: str) -> bool:
    """Return whether an entry is of no use once nobody has its lease."""
    return bool(job_of(path)) or not is_published(path)


def _may_go(path: str) -> bool:
    """Return whether an entry makes room for others: no person has staged it."""
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
    """Turn errors of the system into a StagingError that names the path."""
    try:
        yield
    except (InputError, StagingError):
        raise
    except HpmlError as error:
        raise StagingError(f"{error}", hint="is the node's storage full?") from error
    except OSError as error:
        raise StagingError(f"cannot use {shown(path)}: {why(error)}") from error


# List a user's staged data on a node, and remove what nothing uses.

_OWN = ("local.dir", "shm.dir")


@dataclass(frozen=True)
class StoredData:
    """One staged tree, complete or not.

    Attributes:
        base: directory on the node that its store is in.
        path: of the data.
        name: what the job calls it, or the first part of the entry's name.
        job: key of the job that it goes with; "" if it stays.
        by_hand: a person staged it, so it stays until `hpml stage clean`.
        in_use: what uses it, in words; "" if nothing does.
        since, last_used: in seconds since the epoch.
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
    """The result of `clean`.

    Attributes:
        removed: the removed data.
        kept: (data, reason) of everything that stays.
        failed: (path, reason) of what could not be looked at or removed.
    """

    removed: list[StoredData] = field(default_factory=list)
    kept: list[tuple[StoredData, str]] = field(default_factory=list)
    failed: list[tuple[str, str]] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """Sum of the sizes of the removed data."""
        return sum(staged.bytes for staged in self.removed)


def list_staged(bases: Sequence[str]) -> list[StoredData]:
    """Return this user's data under some bases.

    Raises:
        StagingError: a store is not ours to use.
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
    """Remove what dead jobs left, and what is incomplete or damaged.

    Data in use and data of other users are never removed.

    Args:
        bases: where to look.
        only: paths of data to remove instead of all that.
        everything: remove all data that were staged by hand or kept, too.
        older_seconds: remove those that were not used for so long.
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
                    _inventory_remove(store, path, staged, done, dry_run=dry_run)
        if not dry_run:
            store.remove_if_empty()
    return done


def _inventory_remove(
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
    """Describe an entry; one of a job's own directories may be several, or empty."""
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
