"""Stages one request: look for the data, plan, check the room, copy, verify, publish.

`CopyStager.stage` does this in order. A `Supply` brings the data: this node reads the source, or
the nodes of a chain forward it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import stat
import time
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import HpmlError, InputError, StagingError
from hpml_orchestrator.records.files import fsync_dir
from hpml_orchestrator.records.job import Stage
from hpml_orchestrator.staging.copy import CopyOptions, CopyProgress, copy
from hpml_orchestrator.staging.manifest import (
    Listing,
    Manifest,
    hashing,
    manifest_path,
    tree_digest,
)
from hpml_orchestrator.staging.request import (
    Bases,
    Retry,
    StageResult,
    StagingStopped,
    check_job_key,
    kind_of,
    name_of,
    request_error,
    shown,
    why,
)
from hpml_orchestrator.staging.source import TreeSource
from hpml_orchestrator.staging.space import Need, Room, capacity_at, check_room, room_at
from hpml_orchestrator.staging.store import (
    DATA,
    PARTIAL,
    ChangedError,
    NodeStore,
    as_staging_error,
    base_above,
    job_of,
    remove_tree,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpml_orchestrator.staging.copy import OnProgress
    from hpml_orchestrator.staging.plan import CopyPlan
    from hpml_orchestrator.staging.source import Source
    from hpml_orchestrator.staging.store import Entry

_KEY_BYTES = 16

_ROOM_TO_BEGIN = Need(1 << 20, 64)
"""Room for the directories and records of a job."""

_BUSY_SECONDS = 10.0
"""How long a node of a chain waits for another process of its job, such as the agent of an earlier
attempt. If two nodes shared a directory, they would wait for each other forever."""


def open_source(
    request: Stage, retry: Retry, most_bytes: int, *, opens_per_second: float = 0.0
) -> Source:
    """Open the source of a request.

    Args:
        request: what to stage.
        retry: retries calls after transient faults.
        most_bytes: scanning an archive stops once it exceeds this size.
        opens_per_second: limit of tree entries examined per second; 0 for none.

    Raises:
        InputError: the source is not of the request's kind.
        StagingError: this node lacks a program or module to read it.
        OSError: the source's status cannot be read.
    """
    kind = retry(lambda: kind_of(request))
    path, outside_links = request.source, request.outside_links
    if kind in {"tree", "file"}:
        follow, rate = request.follow_links, opens_per_second
        links = {"outside_links": outside_links, "follow_links": follow}
        return TreeSource(path, retry, kind, rate=rate, **links)
    from hpml_orchestrator.staging.archives import (  # noqa: PLC0415 - few sources are archives
        TarSource,
        ZipSource,
    )

    if kind == "zip":
        return ZipSource(path, retry, outside_links=outside_links)
    return TarSource(path, kind, retry, most_bytes=most_bytes, outside_links=outside_links)


class Supply(ABC):
    """Brings the data of a request to this node, from the source or through a chain.

    All methods except `fail` may raise StagingError and OSError.

    Attributes:
        request: what to stage.
        method: how the data gets here: "copy", "unpack" or "chain".
    """

    method: str

    def __init__(self, request: Stage) -> None:
        self.request = request

    @property
    @abstractmethod
    def kind(self) -> str:
        """The source's kind, as in the manifest."""

    @abstractmethod
    def plan(self) -> CopyPlan:
        """Return the plan of the copy; the first call scans the source. Writes nothing."""

    @abstractmethod
    def fill(
        self, plan: CopyPlan, partial_dir: str, *, retry: Retry, progress: CopyProgress
    ) -> list[bytes]:
        """Create everything in the plan in an empty directory; return the digests of its files.

        The caller removes the directory on errors.
        """

    @abstractmethod
    def reuse(self) -> None:
        """Do what other nodes need from this one; called instead of `fill` if it has the data."""

    @abstractmethod
    def fail(self, reason: str, hint: str = "") -> None:
        """Tell the other nodes why this one fails."""

    @abstractmethod
    def close(self) -> None:
        """Release its resources; may be called several times, also after errors."""

    @property
    def is_collective(self) -> bool:
        """Whether the other nodes need this one even if it already has the data."""
        return self.method == "chain"

    def entry_names(self, *, hashed: bool) -> list[str]:
        """Return the names of suitable entries; a new entry gets the last of them."""
        # A request without hashing also accepts a copy with digests.
        digests, stem = (True,) if hashed else (True, False), name_of(self.request.source)
        return [f"{stem}-{self._key(f'hash={each}')}" for each in digests]

    def _key(self, *options: str) -> str:
        """Return a key of the source's current state and of options, as 32 hexadecimal digits.

        It covers the real path and its status, the kind, and the plan's fingerprint; with
        `trust_mtime` only the status. Every Python has BLAKE2b, so all compute the same names.
        """
        real = os.path.realpath(self.request.source)
        info = os.stat(real)
        digest = hashlib.blake2b(digest_size=_KEY_BYTES)

        def add(*values: object) -> None:
            for value in values:
                data = os.fsencode(value) if isinstance(value, str) else repr(value).encode()
                # Prefix the length, so that two different lists of values never yield the same
                # bytes.
                digest.update(b"%d:" % len(data))
                digest.update(data)

        links = (self.request.outside_links, self.request.follow_links)
        add(real, self.kind, links, options)
        if not self.request.trust_mtime:
            digest.update(self.plan().fingerprint)
        if self.request.trust_mtime or not stat.S_ISDIR(info.st_mode):
            add(info.st_size, info.st_mtime_ns, info.st_ino)
        return digest.hexdigest()

    def manifest(self, digests: list[bytes]) -> Manifest:
        """Return the manifest of the copied data, given the digests of its files."""
        request, plan = self.request, self.plan()
        listing = Listing.of(plan, digests)
        return Manifest(
            request.name,
            request.source,
            self.kind,
            self.method,
            plan.bytes,
            plan.file_count,
            tree_digest(listing, hashing()),
            listing=listing,
        )


class LocalSupply(Supply):
    """This node reads the `source` itself."""

    def __init__(self, request: Stage, source: Source, options: CopyOptions | None = None) -> None:
        super().__init__(request)
        self.source = source
        self._options = options or CopyOptions()
        self._plan: CopyPlan | None = None
        self._is_open = True
        self.method = "copy" if source.kind in {"tree", "file"} else "unpack"

    @property
    def kind(self) -> str:
        """The source's kind."""
        return self.source.kind

    def plan(self) -> CopyPlan:
        """Scan the source in the first call; return the same plan later."""
        if self._plan is None:
            self._plan = self.source.plan()
        return self._plan

    def fill(
        self, plan: CopyPlan, partial_dir: str, *, retry: Retry, progress: CopyProgress
    ) -> list[bytes]:
        """Copy or unpack it."""
        options = self._options
        return copy(plan, self.source, partial_dir, options=options, retry=retry, progress=progress)

    def reuse(self) -> None:
        """Do nothing: other nodes need nothing from this one."""

    def fail(self, reason: str, hint: str = "") -> None:
        """Do nothing: no other node waits."""

    def close(self) -> None:
        """Close the source, once."""
        if self._is_open:
            self._is_open = False
            self.source.close()


class CopyStager:
    """Copies into a hidden directory and renames it when it is complete.

    Args:
        job_key: names the job on this node; "" for a user, whose data stays.
        on_several_nodes: other nodes stage the same, and the paths should be equal.
        bases: the directories of "shm" and "local".
        should_stop: called per file and per MiB; True ends staging with StagingStopped.
        on_progress: called with (bytes, files, total bytes, total files) at most once a second.
        room: measures the room in a directory.

    Attributes:
        options: how to copy; may be set between requests.
    """

    def __init__(
        self,
        job_key: str = "",
        *,
        on_several_nodes: bool = False,
        bases: Bases | None = None,
        should_stop: Callable[[], bool] = lambda: False,
        on_progress: OnProgress | None = None,
        sleep: Callable[[float], None] = time.sleep,
        room: Callable[[str], Room] = room_at,
        options: CopyOptions | None = None,
    ) -> None:
        if job_key:
            check_job_key(job_key)
        self._job_key = job_key
        self._on_several_nodes = on_several_nodes
        self._bases = bases or Bases()
        self._retry = Retry(sleep, should_stop)
        self._on_progress = on_progress
        self._room = room
        self.options = options or CopyOptions()
        self._stores: dict[str, NodeStore] = {}
        self._leases: dict[str, Entry] = {}
        self._evicted: list[str] = []

    def stage(self, request: Stage, supply: Supply | None = None) -> StageResult:
        """Publish the data of one request, unless it is already published.

        The first request for a base also removes leftovers of this user's dead jobs there.

        Args:
            request: what to stage, and where.
            supply: brings the data; by default this node reads the source. It is closed in any
                case, after one of `fill`, `reuse` and `fail`. In a chain, every node plans before
                any of them looks for the data.

        Raises:
            CapacityError: too few bytes or inodes are free; found before a byte is copied.
            InputError: source or target cannot be used.
            StagingStopped: should_stop returned True.
            StagingError: anything else; nothing is published and nothing is left half-done.
        """
        begin = time.monotonic()
        try:
            self._retry.check_stop()
            _check_apart(request, self._unopened(request.target))
            store = self.store(request.target)
            if supply is None:
                supply = self.local(request, request.target)
            if supply.is_collective:
                supply.plan()  # all nodes take part, including those that have the data
            entry, manifest, is_copied = self._obtained(supply, store)
            if not is_copied:  # other nodes of a chain may still need the data
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
        evicted, self._evicted = tuple(self._evicted), []
        return StageResult(
            name=request.name,
            path=entry.data,
            bytes=manifest.bytes,
            files=manifest.files,
            seconds=time.monotonic() - begin,
            method=manifest.method,
            reused=not is_copied,
            digest=manifest.digest,
            kept=not job_of(entry.path),
            evicted=evicted,
            broken_links=sum(
                not os.path.exists(f"{entry.data}/{name}") for name, _ in manifest.listing.symlinks
            ),
        )

    def _obtained(self, supply: Supply, store: NodeStore) -> tuple[Entry, Manifest, bool]:
        """Hold an entry with the data; the last value is True if the data was copied."""
        manifest, is_copied = None, False
        while manifest is None:
            entry, manifest = self._claimed(supply, store)
            if manifest is None:
                manifest, is_copied = self._filled(entry, supply, store), True
        entry = self._held(entry)
        if not self._job_key:
            entry.keep_by_hand()
        return entry, manifest, is_copied

    def _claimed(self, supply: Supply, store: NodeStore) -> tuple[Entry, Manifest | None]:
        """Return an entry that has the data, with its manifest, or an empty one to be filled.

        The job's own entry is filled if the data goes with the job, if the kept data is damaged but
        in use by other jobs, or if waiting for another job could delay other nodes.
        """
        request = supply.request
        stem = name_of(request.source)
        kept: list[str] = []
        if request.trust_mtime or not supply.plan().at_least:
            kept = supply.entry_names(hashed=self.options.hash)
            stem = kept[-1]
        own = f"{stem}@{self._job_key}" if self._job_key else f"{stem}-2"
        made = {own, *(kept[-1:] if request.keep else ())}
        if self._on_several_nodes:  # otherwise paths would differ if only some nodes have the data
            kept = [name for name in kept if name in made]
        for name in (*kept, own):
            patience = float("inf")
            if supply.is_collective:
                # Two chains that wait for each other on two nodes would deadlock.
                patience = _BUSY_SECONDS if name == own else 0.0
            if name == own and (lease := self._leases.pop(f"{store.path}/{own}", None)):
                lease.release()
            try:
                claimed = store.claim(
                    name,
                    self._retry,
                    make=name in made,
                    patience=patience,
                    on_wait=self._on_progress,
                )
            except ChangedError:
                if not self._job_key:
                    raise
                continue
            if claimed is not None:
                return claimed
        raise StagingError(
            f"another process of this job stages {request.name} in {shown(store.path)}, "
            "maybe on another node",
            hint="the target must be a directory of each node's own",
        )

    def _filled(self, entry: Entry, supply: Supply, store: NodeStore) -> Manifest | None:
        """Copy the data into an entry that this process holds exclusively, then share the entry.

        Returns None if another process removed the entry as soon as it could.
        """
        try:
            there = self._room(entry.path)
            need = supply.plan().need(there.block_bytes, there.inode_bytes)
            name, where = supply.request.name, store.base
            if need.at_least:  # incomplete plan: even this part is too large
                check_room(need, replace(there, bytes=0), name=name, where=where)
            # Evict kept data only now, when the new data is known to be readable, and only if that
            # makes enough room.
            self._make_room(store, need, entry.path)
            try:
                check_room(need, self._room(entry.path), name=name, where=where)
                manifest = self._copied(entry, supply)
            except (HpmlError, OSError) as error:
                # The room may have been used up since the check. Remove unused kept data and try
                # once more; a node of a chain cannot, because the data has already passed.
                if isinstance(error, StagingStopped) or supply.is_collective:
                    raise
                if not self._make_room(store, need, entry.path):
                    raise
                check_room(need, self._room(entry.path), name=name, where=where)
                manifest = self._copied(entry, supply)
            entry.trust()
        except BaseException:
            entry.discard()
            raise
        if entry.share():
            return manifest
        entry.release()
        return None

    def _copied(self, entry: Entry, supply: Supply) -> Manifest:
        """Copy into a hidden directory, and rename it when it is complete."""

        def report(*figures: int) -> None:
            entry.tell(*figures)
            if self._on_progress is not None:
                self._on_progress(*figures)

        plan = supply.plan()
        progress = CopyProgress(report)
        progress.expect(plan.bytes, len(plan.files))
        partial = f"{entry.path}/{PARTIAL}{os.getpid()}-{secrets.token_hex(4)}"
        try:
            os.mkdir(partial, (plan.top.mode & 0o777) | 0o700)
            digests = supply.fill(plan, partial, retry=self._retry, progress=progress)
            manifest = supply.manifest(digests)
            # Sync the manifest before the rename. A crash in between leaves a manifest without
            # data, which counts as incomplete.
            manifest.write(manifest_path(entry.data))
            self._retry.check_stop()
            os.rename(partial, entry.data)
            # This makes the rename itself durable.
            fsync_dir(entry.path)
            progress.finish()
        except BaseException:
            with contextlib.suppress(OSError):
                remove_tree(partial)
            raise
        return manifest

    def _make_room(self, store: NodeStore, need: Need, directory: str) -> bool:
        """Remove unused kept data if that makes enough room; return whether any was removed."""
        removed = store.make_room(need, lambda: self._room(directory))
        self._evicted += removed
        return bool(removed)

    def has(self, target: str, supply: Supply) -> bool:
        """Return whether a target already has a copy of a request's data.

        Raises:
            StagingError, OSError: the source cannot be read.
        """
        if supply.plan().at_least:
            return False
        store, names = self._unopened(target), supply.entry_names(hashed=self.options.hash)
        return any(os.path.exists(f"{store.path}/{name}/{DATA}") for name in names)

    def refusal(self, target: str) -> str:
        """Return why "shm" or "local" cannot be used at all; "" if it can."""
        base = getattr(self._bases, target)
        if not base:
            return "this node has no such directory"
        try:
            self._unopened(target).check_base()
            self.room_without_idle(target)
        except (HpmlError, OSError) as error:  # for example, another user owns the root
            return str(error) if isinstance(error, HpmlError) else f"{base}: {why(error)}"
        return "" if os.access(base, os.W_OK | os.X_OK) else f"{base} cannot be written"

    def room_without_idle(self, target: str) -> Room:
        """Return the room that a target would have without unused kept data.

        Leftovers of this user's dead jobs are removed first.

        Raises:
            StagingError: the store does not belong to this user.
            OSError: the room cannot be measured.
        """
        store = self._unopened(target)
        store.sweep()
        return store.room_without_idle(self._room(store.base))

    def store(self, target: str) -> NodeStore:
        """Return the store of a target, without leftovers of dead jobs.

        Raises:
            InputError: the base is not a directory, or is on a file system that nodes share.
            StagingError: the store does not belong to this user.
        """
        base = self._bases.resolve(target)
        if base not in self._stores:
            store = self._unopened(target)
            if os.path.isabs(target) and os.path.isdir(os.path.dirname(target.rstrip("/"))):
                with as_staging_error(target), contextlib.suppress(FileExistsError):
                    os.mkdir(target)
            store.check_base()
            store.sweep()
            # Kept data may occupy even the last block.
            self._make_room(store, _ROOM_TO_BEGIN, base)
            self._stores[base] = store
        return self._stores[base]

    def _unopened(self, target: str) -> NodeStore:
        return NodeStore(self._bases.resolve(target))

    def local(self, request: Stage, *targets: str) -> LocalSupply:
        """Return a supply that reads the source; archives are scanned up to the targets' capacity.

        Raises:
            InputError, StagingError, OSError: as `open_source`.
        """
        most = max((capacity_at(self._bases.resolve(one)) for one in targets), default=0)
        rate = self.options.opens_per_second
        source = open_source(request, self._retry, most, opens_per_second=rate)
        return LocalSupply(request, source, self.options)

    def directory(self, target: str) -> str:
        """Return the directory at a target for the job's own files; create it if needed.

        Raises:
            InputError, StagingError: the target cannot be used.
        """
        entry = self.store(target).lock(f"@{self._job_key}", exclusive=False, create=True)
        assert entry is not None  # noqa: S101 - made
        return self._held(entry).path

    def hold(self, path: str) -> None:
        """Hold data that another process of this job published, even if its source is gone.

        Args:
            path: path of the data, or of a directory of the job.

        Raises:
            StagingError: the store cannot be used.
        """
        store = NodeStore(base_above(path))
        self._stores.setdefault(store.base, store)
        entry = store.lock(path[len(store.path) + 1 :].partition("/")[0], exclusive=False)
        if entry is not None:
            self._held(entry)

    def _held(self, entry: Entry) -> Entry:
        if entry.path in self._leases:
            entry.release()
        return self._leases.setdefault(entry.path, entry)

    def leave(self) -> None:
        """Release everything without removing data."""
        for entry in self._leases.values():
            entry.release()
        self._leases.clear()
        for store in self._stores.values():
            store.remove_if_empty()
        self._stores.clear()

    def cleanup(self) -> None:
        """Remove this job's data from all targets; may be called several times.

        Data that is kept for later jobs stays, and so does data in use by another process of this
        job: the last process removes it.

        Raises:
            StagingError: something cannot be removed; the other bases are still cleaned.
        """
        stores = [*self._stores.values()]
        self.leave()
        with contextlib.ExitStack() as stack:
            for store in stores:
                for path in store.entries():
                    if self._job_key and job_of(path) == self._job_key:
                        stack.callback(store.remove, os.path.basename(path))


def _check_apart(request: Stage, store: NodeStore) -> None:
    """Refuse a request whose source contains the store, or lies in it."""
    source, target = os.path.realpath(request.source) + "/", os.path.realpath(store.path) + "/"
    if target.startswith(source) or source.startswith(target):
        message = "one of source and target contains the other; the target is "
        raise InputError(message + shown(store.path), field="source", value=request.source)
