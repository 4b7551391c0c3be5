"""The plain stager: every node copies or unpacks for itself, one source after the other."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import HpmlError, InputError, StagingError
from hpml_orchestrator.records.files import fsync_dir
from hpml_orchestrator.staging.archive import scan_archive, unpack_archive
from hpml_orchestrator.staging.area import StagingArea
from hpml_orchestrator.staging.capacity import Room, check_room, room_at
from hpml_orchestrator.staging.faults import Retry, shown, why
from hpml_orchestrator.staging.files import remove_tree
from hpml_orchestrator.staging.manifest import Manifest, measure
from hpml_orchestrator.staging.namelock import NameLock
from hpml_orchestrator.staging.plan import Plan, scan_file, scan_tree
from hpml_orchestrator.staging.progress import OnProgress, Progress
from hpml_orchestrator.staging.request import Bases, StageRequest, StageResult, kind_of
from hpml_orchestrator.staging.transfer import Copier

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["CopyStager"]

_MOST_THREADS = 16
_THREADS_PER_CPU = 4


def _never() -> bool:
    return False


class CopyStager:
    """A `Stager` that copies files with sendfile and unpacks archives itself.

    Args:
        job_key: names the job on this node.
        bases: what "shm" and "local" stand for.
        uid: whose root, `hpml-{uid}`; the caller's when left out.
        owner_pid: the process whose end makes the data stale; the calling one when left out.
        should_stop: asked per file and per MiB; True ends staging with StagingStopped.
        on_progress: told (bytes, files, bytes in all, files in all) at most once a second.
        room: measures the room in a directory.
        threads: most threads of a copy; min(16, 4 * CPUs) when left out.
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
        threads: int | None = None,
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
        cpus = len(os.sched_getaffinity(0))
        self._threads = threads or min(_MOST_THREADS, _THREADS_PER_CPU * cpus)
        self._areas: dict[str, StagingArea] = {}

    def stage(self, request: StageRequest) -> StageResult:
        """Publish the data of one request, or find it published already.

        The first request for a base also removes there what dead jobs of this user left.

        Raises:
            CapacityError: it does not fit in bytes or inodes; found before a byte is copied.
            InputError: source or target cannot be used as asked.
            StagingStopped: should_stop said so.
            StagingError: anything else; nothing is published and nothing is left half-done.
        """
        start = self._clock()
        self._retry.check_stop()
        area = self.area(request.target)
        try:
            kind = self._retry(lambda: kind_of(request))
            _check_apart(request, area)
        except OSError as error:
            raise _cannot(request, error) from error
        with NameLock(f"{area.job_dir}/.{request.name}.lock", self._retry, self._sleep) as lock:
            manifest = self._published(request, kind, area)
            reused = manifest is not None
            if manifest is None:
                if lock.holders_reason:
                    raise StagingError(f"another process of this job failed: {lock.holders_reason}")
                try:
                    manifest = self._publish(request, kind, area)
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
            reused=reused,
        )

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

    def _publish(self, request: StageRequest, kind: str, area: StagingArea) -> Manifest:
        partial = _partial_path(request, area)
        try:
            room = self._room(area.job_dir)
            plan = self._plan(request, kind, room)
            check_room(plan.need(room.block_bytes), room, name=request.name, where=area.base)
            method = "unpack" if kind == "tar" else "copy"
            manifest = Manifest(
                request.name, request.source, kind, method, plan.bytes, plan.file_count
            )
            progress = Progress(self._on_progress, clock=self._clock)
            progress.expect(manifest.bytes, len(plan.files))
            os.mkdir(partial, (plan.top.mode & 0o777) | 0o700)
            if kind == "tar":
                unpack_archive(request.source, plan, partial, self._retry, progress)
            else:
                Copier(plan, self._retry, progress, threads=self._threads).run(partial)
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
        return manifest

    def _plan(self, request: StageRequest, kind: str, room: Room) -> Plan:
        if kind == "tar":
            return scan_archive(request.source, self._retry, most_bytes=room.bytes)
        scan = scan_tree if kind == "tree" else scan_file
        return scan(request.source, self._retry)


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
    return f"{area.job_dir}/.{request.name}.manifest.json"


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
