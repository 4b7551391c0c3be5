"""What the server shows: two pages, made by somebody else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

__all__ = ["Pages"]


class Pages(Protocol):
    """Gives the bodies of both pages; called in the server's only thread, so it must be quick."""

    def metrics(self, accept: str, names: Sequence[str] = (), *, gzip: bool) -> tuple[bytes, str]:
        """Return the body of /metrics and its content type.

        Args:
            accept: the header `Accept`.
            names: of the only series that are wanted; empty: all.
            gzip: compressed.
        """

    def health(self) -> tuple[bool, str]:
        """Return whether the exporter works, and one line that says so or what is wrong."""
