"""What data is staged from: one Source per kind, read by several workers at once.

The copier (`copy.py`) asks a source for its plan, forks its workers, and lets each of them open a
reader.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpml_orchestrator.staging.hashing import Buffer
    from hpml_orchestrator.staging.plan import Plan

__all__ = ["BLOCK_BYTES", "Reader", "Source"]

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

        A buffer is valid until the next one is asked for. Exactly the file's bytes come, or an
        error.

        Raises:
            SourceChangedError: the file is not what the plan says, before or after reading.
            OSError: it cannot be read.
        """

    def close(self) -> None:
        """Close what is open."""
