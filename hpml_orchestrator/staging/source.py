"""What data is staged from: one `Source` per kind, read by several workers at once.

The copier (`copy.py`) asks a source for its plan, forks its workers, and lets each of them open a
reader. A `Supply` brings the data of a request: this node reads the source, or others send it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpml_orchestrator.staging.copy import Copied
    from hpml_orchestrator.staging.faults import Retry
    from hpml_orchestrator.staging.hashing import Buffer
    from hpml_orchestrator.staging.plan import Plan
    from hpml_orchestrator.staging.progress import Progress

__all__ = ["BLOCK_BYTES", "Reader", "Source", "Supply"]

BLOCK_BYTES = 1 << 20
"""What is read, hashed and written at a time: larger blocks leave the cache of a core."""


class Source(Protocol):
    """Data of one kind at one place.

    Attributes:
        kind: "tree", "file", "tar", "zip" or "pack".
        ordered: it can only be read from front to back, as a compressed archive: `reader` is
            opened once, in one process, and its files are asked for in the order of the plan.
    """

    kind: str
    ordered: bool

    def plan(self) -> Plan:
        """Look at everything once and say what will be made; nothing is written.

        Raises:
            StagingError: something in it cannot be staged: names the first 20 paths and the count.
            OSError: the source itself cannot be read.
        """

    def reader(self, plan: Plan) -> Reader:
        """Open for reading; called in the worker, after the fork."""

    def close(self) -> None:
        """Close what is open; called once at the end, also after errors."""


class Reader(Protocol):
    """Reads the files of a plan; one per worker, called by several of its threads at once."""

    def read(self, number: int) -> Iterator[Buffer]:
        """Yield the bytes of `plan.files[number]`, at most BLOCK_BYTES at a time.

        A buffer is valid until the next but one is asked for. Exactly the file's bytes come, or an
        error.

        Raises:
            SourceChangedError: the file has changed since it was planned.
            OSError: it cannot be read.
        """

    def close(self) -> None:
        """Close what is open."""


class Supply(Protocol):
    """Brings the data of a request; all may raise StagingError and OSError but `fail`.

    Attributes:
        kind: the source's, as in the manifest.
        method: how the data comes: "copy", "unpack" or "chain".
    """

    @property
    def kind(self) -> str: ...  # noqa: D102 - see above

    @property
    def method(self) -> str: ...  # noqa: D102

    def plan(self) -> Plan:
        """Return what will be made; nothing is written, and the room is checked by it."""

    def fill(self, plan: Plan, partial_dir: str, *, retry: Retry, progress: Progress) -> Copied:
        """Make everything of the plan in an empty directory, which the caller removes on errors."""

    def reuse(self) -> None:
        """Do what other nodes need of this one, which has the data already; in place of `fill`."""

    def fail(self, reason: str, hint: str = "") -> None:
        """Give the other nodes the reason why this one ends."""

    def close(self) -> None:
        """Give back what it holds; may be called again, also after errors."""
