"""The state of a request while it is staged, and the keys by which its data is found again."""

from __future__ import annotations

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
    from hpml_orchestrator.staging.area import JobArea
    from hpml_orchestrator.staging.copy import Copied
    from hpml_orchestrator.staging.plan import Plan
    from hpml_orchestrator.staging.request import StageRequest
    from hpml_orchestrator.staging.source import Supply

__all__ = ["SOURCE_KEY", "Work", "check_apart", "request_error"]

_KEY_BYTES = 16

SOURCE_KEY = "source_key"
"""Among the options of a manifest: the source as it was when it was staged."""


@dataclass
class Work:
    """The state of a request while it is staged.

    Attributes:
        copied: the result of the copy; None if nothing was copied.
        evicted: sources of the kept data that was removed to make room.
    """

    request: StageRequest
    supply: Supply
    area: JobArea
    copied: Copied | None = None
    evicted: list[str] = field(default_factory=list)
    _source_key: str = ""

    @functools.cached_property
    def plan(self) -> Plan:
        """What will be made; the source is looked at once."""
        return self.supply.plan()

    @property
    def is_collective(self) -> bool:
        """Whether the other nodes need this one, also if it has the data already."""
        return self.supply.method == "chain"

    def source_key(self) -> str:
        """Return the key of the source as it was at the first call."""
        if not self._source_key:
            self._source_key = self.key()
        return self._source_key

    def key(self, *options: str) -> str:
        """Return the key of the source as it is now and of options, as 32 hexadecimal digits.

        It covers the real path and its status, the kind, and names, sizes, times, modes and links
        of everything in the plan; with `trust_mtime` only the status. BLAKE2b, which every Python
        has: the name must not depend on the interpreter.

        Raises:
            OSError: the source cannot be looked at.
        """
        real = os.path.realpath(self.request.source)
        info = os.stat(real)
        digest = hashlib.blake2b(digest_size=_KEY_BYTES)

        def add(*values: object) -> None:
            for value in values:
                data = os.fsencode(value) if isinstance(value, str) else repr(value).encode()
                digest.update(b"%d:" % len(data))
                digest.update(data)

        add(real, self.supply.kind, sorted(options))
        if not self.request.trust_mtime:
            digest.update(self.plan.fingerprint)
        if self.request.trust_mtime or not stat.S_ISDIR(info.st_mode):
            add(info.st_size, info.st_mtime_ns, info.st_ino)
        return digest.hexdigest()

    def entry_keys(self, *, hashed: bool) -> list[str]:
        """Return the keys of entries that serve; that of an entry made for this one is last."""
        outside_links = f"outside_links={self.request.outside_links}"
        digests = (True,) if hashed else (True, False)
        return [self.key(outside_links, f"hash={each}") for each in digests]

    def is_source_of(self, manifest: Manifest) -> bool:
        """Return whether published data came from this source; a link to it is the same."""
        same = os.path.realpath(manifest.source) == os.path.realpath(self.request.source)
        return same and manifest.kind == self.supply.kind

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


def check_apart(request: StageRequest, area: JobArea) -> None:
    """Refuse a source that contains the target, or is in it."""
    source = os.path.realpath(request.source) + "/"
    target = os.path.realpath(area.path) + "/"
    published = f"{target}{request.name}/"
    if target.startswith(source) or source.startswith(published):
        raise InputError(
            f"one of source and target contains the other; the target is {shown(published)}",
            field="source",
            value=request.source,
        )


def request_error(request: StageRequest, error: BaseException) -> HpmlError:
    """Return the error of a request that an error of the system, or of a record, becomes."""
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
