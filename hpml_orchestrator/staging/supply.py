"""Where the data of a request comes from: this node reads the source, or others send it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from hpml_orchestrator.staging.copy import Copied, CopyOptions, copy

if TYPE_CHECKING:
    from hpml_orchestrator.staging.faults import Retry
    from hpml_orchestrator.staging.plan import Plan
    from hpml_orchestrator.staging.progress import Progress
    from hpml_orchestrator.staging.source import Source

__all__ = ["LocalSupply", "Supply"]


class Supply(Protocol):
    """Brings the data of a request.

    Attributes:
        kind: the source's, as in the manifest.
        method: how the data comes: "copy", "unpack" or "chain".
    """

    @property
    def kind(self) -> str: ...  # noqa: D102 - see above

    @property
    def method(self) -> str: ...  # noqa: D102

    def plan(self) -> Plan:
        """Say what will be made; nothing is written, and the room is checked by it.

        Raises:
            StagingError, OSError: it cannot be staged.
        """

    def fill(self, plan: Plan, partial_dir: str, *, retry: Retry, progress: Progress) -> Copied:
        """Make everything of the plan in an empty directory.

        Raises:
            StagingError: something went wrong; the caller removes the directory.
            StagingStopped: retry's should_stop said so.
            OSError: the directory cannot be written.
        """

    def reuse(self) -> None:
        """Do what other nodes need of this one, which has the data already; in place of `fill`.

        Raises:
            StagingError: another node failed.
            StagingStopped: should_stop said so.
        """

    def fail(self, reason: str, hint: str = "") -> None:
        """Let other nodes know that this one ends, and why; raises nothing."""

    def close(self) -> None:
        """Give back what it holds; may be called again, also after errors."""


class LocalSupply:
    """This node reads the source by itself; it is looked at once."""

    def __init__(self, source: Source, options: CopyOptions | None = None) -> None:
        self._source = source
        self._options = options or CopyOptions()
        self._plan: Plan | None = None
        self._open = True
        self.kind = source.kind
        self.method = "copy" if source.kind in {"tree", "file"} else "unpack"

    def plan(self) -> Plan:
        """Return what was found in the source at the first call."""
        if self._plan is None:
            self._plan = self._source.plan()
        return self._plan

    def fill(self, plan: Plan, partial_dir: str, *, retry: Retry, progress: Progress) -> Copied:
        """Copy or unpack it."""
        options = self._options
        return copy(
            plan, self._source, partial_dir, options=options, retry=retry, progress=progress
        )

    def reuse(self) -> None:
        """Nobody else needs anything."""

    def fail(self, reason: str, hint: str = "") -> None:
        """Nobody else needs to know."""

    def close(self) -> None:
        """Close the source, once."""
        if self._open:
            self._open = False
            self._source.close()
