"""What this user holds on a node's storage: list it, and remove what nothing uses."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import HpmlError
from hpml_orchestrator.records.owner import this_owner
from hpml_orchestrator.staging.cache import entry_users, last_used
from hpml_orchestrator.staging.faults import why
from hpml_orchestrator.staging.manifest import is_whole, measure, published_manifest
from hpml_orchestrator.staging.root import Root, as_staging_error

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Cleaned", "Staged", "clean", "list_staged", "shell_key"]

_OWN = ("local.dir", "shm.dir")


@dataclass(frozen=True)
class Staged:
    """One thing that is staged, or was being staged.

    Attributes:
        base: directory on the node that its root is in.
        path: of the data.
        name: what the job calls it; in the cache what the job that brought it called it, "data"
            while that is not known.
        owner: key of the job that made it; "" when unknown.
        kept: it is an entry of the cache.
        in_use: who uses it, in words; "" when nothing does.
        last_used: in seconds since the epoch.
        state: "ok", "damaged" (sizes or count are wrong), "incomplete" (was never published) or
            "own" (the job's own directory, for what it writes).
        source, kind, method, bytes, files, digest: as published; empty when incomplete.
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


def shell_key(pid: int) -> str:
    """Return the job key of what a shell or batch script stages with `hpml stage`.

    The same for all that one process stages; another one with the same pid has another key.
    """
    return f"shell-{pid}-{this_owner('', pid).start_ticks}"


def list_staged(bases: Sequence[str]) -> list[Staged]:
    """Return what this user has under some bases; links of jobs to kept data are not listed.

    Raises:
        StagingError: a root is not ours to use.
    """
    found: list[Staged] = []
    for base in bases:
        root = Root(base)
        for directory, used_by in _directories(root):
            found.extend(_look(root, directory, used_by))
    return found


def clean(
    bases: Sequence[str],
    *,
    everything: bool = False,
    older_seconds: float | None = None,
    dry_run: bool = False,
) -> Cleaned:
    """Remove what dead jobs left and entries of the cache that were never completed.

    What is in use stays in any case, and so does what belongs to others.

    Args:
        bases: where to look.
        everything: remove all entries of the cache too.
        older_seconds: remove entries of the cache that were not used for so long.
        dry_run: only tell what would be removed.
    """
    done = Cleaned()
    for base in bases:
        root = Root(base)
        try:
            _clean(root, done, everything=everything, older_seconds=older_seconds, dry_run=dry_run)
        except (HpmlError, OSError) as error:
            done.kept.append((root.path, str(error)))
    return done


def _clean(
    root: Root, done: Cleaned, *, everything: bool, older_seconds: float | None, dry_run: bool
) -> None:
    with root.hold(create=False) as there, as_staging_error(root.path):
        left = root.leftovers() if there else []
    aside = [(path, path, list[Staged]()) for path in left]
    for directory, _ in _directories(root):
        staged = _look(root, directory)
        is_whole = any(one.state == "ok" for one in staged)
        with root.hold(create=False) as there:
            if not there or not os.path.lexists(directory):
                continue
            reason = _reason_to_keep(
                root, directory, everything=everything or not is_whole, older_seconds=older_seconds
            )
            try:
                retired = directory if reason or dry_run else root.retire(directory)
            except OSError as error:
                retired, reason = None, f"cannot be removed: {why(error)}"
        if reason or retired is None:
            done.kept.append((directory, reason or "in use by a process"))
        else:
            aside.append((retired, directory, staged))
    for path, directory, staged in aside:
        try:
            root.sweep([] if dry_run else [path])
        except HpmlError as error:
            done.kept.append((path, str(error)))
        else:
            done.removed.extend(staged)
            done.leftovers.extend([] if staged else [directory])
    if not dry_run:
        root.sweep([])


def _directories(root: Root) -> list[tuple[str, str]]:
    """Return the directories of jobs and of the cache, and who uses each."""
    with root.hold(create=False) as there, as_staging_error(root.path):
        if not there:
            return []
        paths = [f"{root.path}/{key}" for key in root.job_keys()]
        paths += [f"{root.cache}/{key}" for key in root.cache_keys()]
        return [(path, _user_of(root, path)) for path in paths]


def _is_entry(root: Root, directory: str) -> bool:
    return os.path.dirname(directory) == root.cache


def _user_of(root: Root, directory: str) -> str:
    """Return who uses a directory; "" when nobody does; the root is held."""
    jobs = entry_users(root, os.path.basename(directory)) if _is_entry(root, directory) else []
    return f"job {', '.join(jobs)}" if jobs else root.user_of(directory)


def _reason_to_keep(
    root: Root, directory: str, *, everything: bool, older_seconds: float | None
) -> str:
    """Return why a directory stays; "" when it may go; the root is held."""
    used_by = _user_of(root, directory)
    if used_by:
        return f"in use by {used_by}"
    if not _is_entry(root, directory):
        owner = root.owner_of(directory)
        known = owner is not None and owner.job_key == os.path.basename(directory)
        return "" if known else "nothing tells whose it is"
    idle_seconds = max(0.0, time.time() - last_used(directory))
    if everything or (older_seconds is not None and idle_seconds >= older_seconds):
        return ""
    return f"kept for later jobs, last used {_ago(idle_seconds)} ago"


def _look(root: Root, directory: str, used_by: str = "") -> list[Staged]:
    """Return what lies in a directory of a job or of the cache; it may go away meanwhile."""
    owner = root.owner_of(directory)
    common = Staged(
        root.base,
        directory,
        "",
        owner=owner.job_key if owner else "",
        kept=_is_entry(root, directory),
        in_use=used_by,
        last_used=last_used(directory),
    )
    try:
        names = sorted(os.listdir(directory))
    except FileNotFoundError:
        return []
    return [
        _described(replace(common, path=f"{directory}/{name}", name=name))
        for name in names
        if (_is_partial(name) or not name.startswith("."))
        and not os.path.islink(f"{directory}/{name}")
    ]


def _is_partial(name: str) -> bool:
    return name.startswith(".") and ".partial-" in name


def _described(staged: Staged) -> Staged:
    """Return what a manifest tells of data, and whether its sizes and count are right."""
    with contextlib.suppress(FileNotFoundError):
        found_bytes, found_files = measure(staged.path)
        if _is_partial(staged.name):
            name = staged.name[1:].partition(".partial-")[0]
            return replace(staged, name=name, bytes=found_bytes, files=found_files)
        manifest = published_manifest(staged.path)
        if manifest is None:
            state = "own" if staged.name in _OWN else staged.state
            return replace(staged, state=state, bytes=found_bytes, files=found_files)
        return replace(
            staged,
            name=manifest.name if staged.kept else staged.name,
            state="ok" if is_whole(staged.path, manifest) else "damaged",
            digest=manifest.digest,
            source=manifest.source,
            kind=manifest.kind,
            method=manifest.method,
            bytes=found_bytes,
            files=found_files,
        )
    return staged


def _ago(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
