"""What is known of a request while it is worked on, and the errors that its caller is told."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import stat
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import HpmlError, InputError, StagingError
from hpml_orchestrator.staging.faults import UNREADABLE, shown, why
from hpml_orchestrator.staging.hashing import hashing
from hpml_orchestrator.staging.manifest import Listing, Manifest, tree_digest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from hpml_orchestrator.staging.area import JobArea
    from hpml_orchestrator.staging.copy import Copied
    from hpml_orchestrator.staging.plan import Plan
    from hpml_orchestrator.staging.request import StageRequest
    from hpml_orchestrator.staging.source import Supply

__all__ = [
    "SOURCE_KEY",
    "Work",
    "as_told",
    "check_apart",
    "ended",
    "entry_key",
    "is_same_data",
    "looking_at",
]

_KEY_BYTES = 16

SOURCE_KEY = "source_key"
"""Among the options of a manifest: the source as it was when it was staged."""


@dataclass
class Work:
    """What is known of a request while it is worked on.

    Attributes:
        copied: what the copy took; None when nothing was copied.
        evicted: sources of the kept data that went to make room.
    """

    request: StageRequest
    supply: Supply
    area: JobArea
    copied: Copied | None = None
    evicted: list[str] = field(default_factory=list)
    _source_key: str = ""

    @functools.cached_property
    def plan(self) -> Plan:
        """What will be made, looked up at the source once."""
        return self.supply.plan()

    @property
    def is_collective(self) -> bool:
        """Whether the other nodes need this one, also if it has the data already."""
        return self.supply.method == "chain"

    def source_key(self) -> str:
        """Return a digest of all that a look at the source tells, as it was at the first call."""
        if not self._source_key:
            self._source_key = self.key()
        return self._source_key

    def key(self, *options: str) -> str:
        """Return a digest of the source as it is now, and of options; see `entry_key`."""
        plan = None if self.request.trust_mtime else self.plan
        source, kind = self.request.source, self.supply.kind
        return entry_key(plan, source=source, kind=kind, options=options)

    def entry_keys(self, *, hashed: bool) -> list[str]:
        """Return the keys of entries that serve; that of an entry made for this one is last."""
        outside_links = f"outside_links={self.request.outside_links}"
        digests = (True,) if hashed else (True, False)
        return [self.key(outside_links, f"hash={each}") for each in digests]

    def manifest(self, copied: Copied) -> Manifest:
        """Return the record of what was copied."""
        request, plan = self.request, self.plan
        listing = Listing.of(plan, copied.digests)
        return Manifest(
            request.name,
            request.source,
            self.supply.kind,
            self.supply.method,
            plan.bytes,
            plan.file_count,
            tree_digest(listing, hashing()),
            {"outside_links": request.outside_links, SOURCE_KEY: self.source_key()},
            listing,
        )


def entry_key(plan: Plan | None, *, source: str, kind: str, options: Iterable[str] = ()) -> str:
    """Return the name of the entry for a source as it is now, as 32 hexadecimal digits.

    Over the real path and its status, the kind, the options, and names, sizes, times, modes and
    links of everything in the plan; without a plan the source's own status stands for all in it.
    BLAKE2b, which every Python has: the name must not depend on which of them looks.

    Raises:
        OSError: the source cannot be looked at.
    """
    real = os.path.realpath(source)
    info = os.stat(real)
    digest = hashlib.blake2b(digest_size=_KEY_BYTES)

    def add(*values: object) -> None:
        for value in values:
            data = os.fsencode(value) if isinstance(value, str) else repr(value).encode()
            digest.update(b"%d:" % len(data))
            digest.update(data)

    add(real, kind, sorted(options))
    if plan is not None:
        digest.update(plan.fingerprint)
    if plan is None or not stat.S_ISDIR(info.st_mode):
        add(info.st_size, info.st_mtime_ns, info.st_ino)
    return digest.hexdigest()


def ended(supply: Supply, _kind: object, error: BaseException | None, _trace: object) -> None:
    """Close a supply; one that was left by an error lets the other nodes know of it."""
    try:
        if error is not None:
            reason = str(error) or type(error).__name__
            supply.fail(reason, str(getattr(error, "hint", "")))
    finally:
        supply.close()


def is_same_data(manifest: Manifest, work: Work) -> bool:
    """Say whether published data came from where a request's would; a link to it is the same."""
    same = os.path.realpath(manifest.source) == os.path.realpath(work.request.source)
    return same and manifest.kind == work.supply.kind


def check_apart(request: StageRequest, area: JobArea) -> None:
    """Refuse a source that holds the target or lies in it."""
    source = os.path.realpath(request.source) + "/"
    target = os.path.realpath(area.path) + "/"
    published = f"{target}{request.name}/"
    if target.startswith(source) or source.startswith(published):
        raise InputError(
            f"source and target lie in one another; the target is {shown(published)}",
            field="source",
            value=request.source,
        )


@contextlib.contextmanager
def looking_at(request: StageRequest) -> Iterator[None]:
    """Turn what the system says of a source or target into an error of the request."""
    try:
        yield
    except OSError as error:
        raise as_told(request, error) from error


def as_told(request: StageRequest, error: BaseException) -> HpmlError:
    """Return the error that a caller of stage() is told."""
    if isinstance(error, (StagingError, InputError)):
        return error
    if not isinstance(error, OSError):
        return StagingError(f"cannot stage {request.name}: {error}")
    named = error.filename if isinstance(error.filename, (str, bytes)) else ""
    path = os.fsdecode(named) or request.source
    return StagingError(
        f"cannot stage {request.name} from {shown(request.source)}: {shown(path)}: {why(error)}",
        hint=UNREADABLE if isinstance(error, PermissionError) else "",
    )
