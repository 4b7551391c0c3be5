"""List a user's staged data on a node, and remove what nothing uses."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import HpmlError
from hpml_orchestrator.records.process import environment_of
from hpml_orchestrator.records.texts import age_text
from hpml_orchestrator.staging.manifest import is_whole, published_manifest
from hpml_orchestrator.staging.space import usage
from hpml_orchestrator.staging.store import (
    BY_HAND,
    DATA,
    LEASE,
    PARTIAL,
    NodeStore,
    is_free,
    job_of,
    last_used,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

_OWN = ("local.dir", "shm.dir")


@dataclass(frozen=True)
class StoredData:
    """One staged tree, complete or not.

    Attributes:
        base: directory on the node that its store is in.
        path: of the data.
        name: what the job calls it, or the first part of the entry's name.
        job: key of the job that it goes with; "" if it stays.
        by_hand: a person staged it, so it stays until `hpml stage clean`.
        in_use: what uses it, in words; "" if nothing does.
        since, last_used: in seconds since the epoch.
        state: "ok", "damaged" (sizes or count are wrong), "incomplete" (was never published) or
            "own" (the job's own directory, for what it writes).
        source, kind, method, bytes, files, digest: as published; empty if incomplete.
    """

    base: str
    path: str
    name: str
    job: str = ""
    by_hand: bool = False
    in_use: str = ""
    since: float = 0.0
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
        kept: (data, reason) of everything that stays.
        failed: (path, reason) of what could not be looked at or removed.
    """

    removed: list[StoredData] = field(default_factory=list)
    kept: list[tuple[StoredData, str]] = field(default_factory=list)
    failed: list[tuple[str, str]] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """Sum of the sizes of the removed data."""
        return sum(staged.bytes for staged in self.removed)


def list_staged(bases: Sequence[str]) -> list[StoredData]:
    """Return this user's data under some bases.

    Raises:
        StagingError: a store is not ours to use.
    """
    entries = [(base, path) for base in bases for path in NodeStore(base).entries()]
    return [one for base, path in entries for one in _look(base, path)]


def clean(
    bases: Sequence[str],
    *,
    only: Sequence[str] = (),
    everything: bool = False,
    older_seconds: float | None = None,
    now: float = 0.0,
    dry_run: bool = False,
) -> Cleaned:
    """Remove what dead jobs left, and what is incomplete or damaged.

    Data in use and data of other users are never removed.

    Args:
        bases: where to look.
        only: paths of data to remove instead of all that.
        everything: remove all data that were staged by hand or kept, too.
        older_seconds: remove those that were not used for so long.
        now: seconds since the epoch.
        dry_run: only report what would be removed.
    """
    done = Cleaned()
    for base in bases:
        store = NodeStore(base)
        try:
            paths = store.entries()
        except HpmlError as error:
            done.failed.append((store.path, str(error)))
            continue
        for path in paths:
            for staged in _look(base, path):
                if only and not {path, staged.path} & {*only}:
                    continue
                idle_seconds = max(0.0, now - staged.last_used)
                is_old = older_seconds is not None and idle_seconds >= older_seconds
                is_wanted = staged.state == "ok" or (staged.by_hand and staged.state == "damaged")
                stays = is_wanted and not staged.job
                if staged.in_use:
                    done.kept.append((staged, f"in use by {staged.in_use}"))
                elif stays and not (only or everything or is_old):
                    by = "staged by hand" if staged.by_hand else "kept for later jobs"
                    by += ", changed since" if staged.state == "damaged" else ""
                    why = f"{by}, last used {age_text(idle_seconds)} ago"
                    done.kept.append((staged, why))
                else:
                    _remove(store, path, staged, done, dry_run=dry_run)
        if not dry_run:
            store.remove_if_empty()
    return done


def _remove(
    store: NodeStore, path: str, staged: StoredData, done: Cleaned, *, dry_run: bool
) -> None:
    try:
        if dry_run or store.remove(os.path.basename(path)) or not os.path.lexists(path):
            done.removed.append(staged)
        else:
            done.kept.append((staged, "in use by a process"))
    except HpmlError as error:
        done.failed.append((path, str(error)))


def user_of(path: str, *, proc_root: str = "/proc") -> str:
    """Return what uses an entry, in words; "" if nothing does."""
    if is_free(path):
        return ""
    with contextlib.suppress(OSError):
        info = os.stat(f"{path}/{LEASE}")
        place = f"{os.major(info.st_dev):02x}:{os.minor(info.st_dev):02x}:{info.st_ino}"
        with open(f"{proc_root}/locks", encoding="ascii") as stream:
            rows = [line.split() for line in stream]
        pids = [row[4] for row in rows if row[1] == "FLOCK" and row[5] == place]
        jobs = {job: None for pid in pids if (job := _job_of_process(pid, proc_root))}
        if jobs:
            return f"job {', '.join(jobs)}"
        if pids:
            return f"process {pids[0]}"
    return "a process"


def _job_of_process(pid: str, proc_root: str) -> str:
    for word in environment_of(pid, proc_root):
        if word.startswith(b"SLURM_JOB_ID="):
            return os.fsdecode(word.partition(b"=")[2])
    return ""


def _look(base: str, path: str) -> list[StoredData]:
    """Describe an entry; one of a job's own directories may be several, or empty."""
    try:
        names = sorted(os.listdir(path))
    except FileNotFoundError:
        return []
    common = StoredData(
        base,
        path,
        os.path.basename(path).partition("@")[0].partition("-")[0],
        job=job_of(path),
        by_hand=BY_HAND in names,
        in_use=user_of(path),
        since=os.lstat(path).st_mtime,
        last_used=last_used(path),
    )
    inner = [name for name in names if name in (DATA, *_OWN) or name.startswith(PARTIAL)]
    return [_described(replace(common, path=f"{path}/{name}"), name) for name in inner] or [common]


def _described(staged: StoredData, name: str) -> StoredData:
    manifest = published_manifest(staged.path) if name == DATA else None
    if manifest is None:
        taken = usage(staged.path)
        if name in _OWN:
            staged = replace(staged, name=name, state="own")
        return replace(staged, bytes=taken.bytes, files=taken.files)
    return replace(
        staged,
        state="ok" if is_whole(staged.path, manifest) else "damaged",
        bytes=manifest.bytes,
        files=manifest.files,
        digest=manifest.digest,
        source=manifest.source,
        kind=manifest.kind,
        method=manifest.method,
    )
