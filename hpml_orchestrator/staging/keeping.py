"""What one job has of the caches on its node: links to entries, and leases while it uses them."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, NamedTuple

from hpml_orchestrator.staging.cache import Cache, entry_key, linked_key
from hpml_orchestrator.staging.manifest import measure, published_manifest

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpml_orchestrator.staging.area import StagingArea
    from hpml_orchestrator.staging.cache import Entry
    from hpml_orchestrator.staging.faults import Retry
    from hpml_orchestrator.staging.manifest import Manifest
    from hpml_orchestrator.staging.namelock import NameLock
    from hpml_orchestrator.staging.plan import Plan
    from hpml_orchestrator.staging.progress import OnProgress
    from hpml_orchestrator.staging.request import StageRequest

__all__ = ["Keeper", "Kept", "whole"]


class Kept(NamedTuple):
    """Data of an entry that a job's path leads to now."""

    manifest: Manifest
    reused: bool


class Keeper:
    """Links a job's names to entries of the cache and holds their leases.

    Args:
        retry: asked whether to stop while another job copies.
        sleep: waits.
        on_progress: told how far the other job's copy is, while this one waits for it.
    """

    def __init__(
        self, retry: Retry, *, sleep: Callable[[float], None], on_progress: OnProgress | None
    ) -> None:
        self._retry = retry
        self._sleep = sleep
        self._on_progress = on_progress
        self._leases: dict[str, Entry] = {}

    def cache(self, area: StagingArea) -> Cache:
        """Return the cache of an area's root."""
        return Cache(
            area.place,
            area.owner(),
            self._retry,
            sleep=self._sleep,
            on_progress=self._on_progress,
        )

    def linked(self, area: StagingArea, name: str) -> Manifest | None:
        """Return the manifest of whole, kept data that a name of the job leads to.

        A link that leads nowhere or to damaged data is removed.

        Raises:
            StagingError: the root is not ours to use.
            OSError: the link cannot be removed.
        """
        path = area.path_of(name)
        key = linked_key(path)
        if not key:
            return None
        entry = self.cache(area).take(key, create=False)
        if entry is not None:
            manifest = whole(entry.data)
            if manifest is not None:
                self._hold(entry)
                return manifest
            entry.release()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        return None

    def obtain(
        self,
        request: StageRequest,
        kind: str,
        plan: Plan,
        area: StagingArea,
        fill: Callable[[str, str, NameLock], Manifest] | None,
    ) -> Kept | None:
        """Make the job's name lead to an entry with the data: found, waited for, or made.

        Args:
            request: what the job wants.
            kind: of the source, as `kind_of` tells.
            plan: of the source as it is now.
            area: the job's directory.
            fill: publishes the data by a name in a directory; None: only look for it.

        Returns:
            None when there is none and none is to be made, and when the entry is damaged but other
            jobs use it.

        Raises:
            StagingError: the copy failed, here or in the job that this one waited for.
            OSError: the source or the job's directory cannot be used.
        """
        options = ["outside_links"] if request.outside_links else []
        key = entry_key(plan, source=request.source, kind=kind, options=options)
        obtained = self.cache(area).obtain(key, whole, fill)
        if obtained is None:
            return None
        try:
            obtained.entry.link_from(area.path_of(request.name))
        except BaseException:
            obtained.entry.release()
            raise
        self._hold(obtained.entry)
        return Kept(obtained.manifest, obtained.reused)

    def release(self) -> None:
        """Give up all leases; the data stays until its room is needed."""
        for entry in self._leases.values():
            entry.release()
        self._leases.clear()

    def _hold(self, entry: Entry) -> None:
        """Keep one lease per entry."""
        if entry.path in self._leases:
            entry.release()
        else:
            self._leases[entry.path] = entry


def whole(data: str) -> Manifest | None:
    """Return the manifest of published data if its sizes and count are right, else None."""
    manifest = published_manifest(data)
    if manifest is None or not os.path.isdir(data):
        return None
    return manifest if measure(data) == (manifest.bytes, manifest.files) else None
