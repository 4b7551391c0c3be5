"""The supplies that bring a request's data to this node, and the keys that identify the data."""

from __future__ import annotations

import functools
import hashlib
import os
import stat
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from hpml_orchestrator.staging.archives import TarSource
from hpml_orchestrator.staging.copy import CopyOptions, copy
from hpml_orchestrator.staging.hashing import hashing
from hpml_orchestrator.staging.manifest import Listing, Manifest, tree_digest
from hpml_orchestrator.staging.request import kind_of
from hpml_orchestrator.staging.source import TreeSource
from hpml_orchestrator.staging.zips import ZipSource

if TYPE_CHECKING:
    from hpml_orchestrator.staging.faults import Retry
    from hpml_orchestrator.staging.plan import CopyPlan
    from hpml_orchestrator.staging.progress import CopyProgress
    from hpml_orchestrator.staging.request import StageRequest
    from hpml_orchestrator.staging.source import Source

_KEY_BYTES = 16

SOURCE_KEY = "source_key"
"""Among the options of a manifest: the source as it was when it was staged."""


def open_source(
    request: StageRequest, retry: Retry, most_bytes: int, *, opens_per_second: float = 0.0
) -> Source:
    """Return the source that a request names.

    Args:
        request: what to stage.
        retry: calls again after faults that pass.
        most_bytes: scanning an archive stops when it holds more.
        opens_per_second: most entries of a tree that are looked at per second; 0 for any.

    Raises:
        InputError: the source is not of the request's kind.
        StagingError: this node lacks what it takes to read it.
        OSError: the source cannot be looked at.
    """
    kind = retry(lambda: kind_of(request))
    path, outside_links = request.source, request.outside_links
    if kind in {"tree", "file"}:
        follow, rate = request.follow_links, opens_per_second
        links = {"outside_links": outside_links, "follow_links": follow}
        return TreeSource(path, retry, kind, rate=rate, **links)
    if kind == "zip":
        return ZipSource(path, retry, outside_links=outside_links)
    return TarSource(path, kind, retry, most_bytes=most_bytes, outside_links=outside_links)


class Supply(ABC):
    """Brings the data of a request to this node, from the source or through a chain.

    All methods but `fail` may raise StagingError and OSError.

    Attributes:
        request: what is staged.
        method: how the data comes: "copy", "unpack" or "chain".
        is_filled: whether `fill` brought the data, which have been published.
    """

    method: str

    def __init__(self, request: StageRequest) -> None:
        self.request = request
        self.is_filled = False

    @property
    @abstractmethod
    def kind(self) -> str:
        """The source's kind, as in the manifest."""

    @abstractmethod
    def plan(self) -> CopyPlan:
        """Return the plan of the copy; scan the source at the first call, and write nothing."""

    @abstractmethod
    def fill(
        self, plan: CopyPlan, partial_dir: str, *, retry: Retry, progress: CopyProgress
    ) -> list[bytes]:
        """Make all of the plan in an empty directory; return the digests of its files.

        The caller removes the directory on errors.
        """

    @abstractmethod
    def reuse(self) -> None:
        """Do what other nodes need from this one; called instead of `fill` if it has the data."""

    @abstractmethod
    def fail(self, reason: str, hint: str = "") -> None:
        """Give the other nodes the reason why this one ends."""

    @abstractmethod
    def close(self) -> None:
        """Release its resources; may be called several times, also after errors."""

    @property
    def is_collective(self) -> bool:
        """Whether the other nodes need this one, also if it has the data already."""
        return self.method == "chain"

    @functools.cached_property
    def source_key(self) -> str:
        """The key of the source as it was when this was first asked for; see `_key`."""
        return self._key()

    def entry_keys(self, *, hashed: bool) -> list[str]:
        """Return the keys of suitable entries; the last is the key of an entry to be made."""
        # A request without hashing is content with a copy that has digests.
        digests = (True,) if hashed else (True, False)
        return [self._key(f"hash={each}") for each in digests]

    def _key(self, *options: str) -> str:
        """Return the key of the source as it is now and of options, as 32 hexadecimal digits.

        It covers the real path and its status, the kind, and the plan's fingerprint; with
        `trust_mtime` only the status. Every Python has BLAKE2b: no name depends on it.
        """
        real = os.path.realpath(self.request.source)
        info = os.stat(real)
        digest = hashlib.blake2b(digest_size=_KEY_BYTES)

        def add(*values: object) -> None:
            for value in values:
                data = os.fsencode(value) if isinstance(value, str) else repr(value).encode()
                # Length first, so that two different lists of values never form the same bytes.
                digest.update(b"%d:" % len(data))
                digest.update(data)

        links = (self.request.outside_links, self.request.follow_links)
        add(real, self.kind, links, options)
        if not self.request.trust_mtime:
            digest.update(self.plan().fingerprint)
        if self.request.trust_mtime or not stat.S_ISDIR(info.st_mode):
            add(info.st_size, info.st_mtime_ns, info.st_ino)
        return digest.hexdigest()

    def is_source_of(self, manifest: Manifest) -> bool:
        """Return whether published data came from this source, or from a link to it."""
        same = os.path.realpath(manifest.source) == os.path.realpath(self.request.source)
        return same and manifest.kind == self.kind

    def manifest(self, digests: list[bytes]) -> Manifest:
        """Return the record of the copied data, with the digests of its files."""
        request, plan = self.request, self.plan()
        listing = Listing.of(plan, digests)
        return Manifest(
            request.name,
            request.source,
            self.kind,
            self.method,
            plan.bytes,
            plan.file_count,
            tree_digest(listing, hashing()),
            {SOURCE_KEY: self.source_key},
            listing,
        )


class LocalSupply(Supply):
    """This node reads the `source` by itself."""

    def __init__(
        self, request: StageRequest, source: Source, options: CopyOptions | None = None
    ) -> None:
        super().__init__(request)
        self.source = source
        self._options = options or CopyOptions()
        self._plan: CopyPlan | None = None
        self._open = True
        self.method = "copy" if source.kind in {"tree", "file"} else "unpack"

    @property
    def kind(self) -> str:
        """The source's kind."""
        return self.source.kind

    def plan(self) -> CopyPlan:
        """Scan the source at the first call; return the same plan later."""
        if self._plan is None:
            self._plan = self.source.plan()
        return self._plan

    def fill(
        self, plan: CopyPlan, partial_dir: str, *, retry: Retry, progress: CopyProgress
    ) -> list[bytes]:
        """Copy or unpack it."""
        options = self._options
        return copy(plan, self.source, partial_dir, options=options, retry=retry, progress=progress)

    def reuse(self) -> None:
        """No other node needs anything."""

    def fail(self, reason: str, hint: str = "") -> None:
        """No other node waits."""

    def close(self) -> None:
        """Close the source, once."""
        if self._open:
            self._open = False
            self.source.close()
