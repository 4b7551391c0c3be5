"""The data of one request on its way: planned once, then brought once or found to be there."""

from __future__ import annotations

import contextlib
import os
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import HpmlError, StagingError
from hpml_orchestrator.records.files import fsync_dir
from hpml_orchestrator.staging.cache import entry_key
from hpml_orchestrator.staging.capacity import check_room
from hpml_orchestrator.staging.files import remove_tree
from hpml_orchestrator.staging.hashing import hashing
from hpml_orchestrator.staging.manifest import (
    Listing,
    Manifest,
    damage_path,
    manifest_path,
    tree_digest,
)
from hpml_orchestrator.staging.progress import Progress
from hpml_orchestrator.staging.request import StagingStopped

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpml_orchestrator.staging.cache import Cache
    from hpml_orchestrator.staging.capacity import Need, Room
    from hpml_orchestrator.staging.copy import Copied
    from hpml_orchestrator.staging.faults import Retry
    from hpml_orchestrator.staging.namelock import NameLock
    from hpml_orchestrator.staging.plan import Plan
    from hpml_orchestrator.staging.progress import OnProgress
    from hpml_orchestrator.staging.request import StageRequest
    from hpml_orchestrator.staging.supply import Supply

__all__ = ["SOURCE_KEY", "Delivery", "partial_path"]

SOURCE_KEY = "source_key"
"""Among the options of a manifest: the source as it was when it was staged."""


@dataclass
class Delivery:
    """What `CopyStager` does for one request.

    Attributes:
        request: what is wanted.
        supply: brings it.
        cache: of the base; entries that nothing uses make room.
        where: the base, for messages.
        room: measures the room in a directory.
        retry: calls again after faults that pass.
        on_progress: told how far the copy is.
        copied: what the copy took; None when nothing was copied.
        evicted: sources of the kept data that went to make room.
    """

    request: StageRequest
    supply: Supply
    cache: Cache
    where: str
    room: Callable[[str], Room]
    retry: Retry
    on_progress: OnProgress | None = None
    copied: Copied | None = None
    evicted: list[str] = field(default_factory=list)
    _plan: Plan | None = None
    _source_key: str = ""

    @property
    def is_collective(self) -> bool:
        """Whether the other nodes need this one, also if it has the data already."""
        return self.supply.method == "chain"

    def plan(self) -> Plan:
        """Look at the source, once.

        Raises:
            StagingError, OSError: it cannot be staged.
        """
        if self._plan is None:
            self._plan = self.supply.plan()
        return self._plan

    def source_key(self) -> str:
        """Return a digest of all that a look at the source tells, as it was at the first call."""
        if not self._source_key:
            self._source_key = self.key()
        return self._source_key

    def key(self, *options: str) -> str:
        """Return a digest of the source as it is now, and of options; see `entry_key`."""
        plan = None if self.request.trust_mtime else self.plan()
        source, kind = self.request.source, self.supply.kind
        return entry_key(plan, source=source, kind=kind, options=options)

    def publish(self, directory: str, name: str, *locks: NameLock) -> Manifest:
        """Bring the data into a directory, by a name that appears when all of it is there.

        Args:
            directory: of the job or of an entry of the cache.
            name: of the data in it.
            locks: told how far the copy is, for those who wait.

        Raises:
            CapacityError: it does not fit; found before a byte is copied.
            StagingError, RecordError, OSError: something else; nothing is left half-done.
        """
        self.source_key()  # as it was planned: what comes to the source meanwhile is not in it
        there = self.room(directory)
        need = self.plan().need(there.block_bytes, there.inode_bytes)
        if need.at_least:  # the plan has a part of the data only
            check_room(need, there, name=self.request.name, where=self.where)
            raise StagingError(
                f"cannot stage {self.request.name}: room in {self.where} came free while it was "
                "found to be too little",
                hint="try again",
            )
        self._make_room(need, directory)
        try:
            return self._publish(need, directory, name, locks)
        except StagingStopped:
            raise
        except (HpmlError, OSError):
            # where something else took the room, kept data that nothing uses goes for it, once
            if self.is_collective or not self._make_room(need, directory):
                raise
        return self._publish(need, directory, name, locks)

    def _make_room(self, need: Need, directory: str) -> bool:
        """Remove kept data that nothing uses where that is what it takes; say whether any went."""
        gone = self.cache.make_room(need, lambda: self.room(directory))
        self.evicted.extend(gone)
        return bool(gone)

    def _publish(
        self, need: Need, directory: str, name: str, locks: tuple[NameLock, ...]
    ) -> Manifest:
        check_room(need, self.room(directory), name=self.request.name, where=self.where)
        plan = self.plan()
        progress = Progress(self._tell(locks))
        progress.expect(plan.bytes, len(plan.files))
        partial = partial_path(directory, name)
        try:
            os.mkdir(partial, (plan.top.mode & 0o777) | 0o700)
            copied = self.supply.fill(plan, partial, retry=self.retry, progress=progress)
            manifest = self._manifest(plan, copied)
            manifest.write(manifest_path(f"{directory}/{name}"))
            self.retry.check_stop()
            with contextlib.suppress(FileNotFoundError):  # told of what lay there before
                os.unlink(damage_path(f"{directory}/{name}"))
            os.rename(partial, f"{directory}/{name}")
            fsync_dir(directory)
            progress.finish()
        except BaseException:
            with contextlib.suppress(OSError):
                remove_tree(partial)
            raise
        self.copied = copied
        return manifest

    def _manifest(self, plan: Plan, copied: Copied) -> Manifest:
        listing = Listing.of(plan, copied.digests)
        return Manifest(
            self.request.name,
            self.request.source,
            self.supply.kind,
            self.supply.method,
            plan.bytes,
            plan.file_count,
            tree_digest(listing, hashing()),
            {"outside_links": self.request.outside_links, SOURCE_KEY: self.source_key()},
            listing,
        )

    def _tell(self, locks: tuple[NameLock, ...]) -> OnProgress:
        """Return what tells the caller and those who wait for the locks."""

        def tell(done: int, files: int, bytes_total: int, files_total: int) -> None:
            for lock in locks:
                lock.tell(done, files, bytes_total, files_total)
            if self.on_progress is not None:
                self.on_progress(done, files, bytes_total, files_total)

        return tell


def partial_path(directory: str, name: str) -> str:
    """Return a path for data that is not whole yet; one of a kind."""
    return f"{directory}/.{name}.partial-{os.getpid()}-{secrets.token_hex(4)}"
