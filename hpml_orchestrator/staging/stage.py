"""One request on its way: cache, plan, room, copy, verify, publish.

`CopyStager.stage` goes through these in a line. Data comes by a `Supply`: this node reads the
source, or the nodes of a chain pass it on (`many/`).
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import time
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import HpmlError, InputError, StagingError
from hpml_orchestrator.records.files import fsync_dir
from hpml_orchestrator.staging.area import JobArea
from hpml_orchestrator.staging.copy import CopyOptions
from hpml_orchestrator.staging.faults import Retry, shown
from hpml_orchestrator.staging.files import (
    BusyError,
    NameLock,
    remove_tree,
)
from hpml_orchestrator.staging.manifest import (
    Manifest,
    damage_path,
    manifest_path,
    published_manifest,
)
from hpml_orchestrator.staging.progress import Progress
from hpml_orchestrator.staging.request import (
    Bases,
    StageRequest,
    StageResult,
    StagingStopped,
)
from hpml_orchestrator.staging.sources import LocalSupply, open_source
from hpml_orchestrator.staging.space import Need, Room, check_room, private_reason, room_at
from hpml_orchestrator.staging.store import DATA, PARTIAL, job_of, linked_key, own_key, whole
from hpml_orchestrator.staging.work import (
    SOURCE_KEY,
    Work,
    as_told,
    check_apart,
    ended,
    is_same_data,
    looking_at,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hpml_orchestrator.staging.area import Entry
    from hpml_orchestrator.staging.progress import OnProgress
    from hpml_orchestrator.staging.source import Supply

__all__ = ["CopyStager"]

_ROOM_TO_BEGIN = Need(1 << 20, 64)
"""What the area and records of a job take."""

_BUSY_SECONDS = 10.0
"""How long a node that others wait for waits for a process of its own job, such as an agent of an
earlier attempt: where nodes have one directory, each would wait for the other."""


class CopyStager:
    """Fills a directory beside the final one, and renames it when it is whole.

    Args:
        job_key: names the job on this node.
        bases: what "shm" and "local" stand for.
        owner_pid: the process whose end makes the data stale; the calling one when left out.
        should_stop: asked per file and per MiB; True ends staging with StagingStopped.
        on_progress: told (bytes, files, bytes in all, files in all) at most once a second.
        room: measures the room in a directory.
        job_id: as Slurm counts, to tell bases that are this job's own; its own variable when left
            out.
        checks_source: look at the source also where this job has it staged already, and stage it
            again when it has changed or has no digests though they are asked for.

    Attributes:
        options: how it is copied; may be set between requests.
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
        job_id: str | None = None,
        checks_source: bool = False,
    ) -> None:
        self._job_key = job_key
        self._bases = bases or Bases()
        self._owner_pid = owner_pid
        self._retry = Retry(sleep, should_stop)
        self._on_progress = on_progress
        self._room = room
        self.options = options or CopyOptions()
        self._areas: dict[str, JobArea] = {}
        self._leases: dict[str, Entry] = {}
        self._job_id = os.environ.get("SLURM_JOB_ID", "") if job_id is None else job_id
        self._checks_source = checks_source
        self._evicted: list[str] = []

    def stage(self, request: StageRequest, supply: Supply | None = None) -> StageResult:
        """Publish the data of one request, or find it published already.

        The first request for a base also removes there what dead jobs of this user left.

        Args:
            request: what is wanted, and where.
            supply: brings the data; this node reads the source by itself when it is left out.
                It is closed in any case; before, it is told by `fill`, `reuse` or `fail` what
                comes of it here. One that all nodes share is planned on each of them.

        Raises:
            CapacityError: it does not fit in bytes or inodes; found before a byte is copied.
            InputError: source or target cannot be used as asked.
            StagingStopped: should_stop said so.
            StagingError: anything else; nothing is published and nothing is left half-done.
        """
        begin = time.monotonic()
        with contextlib.ExitStack() as stack:
            if supply is not None:
                stack.push(functools.partial(ended, supply))
            self._retry.check_stop()
            with looking_at(request):
                unopened = self._unopened(request.target)
                unopened.store.check_base()
                check_apart(request, unopened)
            area = self.area(request.target)
            if supply is None:
                with looking_at(request):
                    supply = self.local(request, self.most_room(request))
                stack.push(functools.partial(ended, supply))
            work = Work(request, supply, area, evicted=self._evicted)
            self._evicted = []  # what went when the area was opened is told once
            private = private_reason(area.store.base, self._job_id)
            with self._one_of_the_job(work) as lock:
                if work.is_collective:
                    work.plan  # noqa: B018 - all nodes look, before one of them finds the data
                manifest = self._linked(work)
                if manifest is None:
                    lock.raise_reason("another process of this job failed")
                    manifest = self._obtained(work, lock, keeps=request.keep and not private)
                if work.copied is None:
                    supply.reuse()
        path, copied = area.path_of(request.name), work.copied
        return StageResult(
            name=request.name,
            path=path,
            bytes=manifest.bytes,
            files=manifest.files,
            seconds=time.monotonic() - begin,
            method=manifest.method,
            reused=copied is None,
            digest=manifest.digest,
            kept=not job_of(os.path.dirname(os.path.realpath(path))),
            private=private,
            workers=copied.workers if copied else 1,
            evicted=tuple(work.evicted),
        )

    @contextlib.contextmanager
    def _one_of_the_job(self, work: Work) -> Iterator[NameLock]:
        """Hold the lock of the job's name; whoever waits for it is told what went wrong."""
        request, area = work.request, work.area
        lock = NameLock(
            f"{area.path}/.{request.name}.lock",
            self._retry,
            on_wait=self._on_progress,
            most_seconds=_BUSY_SECONDS if work.is_collective else None,
        )
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(lock)
            except BusyError as error:
                raise StagingError(
                    f"another process of this job stages {request.name} in {shown(area.path)}, "
                    "maybe on another node",
                    hint="the target must be a directory of each node's own",
                ) from error
            try:
                yield lock
            except BaseException as error:
                # who waits for one that was only stopped takes over, as after a kill
                if not lock.holders_reason and not isinstance(error, StagingStopped):
                    lock.fail(error)
                if isinstance(error, (OSError, HpmlError)):
                    raise as_told(request, error) from error
                raise

    def _linked(self, work: Work) -> Manifest | None:
        """Return the manifest of whole data that the job's name leads to.

        A link that leads nowhere, to damaged data or to those of a source that has changed is
        removed.
        """
        request, area = work.request, work.area
        path = area.path_of(request.name)
        if not os.path.lexists(path):
            return None
        key = linked_key(path)
        manifest = published_manifest(path) if key and os.path.exists(path) else None
        if manifest is not None and not is_same_data(manifest, work):
            raise InputError(
                f"this job or shell staged {shown(manifest.source)} ({manifest.kind}) by that name",
                field="name",
                value=request.name,
                hint="give it another name (--name); `hpml stage clean --mine` removes what "
                "this shell staged",
            )
        if manifest is not None and not self._is_outdated(manifest, work):
            entry = area.take(key, create=False)
            if entry is not None:
                manifest = whole(entry.data)
                if manifest is not None:
                    self._hold(entry)
                    return manifest
                entry.release()
        remove_tree(path)
        return None

    def _obtained(self, work: Work, lock: NameLock, *, keeps: bool) -> Manifest:
        """Let the job's name lead to an entry with the data: found, waited for, or made.

        The job's own entry is made if the data are not to be kept, if the kept ones are damaged but
        other jobs use them, and if waiting for another job could hold up other nodes.
        """
        name, area = work.request.name, work.area

        def fill(directory: str, entry_lock: NameLock) -> Manifest:
            return self._publish(work, directory, lock, entry_lock)

        keys = []
        if work.request.trust_mtime or not work.plan.at_least:
            keys = work.entry_keys(hashed=self.options.hash)
        made = own = own_key(name, area.job_key)
        if keeps and keys:
            made = keys[-1]
        for key in (*keys, own):
            if key == own:
                self._release(f"{area.store.cache}/{own}")
                area.drop(own)
            obtained = area.obtain(
                key,
                fill if key in {made, own} else None,
                self._retry,
                waits=not work.is_collective,
                on_progress=self._on_progress,
            )
            if obtained is not None:
                break
        assert obtained is not None  # noqa: S101 - of its own entry a job has one
        entry, manifest = obtained
        try:
            entry.link_from(area.path_of(name))
        except BaseException:
            entry.release()
            raise
        self._hold(entry)
        return manifest

    def _publish(self, work: Work, directory: str, *locks: NameLock) -> Manifest:
        """Bring the data into an entry, where their name appears when all of it is there.

        Args:
            work: what is wanted.
            directory: of the entry.
            locks: told how far the copy is, for those who wait.

        Raises:
            CapacityError: it does not fit; found before a byte is copied.
            StagingError, RecordError, OSError: something else; nothing is left half-done.
        """
        request, where = work.request, work.area.store.base
        work.source_key()  # as it was planned: what comes to the source meanwhile is not in it
        there = self._room(directory)
        need = work.plan.need(there.block_bytes, there.inode_bytes)
        if need.at_least:  # the plan has a part of the data only
            check_room(need, there, name=request.name, where=where)
            raise StagingError(
                f"cannot stage {request.name}: room in {where} came free while it was "
                "found to be too little",
                hint="try again",
            )
        self._make_room(work, need, directory)
        for again in (not work.is_collective, False):
            try:
                return self._copy(work, need, directory, locks)
            except StagingStopped:
                raise
            except (HpmlError, OSError):
                # where something else took the room, kept data that nothing uses goes for it, once
                if not again or not self._make_room(work, need, directory):
                    raise
        raise AssertionError

    def _make_room(self, work: Work, need: Need, directory: str) -> bool:
        """Remove kept data that nothing uses where that is what it takes; say whether any went."""
        gone = work.area.store.make_room(need, lambda: self._room(directory))
        work.evicted.extend(gone)
        return bool(gone)

    def _copy(
        self, work: Work, need: Need, directory: str, locks: tuple[NameLock, ...]
    ) -> Manifest:
        """Check the room, copy beside the name, and rename."""
        request, plan = work.request, work.plan
        check_room(need, self._room(directory), name=request.name, where=work.area.store.base)
        progress = Progress(functools.partial(self._tell, locks))
        progress.expect(plan.bytes, len(plan.files))
        target = f"{directory}/{DATA}"
        partial = f"{directory}/{PARTIAL}{os.getpid()}-{secrets.token_hex(4)}"
        try:
            os.mkdir(partial, (plan.top.mode & 0o777) | 0o700)
            copied = work.supply.fill(plan, partial, retry=self._retry, progress=progress)
            manifest = work.manifest(copied)
            manifest.write(manifest_path(target))
            self._retry.check_stop()
            with contextlib.suppress(FileNotFoundError):  # left by what lay there before
                os.unlink(damage_path(target))
            os.rename(partial, target)
            fsync_dir(directory)
            progress.finish()
        except BaseException:
            with contextlib.suppress(OSError):
                remove_tree(partial)
            raise
        work.copied = copied
        return manifest

    def _tell(self, locks: tuple[NameLock, ...], *figures: int) -> None:
        """Tell the caller and those who wait for the locks how far it is."""
        for lock in locks:
            lock.tell(*figures)
        if self._on_progress is not None:
            self._on_progress(*figures)

    def _is_outdated(self, manifest: Manifest, work: Work) -> bool:
        """Say whether the source is no longer what was staged, where that is to be looked at."""
        if not self._checks_source:
            return False
        if self.options.hash and not manifest.digest:
            return True
        return manifest.options.get(SOURCE_KEY) != work.source_key()

    def has(self, request: StageRequest, supply: Supply) -> bool:
        """Return whether a copy of a request's data is at its target already: staging finds it.

        Raises:
            StagingError: the source cannot be read.
            OSError: likewise.
        """
        area = self._unopened(request.target)
        work = Work(request, supply, area)
        if work.plan.at_least:
            return False
        manifest = published_manifest(area.path_of(request.name))
        if manifest is not None and is_same_data(manifest, work):
            return not self._is_outdated(manifest, work)
        keys = work.entry_keys(hashed=self.options.hash)
        return any(os.path.exists(f"{area.store.cache}/{key}/{DATA}") for key in keys)

    def most_room(self, request: StageRequest) -> Room:
        """Return the room up to which a source is counted: without anything that hpml has there.

        Raises:
            InputError, StagingError: the target cannot be used.
            OSError: the room cannot be measured.
        """
        area = self._unopened(request.target)
        room = self._room(area.store.base)
        return area.store.most_room(room, own_key(request.name, area.job_key))

    def room_without_idle(self, base: str) -> Room:
        """Return the room in a base without kept data that nothing uses, which goes if it must.

        What dead jobs of this user left there is removed first, as when an area is opened.

        Raises:
            StagingError: the root is not ours to use.
            OSError: the room cannot be measured.
        """
        area = self._unopened(base)
        area.remove_stale()
        return area.store.room_without_idle(self._room(base))

    def area(self, target: str) -> JobArea:
        """Return the open area of a target, clearing away dead jobs when it is opened."""
        base = self._bases.resolve(target)
        if base not in self._areas:
            area = self._unopened(target)
            try:
                area.open()
            except StagingError:  # kept data may take the very last block
                gone = []
                with contextlib.suppress(HpmlError, OSError):
                    gone = area.store.make_room(_ROOM_TO_BEGIN, lambda: self._room(base))
                if not gone:
                    raise
                self._evicted.extend(gone)
                area.open()
            self._areas[base] = area
            area.remove_stale()
        return self._areas[base]

    def _unopened(self, target: str) -> JobArea:
        """Return the area of a target without making anything there."""
        base = self._bases.resolve(target)
        return JobArea(base, self._job_key, owner_pid=self._owner_pid)

    def local(self, request: StageRequest, room: Room) -> LocalSupply:
        """Return what reads the source of a request, counted up to a room.

        Raises:
            InputError, StagingError, OSError: as `open_source`.
        """
        rate = self.options.opens_per_second
        source = open_source(request, self._retry, room, opens_per_second=rate)
        return LocalSupply(source, self.options)

    def _hold(self, entry: Entry) -> None:
        """Keep one lease per entry."""
        if entry.path in self._leases:
            entry.release()
        else:
            self._leases[entry.path] = entry

    def _release(self, *paths: str) -> None:
        """Give up the leases on some entries, or on all."""
        for path in paths or tuple(self._leases):
            entry = self._leases.pop(path, None)
            if entry is not None:
                entry.release()

    def leave(self) -> None:
        """Go without removing data: it stays while the owner lives; an empty area does not."""
        self._release()
        for area in self._areas.values():
            with contextlib.suppress(HpmlError):  # what led here is the error to tell
                if area.is_empty():
                    area.cleanup()
            area.close()
        self._areas.clear()

    def cleanup(self) -> None:
        """Remove what this job staged, everywhere; may be called any number of times.

        What is kept for later jobs stays in the caches.

        Raises:
            StagingError: something cannot be removed; the other bases are cleaned all the same.
        """
        self._release()
        with contextlib.ExitStack() as stack:
            for area in self._areas.values():
                stack.callback(area.cleanup)
        self._areas.clear()
