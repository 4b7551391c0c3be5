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
from hpml_orchestrator.staging.cache import linked_key
from hpml_orchestrator.staging.capacity import Room, check_room, room_at
from hpml_orchestrator.staging.faults import Retry, shown, why
from hpml_orchestrator.staging.files import remove_tree
from hpml_orchestrator.staging.keeping import Keeper, Kept, whole
from hpml_orchestrator.staging.manifest import Manifest, manifest_path, published_manifest
from hpml_orchestrator.staging.namelock import NameLock
from hpml_orchestrator.staging.plan import Plan, scan_file, scan_tree
from hpml_orchestrator.staging.private import private_reason
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
        job_id: as Slurm counts, to tell bases that are this job's own; its own variable when left
            out.
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
        job_id: str | None = None,
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
        self._job_id = os.environ.get("SLURM_JOB_ID", "") if job_id is None else job_id
        self._keeper = Keeper(self._retry, sleep=sleep, on_progress=on_progress)

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
        private = private_reason(area.base, self._job_id)
        evicted: list[str] = []
        with NameLock(
            f"{area.job_dir}/.{request.name}.lock",
            self._retry,
            self._sleep,
            on_wait=self._on_progress,
        ) as lock:
            manifest = self._published(request, kind, area)
            reused = manifest is not None
            if manifest is None:
                lock.raise_reason("another process of this job failed")
                try:
                    keeps = request.keep and not private
                    manifest, reused = self._bring(
                        request, kind, area, lock, keeps=keeps, evicted=evicted
                    )
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
            kept=bool(linked_key(area.path_of(request.name))),
            private=private,
            evicted=tuple(evicted),
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

    def leave(self) -> None:
        """Go without removing anything: it stays while the owner lives."""
        self._keeper.release()
        for area in self._areas.values():
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

    def _published(self, request: StageRequest, kind: str, area: StagingArea) -> Manifest | None:
        """Return the manifest of whole, published data; take away data that is not whole."""
        path = area.path_of(request.name)
        try:
            for name in os.listdir(area.job_dir):
                if name.startswith(f".{request.name}.partial-"):
                    remove_tree(f"{area.job_dir}/{name}")
            manifest = published_manifest(path)
            if manifest is not None and not _is_same_data(manifest, request, kind):
                raise InputError(
                    f"this job staged {shown(manifest.source)} ({manifest.kind}) by that name",
                    field="name",
                    value=request.name,
                )
            manifest = self._keeper.linked(area, request.name) or whole(path)
            if manifest is not None or not os.path.lexists(path):
                return manifest
            damaged = _partial_path(area.job_dir, request.name)
            os.rename(path, damaged)
            remove_tree(damaged)
        except OSError as error:
            raise StagingError(f"cannot use {shown(path)}: {why(error)}") from error
        return None

    def _bring(
        self,
        request: StageRequest,
        kind: str,
        area: StagingArea,
        lock: NameLock,
        *,
        keeps: bool,
        evicted: list[str],
    ) -> Kept:
        """Find the data in the cache, or publish it: there when it is to be kept."""
        try:
            cache = self._keeper.cache(area)
            room = self._room(area.job_dir)
            plan = self._plan(request, kind, cache.most_room(room))

            def fill(directory: str, name: str, *locks: NameLock) -> Manifest:
                need = plan.need(room.block_bytes)
                evicted.extend(cache.make_room(need, lambda: self._room(directory)))
                check_room(need, self._room(directory), name=request.name, where=area.base)
                return self._publish(request, kind, plan, directory, name, locks)

            if not plan.at_least:
                kept = self._keeper.obtain(
                    request, kind, plan, area, (lambda *a: fill(*a, lock)) if keeps else None
                )
                if kept is not None:
                    return kept
            return Kept(fill(area.job_dir, request.name, lock), reused=False)
        except (OSError, HpmlError) as error:
            raise _as_told(request, error) from error

    def _publish(
        self,
        request: StageRequest,
        kind: str,
        plan: Plan,
        directory: str,
        name: str,
        locks: tuple[NameLock, ...],
    ) -> Manifest:
        partial = _partial_path(directory, name)
        method = "unpack" if kind == "tar" else "copy"
        manifest = Manifest(name, request.source, kind, method, plan.bytes, plan.file_count)
        progress = Progress(_tell_all(self._on_progress, locks), clock=self._clock)
        progress.expect(manifest.bytes, len(plan.files))
        try:
            os.mkdir(partial, (plan.top.mode & 0o777) | 0o700)
            if kind == "tar":
                unpack_archive(request.source, plan, partial, self._retry, progress)
            else:
                Copier(plan, self._retry, progress, threads=self._threads).run(partial)
            manifest.write(manifest_path(f"{directory}/{name}"))
            self._retry.check_stop()
            os.rename(partial, f"{directory}/{name}")
            fsync_dir(directory)
            progress.finish()
        except BaseException:
            with contextlib.suppress(OSError):
                remove_tree(partial)
            raise
        return manifest

    def _plan(self, request: StageRequest, kind: str, room: Room) -> Plan:
        if kind == "tar":
            return scan_archive(request.source, self._retry, most_bytes=room.bytes)
        if kind == "tree":
            return scan_tree(request.source, self._retry, outside_links=request.outside_links)
        return scan_file(request.source, self._retry)


def _tell_all(on_progress: OnProgress | None, locks: tuple[NameLock, ...]) -> OnProgress:
    """Tell the caller and those who wait for the locks."""

    def tell(done: int, files: int, bytes_total: int, files_total: int) -> None:
        for lock in locks:
            lock.tell(done, files, bytes_total, files_total)
        if on_progress is not None:
            on_progress(done, files, bytes_total, files_total)

    return tell


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


def _partial_path(directory: str, name: str) -> str:
    return f"{directory}/.{name}.partial-{os.getpid()}-{secrets.token_hex(4)}"


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
