"""The plain stager: every node copies or unpacks for itself, one source after the other."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from typing import TYPE_CHECKING, TypeVar

from hpml_orchestrator.errors import HpmlError, InputError, StagingError
from hpml_orchestrator.records.files import fsync_dir
from hpml_orchestrator.staging.area import StagingArea
from hpml_orchestrator.staging.capacity import Room, check_room, room_at
from hpml_orchestrator.staging.engine import EngineOptions
from hpml_orchestrator.staging.faults import Retry, shown, why
from hpml_orchestrator.staging.files import remove_tree
from hpml_orchestrator.staging.hashing import hashing
from hpml_orchestrator.staging.manifest import Listing, Manifest, measure, tree_digest
from hpml_orchestrator.staging.namelock import NameLock
from hpml_orchestrator.staging.progress import OnProgress, Progress
from hpml_orchestrator.staging.request import Bases, StageRequest, StageResult
from hpml_orchestrator.staging.sources import open_source
from hpml_orchestrator.staging.supply import LocalSupply

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpml_orchestrator.staging.engine import Copied
    from hpml_orchestrator.staging.supply import Supply

__all__ = ["CopyStager"]

T = TypeVar("T")


def _never() -> bool:
    return False


class CopyStager:
    """A `Stager` that fills a directory beside the final one, and renames it when it is whole.

    Args:
        job_key: names the job on this node.
        bases: what "shm" and "local" stand for.
        uid: whose root, `hpml-{uid}`; the caller's when left out.
        owner_pid: the process whose end makes the data stale; the calling one when left out.
        should_stop: asked per file and per MiB; True ends staging with StagingStopped.
        on_progress: told (bytes, files, bytes in all, files in all) at most once a second.
        room: measures the room in a directory.
        options: how the engine copies.
    """

    def __init__(
        self,
        job_key: str,
        *,
        bases: Bases | None = None,
        uid: int | None = None,
        owner_pid: int | None = None,
        should_stop: Callable[[], bool] = _never,
        on_progress: OnProgress | None = None,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
        room: Callable[[str], Room] = room_at,
        options: EngineOptions | None = None,
    ) -> None:
        self._job_key = job_key
        self._bases = bases or Bases()
        self._uid = uid
        self._owner_pid = owner_pid
        self._retry = Retry(sleep, should_stop)
        self._on_progress = on_progress
        self._sleep = sleep
        self._clock = clock
        self._room = room
        self._options = options or EngineOptions()
        self._areas: dict[str, StagingArea] = {}

    def stage(self, request: StageRequest, supply: Supply | None = None) -> StageResult:
        """Publish the data of one request, or find it published already.

        The first request for a base also removes there what dead jobs of this user left.

        Args:
            request: what is wanted, and where.
            supply: brings the data; this node reads the source by itself when it is left out.
                It is closed in any case.

        Raises:
            CapacityError: it does not fit in bytes or inodes; found before a byte is copied.
            InputError: source or target cannot be used as asked.
            StagingStopped: should_stop said so.
            StagingError: anything else; nothing is published and nothing is left half-done.
        """
        start = self._clock()
        with contextlib.ExitStack() as stack:
            if supply is not None:
                stack.callback(supply.close)
            self._retry.check_stop()
            area = self.area(request.target)
            room = self._look(lambda: self._room(area.job_dir), request)
            self._look(lambda: _check_apart(request, area), request)
            if supply is None:
                supply = self._look(lambda: self._local(request, room), request)
                stack.callback(supply.close)
            copied = None
            lock = stack.enter_context(
                NameLock(f"{area.job_dir}/.{request.name}.lock", self._retry, self._sleep)
            )
            manifest = self._published(request, supply.kind, area)
            if manifest is None:
                if lock.holders_reason:
                    raise StagingError(f"another process of this job failed: {lock.holders_reason}")
                try:
                    manifest, copied = self._publish(request, supply, area)
                except BaseException as error:
                    lock.fail(str(error) or type(error).__name__)
                    raise
        return StageResult(
            name=request.name,
            path=area.path_of(request.name),
            bytes=manifest.bytes,
            files=manifest.files,
            seconds=self._clock() - start,
            method=manifest.method,
            reused=copied is None,
            digest=manifest.digest,
            read_seconds=copied.read_seconds if copied else 0.0,
            write_seconds=copied.write_seconds if copied else 0.0,
            workers=copied.workers if copied else 1,
        )

    def _look(self, call: Callable[[], T], request: StageRequest) -> T:
        """Call what only looks at things."""
        try:
            return call()
        except OSError as error:
            raise _cannot(request, error) from error

    def _local(self, request: StageRequest, room: Room) -> Supply:
        return LocalSupply(open_source(request, self._retry, room), self._options)

    def area(self, target: str) -> StagingArea:
        """Return the open area of a target, clearing away dead jobs when it is opened."""
        base = self._bases.resolve(target)
        if base not in self._areas:
            area = StagingArea(base, self._job_key, uid=self._uid, owner_pid=self._owner_pid)
            area.open()
            self._areas[base] = area
            area.remove_stale()
        return self._areas[base]

    def cleanup(self) -> None:
        """Remove what this job staged, everywhere; may be called any number of times.

        Raises:
            StagingError: something cannot be removed; the other bases are cleaned all the same.
        """
        with contextlib.ExitStack() as stack:
            for area in self._areas.values():
                stack.callback(area.cleanup)
        self._areas.clear()

    def _published(self, request: StageRequest, kind: str, area: StagingArea) -> Manifest | None:
        """Return the manifest of whole, published data; take away data that is not whole."""
        path = area.path_of(request.name)
        try:
            for name in os.listdir(area.job_dir):
                if name.startswith(f".{request.name}.partial-"):
                    remove_tree(f"{area.job_dir}/{name}")
            if not os.path.lexists(path):
                return None
            manifest = Manifest.read(_manifest_path(request, area))
            if manifest is not None:
                if (manifest.source, manifest.kind) != (request.source, kind):
                    raise InputError(
                        f"this job staged {shown(manifest.source)} ({manifest.kind}) by that name",
                        field="name",
                        value=request.name,
                    )
                if measure(path) == (manifest.bytes, manifest.files):
                    return manifest
            damaged = _partial_path(request, area)
            os.rename(path, damaged)
            remove_tree(damaged)
        except OSError as error:
            raise StagingError(f"cannot use {shown(path)}: {why(error)}") from error
        return None

    def _publish(
        self, request: StageRequest, supply: Supply, area: StagingArea
    ) -> tuple[Manifest, Copied]:
        partial = _partial_path(request, area)
        try:
            room = self._room(area.job_dir)
            plan = supply.plan()
            check_room(plan.need(room.block_bytes), room, name=request.name, where=area.base)
            progress = Progress(self._on_progress, clock=self._clock)
            progress.expect(plan.bytes, len(plan.files))
            os.mkdir(partial, (plan.top.mode & 0o777) | 0o700)
            copied = supply.fill(plan, partial, retry=self._retry, progress=progress)
            listing = Listing.of(plan, copied.digests)
            manifest = Manifest(
                request.name,
                request.source,
                supply.kind,
                supply.method,
                plan.bytes,
                plan.file_count,
                tree_digest(listing, hashing()),
                {"outside_links": request.outside_links},
                listing,
            )
            manifest.write(_manifest_path(request, area))
            self._retry.check_stop()
            os.rename(partial, area.path_of(request.name))
            fsync_dir(area.job_dir)
            progress.finish()
        except BaseException as error:
            with contextlib.suppress(OSError):
                remove_tree(partial)
            if isinstance(error, (OSError, HpmlError)):
                raise _as_told(request, error) from error
            raise
        return manifest, copied


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


def _manifest_path(request: StageRequest, area: StagingArea) -> str:
    return f"{area.job_dir}/.{request.name}.manifest"


def _partial_path(request: StageRequest, area: StagingArea) -> str:
    return f"{area.job_dir}/.{request.name}.partial-{os.getpid()}-{secrets.token_hex(4)}"


def _cannot(request: StageRequest, error: OSError) -> StagingError:
    named = error.filename if isinstance(error.filename, (str, bytes)) else ""
    path = os.fsdecode(named) or request.source
    return StagingError(
        f"cannot stage {request.name} from {shown(request.source)}: {shown(path)}: {why(error)}"
    )


def _as_told(request: StageRequest, error: BaseException) -> HpmlError:
    """Return the error that a caller of stage() is told."""
    if isinstance(error, (StagingError, InputError)):
        return error
    if isinstance(error, OSError):
        return _cannot(request, error)
    return StagingError(f"cannot stage {request.name}: {error}")
