"""List a user's staged data on a node, and remove data that nothing uses."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import HpmlError
from hpml_orchestrator.staging.faults import why
from hpml_orchestrator.staging.manifest import is_whole, published_manifest
from hpml_orchestrator.staging.space import usage
from hpml_orchestrator.staging.store import DATA, PARTIAL, NodeStore, job_of, linked_key

if TYPE_CHECKING:
    from collections.abc import Sequence

_OWN = ("local.dir", "shm.dir")


@dataclass(frozen=True)
class StoredData:
    """One staged tree, complete or not.

    Attributes:
        base: directory on the node that its store is in.
        path: of the data.
        name: what the job calls it; of kept data what the job that brought it called it, "data"
            while that is not known.
        owner: key of the job that made it; "" if unknown.
        kept: it outlives the job.
        in_use: what uses it, in words; "" if nothing does.
        last_used: in seconds since the epoch.
        state: "ok", "damaged" (sizes or count are wrong), "incomplete" (was never published) or
            "own" (the job's own directory, for what it writes).
        source, kind, method, bytes, files, digest: as published; empty if incomplete.
    """

    base: str
    path: str
    name: str
    owner: str = ""
    kept: bool = False
    in_use: str = ""
    last_used: float = 0.0
    state: str = "incomplete"
    source: str = ""
    kind: str = ""
    method: str = ""
    bytes: int = 0
    files: int = 0
    digest: str = ""


@dataclass
class Cleaned:
    """The result of `clean`.

    Attributes:
        removed: the removed data.
        kept: (path, reason) of everything that stays.
        leftovers: removed directories without published data: of dead jobs, or half removed before.
    """

    removed: list[StoredData] = field(default_factory=list)
    kept: list[tuple[str, str]] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """Sum of the sizes of the removed data."""
        return sum(staged.bytes for staged in self.removed)


def list_staged(bases: Sequence[str]) -> list[StoredData]:
    """Return this user's data under some bases; links of jobs to kept data are not listed.

    Raises:
        StagingError: a store is not ours to use.
    """
    found: list[StoredData] = []
    for base in bases:
        store = NodeStore(base)
        with store.hold() as there:
            groups = store.groups() if there else []
            used = [(path, store.user_of(path)) for group in groups for path in group]
        for path, used_by in used:
            found.extend(_look(store, path, used_by))
    return found


def clean(
    bases: Sequence[str],
    *,
    everything: bool = False,
    older_seconds: float | None = None,
    dry_run: bool = False,
) -> Cleaned:
    """Remove leftovers of dead jobs, and kept data that is incomplete or damaged.

    Data in use and data of other users are never removed.

    Args:
        bases: where to look.
        everything: remove all kept data too.
        older_seconds: remove kept data that was not used for so long.
        dry_run: only report what would be removed.
    """
    done = Cleaned()
    for base in bases:
        store = NodeStore(base)
        try:
            _clean(store, done, everything=everything, older_seconds=older_seconds, dry_run=dry_run)
        except (HpmlError, OSError) as error:
            done.kept.append((store.path, str(error)))
    return done


def _clean(
    store: NodeStore, done: Cleaned, *, everything: bool, older_seconds: float | None, dry_run: bool
) -> None:
    with store.hold() as there:
        aside = [
            ([path], path, list[StoredData]()) for path in (store.leftovers() if there else [])
        ]
        groups = store.groups() if there else []
    for group in groups:
        directory, retired = group[0], list[str]()

        # Comparing a large tree with its manifest takes long, and jobs that start need the lock. So
        # this happens without it, and everything that decides is checked again under it.
        staged = [one for path in group for one in _look(store, path)]
        is_good = any(one.state == "ok" for one in staged)
        with store.hold() as there:
            if not there or not os.path.lexists(directory):
                continue
            reason = store.reason_to_keep(
                directory, everything=everything or not is_good, older_seconds=older_seconds
            )
            if not reason:
                retired, reason = _retire(store, group, dry_run=dry_run)
        if reason:
            done.kept.append((directory, reason))
        if retired:
            aside.append((retired, directory, staged))
    for paths, directory, staged in aside:
        try:
            store.sweep(*([] if dry_run else paths))
        except HpmlError as error:
            done.kept.append((paths[0], str(error)))
        else:
            done.removed.extend(staged)
            done.leftovers.extend([] if staged else [directory])
    if not dry_run:
        store.sweep()


def _retire(store: NodeStore, group: list[str], *, dry_run: bool) -> tuple[list[str], str]:
    """Move directories aside under the store's lock; return new paths, and why one stays."""
    retired = list(group) if dry_run else []
    for path in [] if dry_run else group:
        try:
            aside = store.retire(path)
        except OSError as error:
            return retired, f"cannot be removed: {why(error)}"
        if aside is None:
            return retired, "in use by a process"
        retired.append(aside)
    return retired, ""


def _look(store: NodeStore, directory: str, used_by: str = "") -> list[StoredData]:
    try:
        names = sorted(os.listdir(directory))
    except FileNotFoundError:
        return []
    owner = store.owner_of(directory)
    job, key = job_of(directory), os.path.basename(directory)
    common = StoredData(
        store.base,
        directory,
        key.partition("@")[0] if job else DATA if store.is_entry(directory) else "",
        owner=owner.job_key if owner else "",
        kept=store.is_entry(directory) and not job,
        in_use=used_by,
        last_used=store.last_used(directory),
    )
    link = f"{store.path}/{job}/{common.name}"
    found = []
    for name in names:
        path = f"{directory}/{name}"
        if name.startswith(PARTIAL) or not (name.startswith(".") or os.path.islink(path)):
            # Show a job's own data under the path that the job uses.
            path = link if job and name == DATA and linked_key(link) == key else path
            found.append(_described(replace(common, path=path, name=common.name or name)))
    return found


def _described(staged: StoredData) -> StoredData:
    manifest = published_manifest(staged.path)
    if manifest is None:
        taken = usage(staged.path)
        state = "own" if staged.name in _OWN else staged.state
        return replace(staged, bytes=taken.bytes, files=taken.files, state=state)
    return replace(
        staged,
        name=manifest.name,
        state="ok" if is_whole(staged.path, manifest) else "damaged",
        bytes=manifest.bytes,
        files=manifest.files,
        digest=manifest.digest,
        source=manifest.source,
        kind=manifest.kind,
        method=manifest.method,
    )
