"""Stages one request: cache, plan, room, copy, verify, publish.

`CopyStager.stage` does these in order. A `Supply` brings the data: this node reads the source, or
the nodes of a chain forward it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import HpmlError, InputError, StagingError
from hpml_orchestrator.records.files import fsync_dir
from hpml_orchestrator.staging.area import JobArea
from hpml_orchestrator.staging.copy import CopyOptions
from hpml_orchestrator.staging.faults import Retry, StagingStopped, request_error, shown, why
from hpml_orchestrator.staging.files import BusyError, NameLock, remove_tree
from hpml_orchestrator.staging.manifest import damage_path, manifest_path, published_manifest
from hpml_orchestrator.staging.progress import CopyProgress
from hpml_orchestrator.staging.request import Bases, StageRequest, StageResult
from hpml_orchestrator.staging.space import (
    Need,
    Room,
    capacity_at,
    check_room,
    room_at,
)
from hpml_orchestrator.staging.store import DATA, PARTIAL, job_of, linked_key, own_key, whole
from hpml_orchestrator.staging.supply import SOURCE_KEY, LocalSupply, Supply, open_source

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hpml_orchestrator.staging.area import StoreEntry
    from hpml_orchestrator.staging.manifest import Manifest
    from hpml_orchestrator.staging.progress import OnProgress

_ROOM_TO_BEGIN = Need(1 << 20, 64)
"""The room for the area and records of a job."""

_BUSY_SECONDS = 10.0
"""How long a node of a chain waits for another process of its job, such as the agent of an earlier
attempt. If two nodes had one directory, each would wait for the other."""


class CopyStager:
    """Copies into a hidden directory and renames it when it is complete.

    Args:
        job_key: names the job on this node.
        bases: the directories of "shm" and "local".
        owner_pid: the process whose end makes the data stale; the calling one if left out.
        should_stop: called per file and per MiB; True ends staging with StagingStopped.
        on_progress: called with (bytes, files, total bytes, total files) at most once a second.
        room: measures the room in a directory.

    Attributes:
        options: how to copy; may be set between requests.
    """

    def __init__(
        self,
        job_key: str,
        *,
        bases: Bases | None = None,
        owner_pid: int | None = None,
        should_stop: Callable[[], bool] = lambda: False,
        on_progress: OnProgress | None = None,
        sleep: Callable[[float], None] = time.sleep,
        room: Callable[[str], Room] = room_at,
        options: CopyOptions | None = None,
    ) -> None:
        self._job_key = job_key
        self._bases = bases or Bases()
        self._owner_pid = owner_pid
        self._retry = Retry(sleep, should_stop)
        self._on_progress = on_progress
        self._room = room
        self.options = options or CopyOptions()
        self._areas: dict[str, JobArea] = {}
        self._leases: dict[str, StoreEntry] = {}
        self._evicted: list[str] = []

    def stage(self, request: StageRequest, supply: Supply | None = None) -> StageResult:
        """Publish the data of one request, unless it is published already.

        The first request for a base also removes leftovers of this user's dead jobs there.

        Args:
            request: what to stage, and where.
            supply: brings the data; without one this node reads the source. It is closed in any
                case, after one of `fill`, `reuse` and `fail`. One of a chain is planned on each
                node, before any of them finds the data.

        Raises:
            CapacityError: it does not fit in bytes or inodes; found before a byte is copied.
            InputError: source or target cannot be used.
            StagingStopped: should_stop returned True.
            StagingError: anything else; nothing is published and nothing is left half-done.
        """
        begin = time.monotonic()
        try:
            self._retry.check_stop()
            unopened = self._unopened(request.target)
            unopened.store.check_base()
            unopened.check_apart(request)
            area = self.area(request.target)
            if supply is None:
                supply = self.local(request, request.target)
            # Two locks, always in this order: the job's for the name, then the store's for the
            # entry. Ranks and later commands of the job wait at the first one, other jobs at the
            # second.
            with self._lock_of(supply, area) as lock:
                if supply.is_collective:
                    supply.plan()  # an exchange between all nodes, those with the data included
                manifest = self._linked(supply, area)
                # A link left by an earlier request of this job is the fast way: its data need one
                # comparison of names and sizes.
                if manifest is None:
                    manifest = self._obtained(supply, area, lock)
                # The other nodes of a chain may need the data all the same.
                if not supply.is_filled:
                    supply.reuse()
        except BaseException as error:
            known = request_error(request.name, request.source, error)
            if supply is not None:
                reason = str(known) or type(known).__name__
                supply.fail(reason, str(getattr(known, "hint", "")))
            if known is error:
                raise
            raise known from error
        finally:
            if supply is not None:
                supply.close()
        path = area.path_of(request.name)
        evicted, self._evicted = tuple(self._evicted), []
        return StageResult(
            name=request.name,
            path=path,
            bytes=manifest.bytes,
            files=manifest.files,
            seconds=time.monotonic() - begin,
            method=manifest.method,
            reused=not supply.is_filled,
            digest=manifest.digest,
            kept=not job_of(os.path.dirname(os.path.realpath(path))),
            evicted=evicted,
            broken_links=sum(
                not os.path.exists(f"{path}/{name}") for name, _ in manifest.listing.symlinks
            ),
        )

    @contextlib.contextmanager
    def _lock_of(self, supply: Supply, area: JobArea) -> Iterator[NameLock]:
        request = supply.request
        lock = NameLock(
            f"{area.path}/.{request.name}.lock",
            self._retry,
            on_wait=self._on_progress,
            most_seconds=_BUSY_SECONDS if supply.is_collective else None,
        )
        try:
            with lock:
                yield lock
        except BusyError as error:
            raise StagingError(
                f"another process of this job stages {request.name} in {shown(area.path)}, "
                "maybe on another node",
                hint="the target must be a directory of each node's own",
            ) from error

    def _linked(self, supply: Supply, area: JobArea) -> Manifest | None:
        """Return the manifest of the complete data that the job's name links to.

        A link to nothing, to damaged data or to those of a source that has changed is removed.
        """
        path = area.path_of(supply.request.name)
        if not os.path.lexists(path):
            return None
        key = linked_key(path)
        manifest = published_manifest(path) if key and os.path.exists(path) else None
        if manifest is not None and not supply.is_source_of(manifest):
            raise InputError(
                f"this job or shell staged {shown(manifest.source)} ({manifest.kind}) by that name",
                field="name",
                value=supply.request.name,
                hint="give it another name (--name); `hpml stage clean --mine` removes what "
                "this shell staged",
            )
        if manifest is not None and not self._is_outdated(manifest, supply):
            entry = area.take(key, create=False)
            if entry is not None:
                manifest = whole(entry.data)
                if manifest is not None:
                    self._hold(entry)
                    return manifest
                entry.release()
        remove_tree(path)
        return None

    def _obtained(self, supply: Supply, area: JobArea, lock: NameLock) -> Manifest:
        """Link the job's name to an entry with the data: found, waited for, or made.

        The job's own entry is made if the data go with the job, if the kept ones are damaged but
        other jobs use them, and if waiting for another job could delay other nodes.
        """
        request = supply.request

        def fill(directory: str, entry_lock: NameLock) -> Manifest:
            return self._publish(supply, area, directory, lock, entry_lock)

        keys = []
        if request.trust_mtime or not supply.plan().at_least:
            keys = supply.entry_keys(hashed=self.options.hash)
        made = own = own_key(request.name, area.job_key)
        if request.keep and keys:
            made = keys[-1]
        for key in (*keys, own):
            # The job's own entry may be out of date or damaged: `_linked` would have returned a
            # good one.
            if key == own:
                self._release(f"{area.store.cache}/{own}")
                area.drop(own)
            obtained = area.obtain(
                key,
                fill if key in {made, own} else None,
                self._retry,
                waits=not supply.is_collective,
                on_progress=self._on_progress,
            )
            if obtained is not None:
                break
        assert obtained is not None  # noqa: S101 - a job always gets its own entry
        entry, manifest = obtained
        try:
            # The entry is leased and complete before the job's name leads to it.
            entry.link_from(area.path_of(request.name))
        except BaseException:
            entry.release()
            raise
        self._hold(entry)
        return manifest

    def _publish(self, supply: Supply, area: JobArea, directory: str, *locks: NameLock) -> Manifest:
        """Copy the data into an entry's directory; they appear when they are complete.

        The locks carry the progress, for processes that wait.
        """
        supply.source_key  # noqa: B018 - computed now, so that later changes of the source show
        there = self._room(directory)
        need = supply.plan().need(there.block_bytes, there.inode_bytes)
        name, where = supply.request.name, area.store.base
        if need.at_least:  # the plan has only a part of the data, too large already
            check_room(need, replace(there, bytes=0), name=name, where=where)
        # Kept data goes only now, when the data are known to come, and only if that makes enough
        # room.
        self._make_room(area, need, directory)
        # A node of a chain has one try: the data have passed by when it fails.
        for again in (not supply.is_collective, False):
            try:
                check_room(need, self._room(directory), name=name, where=where)
                return self._copy(supply, directory, locks)
            except StagingStopped:
                raise
            except (HpmlError, OSError):
                # Something else may have used up the room since the check. Make more by removing
                # unused kept data, once.
                if not again or not self._make_room(area, need, directory):
                    raise
        raise AssertionError

    def _make_room(self, area: JobArea, need: Need, directory: str) -> bool:
        """Remove unused kept data if that makes enough room; return whether any was removed."""
        removed = area.store.make_room(need, lambda: self._room(directory))
        self._evicted += removed
        return bool(removed)

    def _copy(self, supply: Supply, directory: str, locks: tuple[NameLock, ...]) -> Manifest:
        plan = supply.plan()
        progress = CopyProgress(functools.partial(self._report, locks))
        progress.expect(plan.bytes, len(plan.files))
        target = f"{directory}/{DATA}"
        partial = f"{directory}/{PARTIAL}{os.getpid()}-{secrets.token_hex(4)}"
        try:
            os.mkdir(partial, (plan.top.mode & 0o777) | 0o700)
            digests = supply.fill(plan, partial, retry=self._retry, progress=progress)
            manifest = supply.manifest(digests)
            # The manifest is on disk before the data get their name. A crash in between leaves a
            # manifest without data, which means nothing; data without a manifest would be removed
            # as damaged.
            manifest.write(manifest_path(target))
            self._retry.check_stop()
            # The mark of earlier damage goes before the new data appear, or they would count as
            # damaged.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(damage_path(target))
            os.rename(partial, target)
            # The rename itself is on disk only after this.
            fsync_dir(directory)
            progress.finish()
        except BaseException:
            with contextlib.suppress(OSError):
                remove_tree(partial)
            raise
        supply.is_filled = True
        return manifest

    def _report(self, locks: tuple[NameLock, ...], *figures: int) -> None:
        for lock in locks:
            lock.tell(*figures)
        if self._on_progress is not None:
            self._on_progress(*figures)

    def _is_outdated(self, manifest: Manifest, supply: Supply) -> bool:
        """Return whether the source has changed since it was staged, or digests are missing."""
        if self.options.hash and not manifest.digest:
            return True
        return manifest.options.get(SOURCE_KEY) != supply.source_key

    def has(self, target: str, supply: Supply) -> bool:
        """Return whether a copy of a request's data is at a target already.

        Raises:
            StagingError, OSError: the source cannot be read.
        """
        if supply.plan().at_least:
            return False
        area = self._unopened(target)
        manifest = published_manifest(area.path_of(supply.request.name))
        if manifest is not None and supply.is_source_of(manifest):
            return not self._is_outdated(manifest, supply)
        keys = supply.entry_keys(hashed=self.options.hash)
        return any(os.path.exists(f"{area.store.cache}/{key}/{DATA}") for key in keys)

    def refusal(self, target: str) -> str:
        """Return why "shm" or "local" cannot be used at all; "" if it can."""
        base = getattr(self._bases, target)
        if not base:
            return "this node has no such directory"
        try:
            self._unopened(target).store.check_base()
            self.room_without_idle(target)
        except (HpmlError, OSError) as error:  # a root that belongs to another user, for example
            return str(error) if isinstance(error, HpmlError) else f"{base}: {why(error)}"
        return "" if os.access(base, os.W_OK | os.X_OK) else f"{base} cannot be written"

    def room_without_idle(self, target: str) -> Room:
        """Return the room that a target would have without unused kept data.

        Leftovers of this user's dead jobs are removed first.

        Raises:
            StagingError: the root is not ours to use.
            OSError: the room cannot be measured.
        """
        area = self._unopened(target)
        area.remove_stale()
        return area.store.room_without_idle(self._room(area.store.base))

    def area(self, target: str) -> JobArea:
        """Return the open area of a target; remove leftovers of dead jobs when opening it."""
        base = self._bases.resolve(target)
        if base not in self._areas:
            area = self._unopened(target)
            try:
                area.open()
            except StagingError:  # kept data may occupy the very last block
                removed = []
                with contextlib.suppress(HpmlError, OSError):
                    removed = area.store.make_room(_ROOM_TO_BEGIN, lambda: self._room(base))
                if not removed:
                    raise
                self._evicted.extend(removed)
                area.open()
            self._areas[base] = area
            area.remove_stale()
        return self._areas[base]

    def _unopened(self, target: str) -> JobArea:
        base = self._bases.resolve(target)
        return JobArea(base, self._job_key, owner_pid=self._owner_pid)

    def local(self, request: StageRequest, *targets: str) -> LocalSupply:
        """Return a supply that reads the source; an archive only as far as a target could hold it.

        Raises:
            InputError, StagingError, OSError: as `open_source`.
        """
        most = max((capacity_at(self._bases.resolve(one)) for one in targets), default=0)
        rate = self.options.opens_per_second
        source = open_source(request, self._retry, most, opens_per_second=rate)
        return LocalSupply(request, source, self.options)

    def hold(self, request: StageRequest) -> None:
        """Use what another process of this job has published, whatever has become of its source.

        Raises:
            InputError, StagingError: the target cannot be used.
        """
        area = self.area(request.target)
        entry = area.take(linked_key(area.path_of(request.name)), create=False)
        if entry is not None:
            self._hold(entry)

    def _hold(self, entry: StoreEntry) -> None:
        if entry.path in self._leases:
            entry.release()
        else:
            self._leases[entry.path] = entry

    def _release(self, *paths: str) -> None:
        for path in paths or tuple(self._leases):
            entry = self._leases.pop(path, None)
            if entry is not None:
                entry.release()

    def leave(self) -> None:
        """End without removing data, which stays while its owner lives; remove an empty area."""
        self._release()
        for area in self._areas.values():
            with contextlib.suppress(HpmlError):  # an earlier error is the one to report
                if area.is_empty():
                    area.cleanup()
            area.close()
        self._areas.clear()

    def cleanup(self) -> None:
        """Remove this job's data from all targets; may be called several times.

        Data that is kept for later jobs stays in the caches.

        Raises:
            StagingError: something cannot be removed; the other bases are cleaned all the same.
        """
        self._release()
        with contextlib.ExitStack() as stack:
            for area in self._areas.values():
                stack.callback(area.cleanup)
        self._areas.clear()
