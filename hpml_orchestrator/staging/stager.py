"""The plain stager: every node copies or unpacks for itself, one source after the other."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from typing import TYPE_CHECKING, TypeVar

from hpml_orchestrator.errors import HpmlError, InputError, StagingError
from hpml_orchestrator.staging.area import StagingArea
from hpml_orchestrator.staging.cache import DATA, linked_key
from hpml_orchestrator.staging.capacity import Room, room_at
from hpml_orchestrator.staging.copy import CopyOptions
from hpml_orchestrator.staging.delivery import SOURCE_KEY, Delivery, partial_path
from hpml_orchestrator.staging.faults import UNREADABLE, Retry, shown, why
from hpml_orchestrator.staging.files import remove_tree
from hpml_orchestrator.staging.keeping import Keeper, entry_keys
from hpml_orchestrator.staging.manifest import is_whole, published_manifest
from hpml_orchestrator.staging.namelock import BusyError, NameLock
from hpml_orchestrator.staging.private import private_reason
from hpml_orchestrator.staging.request import (
    Bases,
    StageRequest,
    StageResult,
    StagingStopped,
)
from hpml_orchestrator.staging.sources import open_source
from hpml_orchestrator.staging.supply import LocalSupply

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpml_orchestrator.staging.manifest import Manifest
    from hpml_orchestrator.staging.progress import OnProgress
    from hpml_orchestrator.staging.supply import Supply

__all__ = ["CopyStager"]

T = TypeVar("T")
_BUSY_SECONDS = 10.0
"""How long a node that others wait for waits for a process of its own job, such as an agent of an
earlier attempt: where nodes have one directory, each would wait for the other."""


def _never() -> bool:
    return False


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
        options: how the engine copies; may be set between requests.
    """

    def __init__(
        self,
        job_key: str,
        *,
        bases: Bases | None = None,
        owner_pid: int | None = None,
        should_stop: Callable[[], bool] = _never,
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
        self._areas: dict[str, StagingArea] = {}
        self._job_id = os.environ.get("SLURM_JOB_ID", "") if job_id is None else job_id
        self._checks_source = checks_source
        self._keeper = Keeper(self._retry, on_progress=on_progress)
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
        start = time.monotonic()
        with contextlib.ExitStack() as stack:
            if supply is not None:
                stack.push(functools.partial(_ended, supply))
            self._retry.check_stop()
            there = self._unopened(request.target)
            self._look(there.place.check_base, request)
            self._look(lambda: _check_apart(request, there), request)
            area = self.area(request.target)
            if supply is None:
                supply = self._look(lambda: self._local(request), request)
                stack.push(functools.partial(_ended, supply))
            delivery = self._delivery(request, supply, area)
            delivery.evicted = self._evicted  # with what went when the area was opened
            private = private_reason(area.base, self._job_id)
            try:
                manifest = self._deliver(delivery, area, keeps=request.keep and not private)
            finally:
                self._evicted = []
        path, copied = area.path_of(request.name), delivery.copied
        return StageResult(
            name=request.name,
            path=path,
            bytes=manifest.bytes,
            files=manifest.files,
            seconds=time.monotonic() - start,
            method=manifest.method,
            reused=copied is None,
            digest=manifest.digest,
            kept=bool(linked_key(path)),
            private=private,
            workers=copied.workers if copied else 1,
            evicted=tuple(delivery.evicted),
        )

    def _deliver(self, delivery: Delivery, area: StagingArea, *, keeps: bool) -> Manifest:
        """Let the job's name lead to the data, and tell all who wait what came of it."""
        request = delivery.request
        with contextlib.ExitStack() as stack:
            lock = NameLock(
                f"{area.job_dir}/.{request.name}.lock",
                self._retry,
                on_wait=self._on_progress,
                most_seconds=_BUSY_SECONDS if delivery.is_collective else None,
            )
            try:
                stack.enter_context(lock)
            except BusyError as error:
                raise StagingError(
                    f"another process of this job stages {request.name} in {shown(area.job_dir)}, "
                    "maybe on another node",
                    hint="the target must be a directory of each node's own",
                ) from error
            try:
                if delivery.is_collective:
                    delivery.plan()
                manifest = self._published(delivery, area)
                if manifest is None:
                    lock.raise_reason("another process of this job failed")
                    manifest = self._bring(delivery, area, lock, keeps=keeps)
                if delivery.copied is None:
                    delivery.supply.reuse()
            except BaseException as error:
                # who waits for one that was only stopped takes over, as after a kill
                if not lock.holders_reason and not isinstance(error, StagingStopped):
                    lock.fail(str(error) or type(error).__name__)
                if isinstance(error, (OSError, HpmlError)):
                    raise _as_told(request, error) from error
                raise
        return manifest

    def _bring(
        self, delivery: Delivery, area: StagingArea, lock: NameLock, *, keeps: bool
    ) -> Manifest:
        """Find the data in the cache, or publish it: there when it is to be kept."""
        if delivery.request.trust_mtime or not delivery.plan().at_least:
            kept = self._keeper.obtain(
                delivery, area, hashed=self.options.hash, job_lock=lock, keeps=keeps
            )
            if kept is not None:
                return kept
        return delivery.publish(area.job_dir, delivery.request.name, lock)

    def _look(self, call: Callable[[], T], request: StageRequest) -> T:
        """Call what only looks at things."""
        try:
            return call()
        except OSError as error:
            raise _cannot(request, error) from error

    def _local(self, request: StageRequest) -> Supply:
        room, rate = self.most_room(request), self.options.opens_per_second
        source = open_source(request, self._retry, room, opens_per_second=rate)
        return LocalSupply(source, self.options)

    def most_room(self, request: StageRequest) -> Room:
        """Return the room up to which a source is counted: without anything that hpml has there.

        Raises:
            InputError, StagingError: the target cannot be used.
            OSError: the room cannot be measured.
        """
        area = self._unopened(request.target)
        room = self._room(area.base)
        return self._keeper.cache(area).most_room(room, area.path_of(request.name))

    def room_without_idle(self, base: str) -> Room:
        """Return the room in a base without kept data that nothing uses, which goes if it must.

        What dead jobs of this user left there is removed first, as when an area is opened.

        Raises:
            StagingError: the root is not ours to use.
            OSError: the room cannot be measured.
        """
        area = self._unopened(base)
        area.remove_stale()
        return self._keeper.cache(area).room_without_idle(self._room(base))

    def has(self, request: StageRequest, supply: Supply) -> bool:
        """Return whether a copy of a request's data is at its target already: staging finds it.

        Raises:
            StagingError: the source cannot be read.
            OSError: likewise.
        """
        area = self._unopened(request.target)
        delivery = self._delivery(request, supply, area)
        if delivery.plan().at_least:
            return False
        own = area.path_of(request.name)
        manifest = published_manifest(own) if os.path.exists(own) else None
        if manifest is not None and _is_same_data(manifest, request, supply.kind):
            return not self._is_outdated(manifest, delivery)
        keys = entry_keys(delivery, hashed=self.options.hash)
        return any(os.path.exists(f"{area.place.cache}/{key}/{DATA}") for key in keys)

    def _delivery(self, request: StageRequest, supply: Supply, area: StagingArea) -> Delivery:
        return Delivery(
            request,
            supply,
            self._keeper.cache(area),
            area.base,
            self._room,
            self._retry,
            self._on_progress,
        )

    def area(self, target: str) -> StagingArea:
        """Return the open area of a target, clearing away dead jobs when it is opened."""
        base = self._bases.resolve(target)
        if base not in self._areas:
            area = self._unopened(target)
            self._open(area)
            self._areas[base] = area
            area.remove_stale()
        return self._areas[base]

    def _unopened(self, target: str) -> StagingArea:
        """Return the area of a target without making anything there."""
        base = self._bases.resolve(target)
        return StagingArea(base, self._job_key, owner_pid=self._owner_pid)

    def _open(self, area: StagingArea) -> None:
        """Open an area, also where kept data takes the very last block."""
        try:
            area.open()
        except StagingError:
            gone = []
            with contextlib.suppress(HpmlError, OSError):
                gone = self._keeper.cache(area).make_room_to_begin(lambda: self._room(area.base))
            if not gone:
                raise
            self._evicted.extend(gone)
            area.open()

    def leave(self) -> None:
        """Go without removing data: it stays while the owner lives; an empty area does not."""
        self._keeper.release()
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
        self._keeper.release()
        with contextlib.ExitStack() as stack:
            for area in self._areas.values():
                stack.callback(area.cleanup)
        self._areas.clear()

    def _published(self, delivery: Delivery, area: StagingArea) -> Manifest | None:
        """Return the manifest of whole, published data; take away data that is not whole."""
        request, kind = delivery.request, delivery.supply.kind
        path = area.path_of(request.name)
        try:
            for name in os.listdir(area.job_dir):
                if name.startswith(f".{request.name}.partial-"):
                    remove_tree(f"{area.job_dir}/{name}")
            manifest = published_manifest(path) if os.path.lexists(path) else None
            if manifest is not None and not _is_same_data(manifest, request, kind):
                raise InputError(
                    f"this job or shell staged {shown(manifest.source)} ({manifest.kind}) by that "
                    "name",
                    field="name",
                    value=request.name,
                    hint="give it another name (--name); `hpml stage clean --mine` removes what "
                    "this shell staged",
                )
            if manifest is not None and self._is_outdated(manifest, delivery):
                manifest = None
                if linked_key(path):
                    os.unlink(path)
            elif linked_key(path):
                manifest = self._keeper.linked(area, request.name)
            elif manifest is not None and not is_whole(path, manifest):
                manifest = None
            if manifest is not None or not os.path.lexists(path):
                return manifest
            damaged = partial_path(area.job_dir, request.name)
            os.rename(path, damaged)
            remove_tree(damaged)
        except OSError as error:
            raise StagingError(f"cannot use {shown(path)}: {why(error)}") from error
        return None

    def _is_outdated(self, manifest: Manifest, delivery: Delivery) -> bool:
        """Say whether the source is no longer what was staged, where that is to be looked at."""
        if not self._checks_source:
            return False
        if self.options.hash and not manifest.digest:
            return True
        return manifest.options.get(SOURCE_KEY) != delivery.source_key()


def _ended(supply: Supply, _kind: object, error: BaseException | None, _trace: object) -> None:
    """Close a supply; one that was left by an error lets the other nodes know of it."""
    try:
        if error is not None:
            reason = str(error) or type(error).__name__
            supply.fail(reason, str(getattr(error, "hint", "")))
    finally:
        supply.close()


def _is_same_data(manifest: Manifest, request: StageRequest, kind: str) -> bool:
    """Say whether published data came from where a request's would; a link to it is the same."""
    same = os.path.realpath(manifest.source) == os.path.realpath(request.source)
    return same and manifest.kind == kind


def _check_apart(request: StageRequest, area: StagingArea) -> None:
    """Refuse a source that holds the target or lies in it."""
    source = os.path.realpath(request.source) + "/"
    target = os.path.realpath(area.job_dir) + "/"
    published = f"{target}{request.name}/"
    if target.startswith(source) or source.startswith(published):
        raise InputError(
            f"source and target lie in one another; the target is {shown(published)}",
            field="source",
            value=request.source,
        )


def _cannot(request: StageRequest, error: OSError) -> StagingError:
    named = error.filename if isinstance(error.filename, (str, bytes)) else ""
    path = os.fsdecode(named) or request.source
    return StagingError(
        f"cannot stage {request.name} from {shown(request.source)}: {shown(path)}: {why(error)}",
        hint=UNREADABLE if isinstance(error, PermissionError) else "",
    )


def _as_told(request: StageRequest, error: BaseException) -> HpmlError:
    """Return the error that a caller of stage() is told."""
    if isinstance(error, (StagingError, InputError)):
        return error
    if isinstance(error, OSError):
        return _cannot(request, error)
    return StagingError(f"cannot stage {request.name}: {error}")
