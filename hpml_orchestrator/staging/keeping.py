"""What one job has of the caches on its node: links to entries, and leases while it uses them."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from hpml_orchestrator.staging.cache import Cache, linked_key
from hpml_orchestrator.staging.manifest import is_whole, published_manifest

if TYPE_CHECKING:
    from hpml_orchestrator.staging.area import StagingArea
    from hpml_orchestrator.staging.cache import Kept
    from hpml_orchestrator.staging.delivery import Delivery
    from hpml_orchestrator.staging.faults import Retry
    from hpml_orchestrator.staging.manifest import Manifest
    from hpml_orchestrator.staging.namelock import NameLock
    from hpml_orchestrator.staging.progress import OnProgress

__all__ = ["Keeper", "entry_keys", "whole"]


class Keeper:
    """Links a job's names to entries of the cache and holds their leases.

    Args:
        retry: asked whether to stop while another job copies.
        on_progress: told how far the other job's copy is, while this one waits for it.
    """

    def __init__(self, retry: Retry, *, on_progress: OnProgress | None) -> None:
        self._retry = retry
        self._on_progress = on_progress
        self._leases: dict[str, Kept] = {}

    def cache(self, area: StagingArea) -> Cache:
        """Return the cache of an area's root."""
        return Cache(
            area.place,
            area.owner(),
            self._retry,
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
        delivery: Delivery,
        area: StagingArea,
        *,
        hashed: bool,
        job_lock: NameLock,
        keeps: bool,
    ) -> Manifest | None:
        """Make the job's name lead to an entry with the data: found, waited for, or made.

        Args:
            delivery: of what the job wants.
            area: the job's directory.
            hashed: only data with digests will do, and what is made gets them.
            job_lock: told how far a copy is.
            keeps: make an entry if there is none.

        Returns:
            None when there is none and none is to be made, when the entry is damaged but other
            jobs use it, and when waiting for another job could hold up other nodes.

        Raises:
            StagingError: the copy failed, here or in the job that this one waited for.
            OSError: the source or the job's directory cannot be used.
        """
        request = delivery.request

        def fill(directory: str, name: str, lock: NameLock) -> Manifest:
            return delivery.publish(directory, name, job_lock, lock)

        keys = entry_keys(delivery, hashed=hashed)
        for key in keys:
            obtained = delivery.cache.obtain(
                key,
                whole,
                fill if keeps and key == keys[-1] else None,
                waits=not delivery.is_collective,
            )
            if obtained is not None:
                try:
                    obtained.entry.link_from(area.path_of(request.name))
                except BaseException:
                    obtained.entry.release()
                    raise
                self._hold(obtained.entry)
                return obtained.manifest
        return None

    def release(self) -> None:
        """Give up all leases; the data stays until its room is needed."""
        for entry in self._leases.values():
            entry.release()
        self._leases.clear()

    def _hold(self, entry: Kept) -> None:
        """Keep one lease per entry."""
        if entry.path in self._leases:
            entry.release()
        else:
            self._leases[entry.path] = entry


def entry_keys(delivery: Delivery, *, hashed: bool) -> list[str]:
    """Return the keys of the entries that serve a request; that of an entry made for it is last."""
    outside_links = f"outside_links={delivery.request.outside_links}"
    digests = (True,) if hashed else (True, False)
    return [delivery.key(outside_links, f"hash={each}") for each in digests]


def whole(data: str) -> Manifest | None:
    """Return the manifest of published data if its names and sizes are right, else None."""
    manifest = published_manifest(data)
    return manifest if manifest is not None and is_whole(data, manifest) else None
