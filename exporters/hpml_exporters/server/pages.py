"""What the server shows: two pages, made by somebody else."""

from __future__ import annotations

from typing import Protocol

__all__ = ["Pages"]


class Pages(Protocol):
    """Gives the bodies of both pages; called in the server's only thread, so it must be quick."""

    def metrics(self, *, openmetrics: bool, gzip: bool) -> bytes:
        """Return the body of /metrics, from a cache where nothing changed.

        Args:
            openmetrics: OpenMetrics 1.0.0 instead of the text format 0.0.4.
            gzip: compressed.
        """

    def health(self) -> tuple[bool, str]:
        """Return whether the exporter works, and one line that says so or what is wrong."""
