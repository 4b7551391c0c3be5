"""List what this user has staged on a node, and remove what nothing uses."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import HpmlError
from hpml_orchestrator.staging.faults import why
from hpml_orchestrator.staging.manifest import is_whole, measure, published_manifest
from hpml_orchestrator.staging.store import Store

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Cleaned", "Staged", "clean", "list_staged"]

_OWN = ("local.dir", "shm.dir")


@dataclass(frozen=True)
class Staged:
    """One thing that is staged, or was being staged.

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
    """What `clean` did.

    Attributes:
        removed: the data that is gone.
        kept: (path, reason) of what stays.
        leftovers: directories of dead jobs without published data, and half-removed ones.
    """

    removed: list[Staged] = field(default_factory=list)
    kept: list[tuple[str, str]] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """Sum of the sizes of the data that is gone."""
        return sum(staged.bytes for staged in self.removed)


def list_staged(bases: Sequence[str]) -> list[Staged]:
    """Return what this user has under some bases; links of jobs to kept data are not listed.

    Raises:
        StagingError: a store is not ours to use.
    """
    found: list[Staged] = []
    for base in bases:
        store = Store(base)
        with store.hold() as there:
            used = [(path, store.user_of(path)) for path in _directories(store, there=there)]
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
    """Remove what dead jobs left and kept data that was never completed or is damaged.

    What is in use stays in any case, and so does what belongs to others.

    Args:
        bases: where to look.
        everything: remove all kept data too.
        older_seconds: remove kept data that was not used for so long.
        dry_run: only report what would be removed.
    """
    done = Cleaned()
    for base in bases:
        store = Store(base)
        try:
            _clean(store, done, everything=everything, older_seconds=older_seconds, dry_run=dry_run)
        except (HpmlError, OSError) as error:
            done.kept.append((store.path, str(error)))
    return done


def _clean(
    store: Store, done: Cleaned, *, everything: bool, older_seconds: float | None, dry_run: bool
) -> None:
    with store.hold() as there:
        aside = [(path, path, list[Staged]()) for path in (store.leftovers() if there else [])]
        directories = _directories(store, there=there)
    for directory in directories:
        staged = _look(store, directory)  # without the lock: others need not wait for it
        is_good = any(one.state == "ok" for one in staged)
        with store.hold() as there:
            if not there or not os.path.lexists(directory):
                continue
            reason = _reason_to_keep(
                store, directory, everything=everything or not is_good, older_seconds=older_seconds
            )
            try:
                retired = directory if reason or dry_run else store.retire(directory)
            except OSError as error:
                retired, reason = None, f"cannot be removed: {why(error)}"
        if reason or retired is None:
            done.kept.append((directory, reason or "in use by a process"))
        else:
            aside.append((retired, directory, staged))
    for path, directory, staged in aside:
        try:
            store.sweep(*([] if dry_run else [path]))
        except HpmlError as error:
            done.kept.append((path, str(error)))
        else:
            done.removed.extend(staged)
            done.leftovers.extend([] if staged else [directory])
    if not dry_run:
        store.sweep()


def _directories(store: Store, *, there: bool) -> list[str]:
    return [*store.areas(), *store.entries()] if there else []


def _reason_to_keep(
    store: Store, directory: str, *, everything: bool, older_seconds: float | None
) -> str:
    """Return why a directory stays; "" if it may go; the store is held."""
    used_by = store.user_of(directory)
    if used_by:
        return f"in use by {used_by}"
    if not store.is_entry(directory):
        owner = store.owner_of(directory)
        known = owner is not None and owner.job_key == os.path.basename(directory)
        return "" if known else "nothing tells whose it is"
    idle_seconds = max(0.0, time.time() - store.last_used(directory))
    if everything or (older_seconds is not None and idle_seconds >= older_seconds):
        return ""
    return f"kept for later jobs, last used {_age(idle_seconds)} ago"


def _look(store: Store, directory: str, used_by: str = "") -> list[Staged]:
    """Return what lies in an area or entry, which may be removed meanwhile."""
    try:
        names = sorted(os.listdir(directory))
    except FileNotFoundError:
        return []
    owner = store.owner_of(directory)
    common = Staged(
        store.base,
        directory,
        "",
        owner=owner.job_key if owner else "",
        kept=store.is_entry(directory),
        in_use=used_by,
        last_used=store.last_used(directory),
    )
    return [
        _described(replace(common, path=f"{directory}/{name}", name=name))
        for name in names
        if (_is_partial(name) or not name.startswith("."))
        and not os.path.islink(f"{directory}/{name}")
    ]


def _is_partial(name: str) -> bool:
    return name.startswith(".") and ".partial-" in name


def _described(staged: Staged) -> Staged:
    """Return what the manifest of data says, and whether its sizes and count are right."""
    with contextlib.suppress(FileNotFoundError):
        size, files = measure(staged.path)
        staged = replace(staged, bytes=size, files=files)
        if _is_partial(staged.name):
            return replace(staged, name=staged.name[1:].partition(".partial-")[0])
        manifest = published_manifest(staged.path)
        if manifest is None:
            return replace(staged, state="own") if staged.name in _OWN else staged
        return replace(
            staged,
            name=manifest.name if staged.kept else staged.name,
            state="ok" if is_whole(staged.path, manifest) else "damaged",
            digest=manifest.digest,
            source=manifest.source,
            kind=manifest.kind,
            method=manifest.method,
        )
    return staged


def _age(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
