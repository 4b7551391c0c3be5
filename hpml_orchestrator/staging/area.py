"""One job's directory on a node, and its end.

    {base}/hpml-{uid}/{job_key}/
        .owner.json               the process that answers for it
        .lease                    shared flock: in use
        .{name}.lock              one stager for this name at a time
        .{name}.manifest          what was published
        .{name}.damaged           `hpml stage verify` found that it is not that any more
        .{name}.partial-*         a copy that is being made, or was when its stager died
        {name}/                   the data, or a link to ../.cache/{key}/data

The root that it lies in, and what else lies there, is told in root.py.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import HpmlError
from hpml_orchestrator.records.owner import Owner, this_owner
from hpml_orchestrator.staging.files import unlock
from hpml_orchestrator.staging.request import check_job_key, target_path
from hpml_orchestrator.staging.root import (
    FILE,
    LEASE,
    MARKER,
    OWNER,
    Root,
    as_staging_error,
    new_directory,
)

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["MARKER", "StagingArea"]


class StagingArea:
    """One job's directory under one base; the same for every process of the job on this node.

    Args:
        base: an existing directory on the node, for example /dev/shm.
        job_key: names the job on this node, for example "<job id>.<restart>".
        owner_pid: the process whose end makes the data stale; the calling one when left out.
        proc_root: where to look for processes and mounts.
    """

    def __init__(
        self,
        base: str,
        job_key: str,
        *,
        owner_pid: int | None = None,
        proc_root: str = "/proc",
    ) -> None:
        check_job_key(job_key)
        self.place = Root(base, proc_root=proc_root)
        self.base = base
        self.job_key = job_key
        self.job_dir = target_path(base, os.getuid(), job_key, "").rstrip("/")
        self.root = self.place.path
        self._owner_pid = owner_pid
        self._lease = -1

    def path_of(self, name: str) -> str:
        """Return where data of that name is published."""
        return f"{self.job_dir}/{name}"

    def owner(self) -> Owner:
        """Describe the process that answers for what this area makes."""
        return this_owner(self.job_key, self._owner_pid, proc_root=self.place.proc_root)

    def open(self) -> None:
        """Create what is missing, record the owner and mark the job directory as in use.

        Raises:
            InputError: the base is no directory, or on a file system that nodes share.
            StagingError: the root is not ours to use: a link, another user's, without our marker.
        """
        if self._lease >= 0:
            return
        self.place.check_base()
        try:
            with self.place.hold(create=True), as_staging_error(self.job_dir):
                self._enter()
        except BaseException:
            with contextlib.suppress(HpmlError):  # a root that was made for nothing goes again
                self.place.sweep([])
            raise

    def _enter(self) -> None:
        if not os.path.lexists(self.job_dir):
            new_directory(self.place, self.job_dir, self.owner())
        elif not self._owned():
            self.owner().write(f"{self.job_dir}/{OWNER}")
        self._lease = os.open(f"{self.job_dir}/{LEASE}", FILE, 0o600)
        fcntl.flock(self._lease, fcntl.LOCK_SH)

    def close(self) -> None:
        """Give up the lease but leave the data."""
        if self._lease >= 0:
            unlock(self._lease)
            self._lease = -1

    def is_empty(self) -> bool:
        """Say whether nothing is published here, and no copy is being made."""
        try:
            names = os.listdir(self.job_dir)
        except OSError:
            return True
        return all(name.startswith(".") and ".partial-" not in name for name in names)

    def cleanup(self) -> bool:
        """Remove the job directory, and the root when it is empty then.

        Returns:
            False when another process of the job still uses it: the last one removes it.

        Raises:
            StagingError: the root is not ours, or something in it cannot be removed.
        """
        self.close()
        with self.place.hold(create=False) as there, as_staging_error(self.job_dir):
            if not there:
                return True
            trash = self.place.retire(self.job_dir) if os.path.lexists(self.job_dir) else ""
            if trash is None:
                return False
        self.place.sweep([trash] if trash else [])
        return True

    def remove_stale(self, is_alive: Callable[[Owner], bool] | None = None) -> list[str]:
        """Remove what dead jobs of this user left under this base.

        A job directory stays when its owner lives or cannot be judged, when a process holds its
        lease, or when it is this area's own. Of the cache only goes what a killed stager never
        finished.

        Returns:
            The job keys that were removed.
        """
        alive = is_alive or self.place.is_alive
        removed, trash = [], []
        with self.place.hold(create=False) as there, as_staging_error(self.root):
            trash.extend(self.place.leftovers() if there else [])
            for name in self.place.job_keys() if there else []:
                owner = self.place.owner_of(f"{self.root}/{name}")
                if name == self.job_key or owner is None or owner.job_key != name or alive(owner):
                    continue
                retired = self.place.retire(f"{self.root}/{name}")
                if retired:
                    removed.append(name)
                    trash.append(retired)
            for key in self.place.cache_keys() if there else []:
                if not os.path.lexists(f"{self.place.cache}/{key}/data"):
                    trash.extend(filter(None, [self.place.retire(f"{self.place.cache}/{key}")]))
        self.place.sweep(trash)
        return removed

    def _owned(self) -> bool:
        """Say whether a living process answers for the job directory already."""
        owner = self.place.owner_of(self.job_dir)
        return owner is not None and self.place.is_alive(owner)
