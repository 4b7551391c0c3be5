"""Compare published data with its manifest, contents included, with all CPUs of the job."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import NotFoundError
from hpml_orchestrator.staging.crew import run_crew
from hpml_orchestrator.staging.faults import PATHS_TOLD, is_directory, shown, why
from hpml_orchestrator.staging.hashing import hashing_named
from hpml_orchestrator.staging.manifest import (
    content_digest,
    damage_path,
    published_manifest,
    verify_tree,
)
from hpml_orchestrator.staging.request import StagingStopped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hpml_orchestrator.staging.hashing import Hashing
    from hpml_orchestrator.staging.manifest import Listing

__all__ = ["Report", "verify"]

_MOST_WORKERS = 16
_FILES_AT_ONCE = 256
_BYTES_AT_ONCE = 64 << 20


@dataclass
class Report:
    """What a comparison found.

    Attributes:
        path: of the data.
        files: number of names of files that were staged.
        bytes: sum of the sizes of the files whose contents were read.
        seconds: wall time.
        hashed: contents were compared; else only names, types, sizes and links, because the data
            was staged without digests, or with a hashing that this Python does not have.
        count: number of paths with faults.
        problems: (path below the data, fault) of the first 20 of them.
    """

    path: str
    files: int = 0
    bytes: int = 0
    seconds: float = 0.0
    hashed: bool = False
    count: int = 0
    problems: list[tuple[str, str]] = field(default_factory=list)

    def add(self, path: str, fault: str) -> None:
        """Note a path with a fault."""
        self.count += 1
        if len(self.problems) < PATHS_TOLD:
            self.problems.append((path, fault))


def verify(
    path: str,
    *,
    workers: int | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Report:
    """Compare published data, or what a job's link leads to, with its manifest.

    What is damaged is marked, so that nobody is given it again and `clean` may remove it.

    Args:
        path: of the data.
        workers: processes that read; one for each CPU, at most 16, when left out.
        should_stop: asked ten times a second.

    Raises:
        NotFoundError: there is no such data, or no manifest beside it.
        StagingStopped: should_stop said so.
        StagingError: a worker died, or a directory above is closed to this user.
        OSError: the data cannot be looked at.
    """
    began = time.monotonic()
    manifest = published_manifest(path)
    if manifest is None:
        there = is_directory(path) or os.path.lexists(path)
        what = "is no staged data, or its manifest is gone" if there else "is not there"
        raise NotFoundError(f"{shown(path)} {what}", hint="`hpml stage ls` shows what is staged")
    listing = manifest.listing
    how = hashing_named(manifest.digest.partition(":")[0]) if listing.digests else None
    report = Report(path, files=manifest.files, hashed=how is not None)
    faulty = set()
    for name, fault in verify_tree(path, manifest):
        report.add(name, fault)
        faulty.add(name)
    if how is not None:
        numbers = [at for at, name in enumerate(listing.files) if name not in faulty]
        report.bytes = sum(listing.sizes[number] for number in numbers)
        count = workers or min(_MOST_WORKERS, len(os.sched_getaffinity(0)))
        _compare(path, listing, numbers, how, count, report, should_stop)
    _mark(path, damaged=report.count > 0)
    report.seconds = time.monotonic() - began
    return report


def _mark(path: str, *, damaged: bool) -> None:
    """Leave beside data what a comparison found; where that cannot be written, nothing is left."""
    mark = damage_path(path)
    with contextlib.suppress(OSError):
        if not damaged:
            os.unlink(mark)
        elif os.stat(os.path.dirname(mark)).st_uid == os.geteuid():  # else root's, in another's
            os.close(os.open(mark, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))


def _compare(
    path: str,
    listing: Listing,
    numbers: list[int],
    how: Hashing,
    workers: int,
    report: Report,
    should_stop: Callable[[], bool],
) -> None:
    """Read files and note those whose contents differ."""
    batches = list(_batches(listing, numbers))

    def work(_worker: int, take: Callable[[], int | None], tell: Callable[..., None]) -> None:
        for batch in iter(take, None):
            for number in batches[batch]:
                name = listing.files[number]
                try:
                    found = content_digest(f"{path}/{name}", how)
                except OSError as error:
                    tell(name, why(error))
                else:
                    if found != listing.digests[number]:
                        tell(name, "its contents are not what was staged")

    def heartbeat() -> None:
        if should_stop():
            raise StagingStopped

    heartbeat()
    run_crew(
        max(1, min(workers, len(batches))),
        work,
        range(len(batches)),
        told=report.add,
        heartbeat=heartbeat,
    )


def _batches(listing: Listing, numbers: list[int]) -> Iterator[list[int]]:
    """Yield files in groups of a size that is worth a worker's while, large files alone."""
    left = iter(numbers)
    for first in left:
        batch, size = [first], listing.sizes[first]
        while size < _BYTES_AT_ONCE and len(batch) < _FILES_AT_ONCE:
            following = next(left, None)
            if following is None:
                break
            batch.append(following)
            size += listing.sizes[following]
        yield batch
