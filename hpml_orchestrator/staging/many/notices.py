"""Small files by which the nodes of a job find each other, in `attempts/<n>/chain/`.

They appear by rename and are readable by the job's user alone; nothing is locked. While the first
node chooses how the data comes to all, it gives signs of life here as well.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpml_orchestrator.errors import NotFoundError, RecordError, StagingError
from hpml_orchestrator.records.files import read_text, write_text
from hpml_orchestrator.staging.request import StagingStopped

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Notices", "Place", "reason_of"]

_BEATS_PER_TIMEOUT = 6.0
_FIRST_PAUSE_SECONDS = 0.02
_LONGEST_PAUSE_SECONDS = 1.0


def reason_of(error: BaseException) -> str:
    """Return why a node ends, as the others are told."""
    if isinstance(error, StagingStopped):
        return "was told to stop"
    return str(error) or type(error).__name__


@dataclass(frozen=True)
class Place:
    """Where a node stands among those of the job.

    Attributes:
        index: 0 reads the source.
        nodes: how many there are.
        node: this node's name.
        names: of all nodes, in order; empty when not known.
        interfaces: network interfaces to use, the best first.
        timeout: seconds of silence after which a node counts as hung.
        join_seconds: within how long a neighbour that has come must be reached.
        come_seconds: how long nodes wait for one another to come.
    """

    index: int
    nodes: int
    node: str
    names: Sequence[str] = ()
    interfaces: Sequence[str] = ()
    timeout: float = 30.0
    join_seconds: float = 300.0
    come_seconds: float = 300.0

    def called(self, index: int) -> str:
        """Return what to call a node before it said its name."""
        return self.names[index] if index < len(self.names) else f"node {index} of {self.nodes}"


class Notices:
    """The files of one staged name: `{attempt}/chain/{name}.{what}`.

    Args:
        attempt: the attempt's directory, on the shared file system.
        name: what is staged.
        place: where this node stands.
        should_stop: True ends waiting with StagingStopped.
    """

    def __init__(
        self,
        attempt: str,
        name: str,
        place: Place,
        *,
        should_stop: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.directory = os.path.join(attempt, "chain")
        self._name = name
        self.place = place
        self.should_stop = should_stop
        self.clock = clock
        self._beat_at = 0.0
        self._beats = 0

    def post(self, what: str, **record: object) -> None:
        """Publish a record.

        Raises:
            RecordError: the attempt's directory cannot be written.
        """
        try:
            os.makedirs(self.directory, mode=0o700, exist_ok=True)
        except OSError as error:
            raise RecordError(f"cannot write {self.directory}: {error.strerror}") from error
        write_text(self._path(what), json.dumps(record), mode=0o600)

    def read(self, what: str) -> dict[str, Any] | None:
        """Return a record; None while there is none."""
        with contextlib.suppress(OSError):
            # NFS keeps "there is no such file" for up to a minute, until the directory is opened.
            os.close(os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        try:
            found = json.loads(read_text(self._path(what)))
        except (NotFoundError, RecordError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def beat(self) -> bool:
        """Give the first node's sign of life a few times per timeout; return whether to stop."""
        now = self.clock()
        if now >= self._beat_at:
            self._beat_at = now + self.place.timeout / _BEATS_PER_TIMEOUT
            self._beats += 1
            self.post("0.alive", beat=self._beats)
        return self.should_stop()

    def wait(self, what: str, *, beats: bool = True) -> dict[str, Any]:
        """Return a record of the first node once it is there.

        Args:
            what: names the record.
            beats: the first node gives signs of life in the meantime.

        Raises:
            StagingError: the first node did not come, or shows no sign of life any more.
            StagingStopped: should_stop said so.
        """
        place = self.place
        patience, since = place.come_seconds, self.clock()
        looked = since
        seen: dict[str, Any] | None = None
        pause = _FIRST_PAUSE_SECONDS
        while True:
            found = self.read(what)
            if found is not None:
                return found
            if self.should_stop():
                raise StagingStopped
            beat = self.read("0.alive") if beats else None
            if beat != seen:
                seen, since, patience = beat, self.clock(), 2 * place.timeout
            now = self.clock()
            if now - looked > place.timeout:  # this process was stopped, and perhaps the whole job
                since += now - looked
            looked = now
            if now - since > patience:
                gone = "was lost: no sign of life" if seen else "did not come"
                raise StagingError(f"{place.called(0)} {gone} within {patience:.0f} s")
            time.sleep(pause)
            pause = min(_LONGEST_PAUSE_SECONDS, pause * 1.3)

    def hear(self, what: str, *, beats: bool = True) -> dict[str, Any]:
        """Return a record of the first node, once it is there; see `wait`.

        Raises:
            StagingError: as `wait`, or the first node says why it ends.
            StagingStopped: should_stop said so.
        """
        found = self.wait(what, beats=beats)
        if "error" in found:
            raise StagingError(str(found["error"]), hint=str(found.get("hint", "")))
        return found

    def refuse(self, error: BaseException, what: str) -> None:
        """Let all who wait for a record of this node know why it ends."""
        told = {"error": f"{self.place.node}: {reason_of(error)}"}
        self.post(what, **told, hint=str(getattr(error, "hint", "")))

    def remove(self, *whats: str) -> None:
        """Take records away; not the directory, where another node may be about to post one."""
        for what in whats:
            with contextlib.suppress(OSError):
                os.unlink(self._path(what))

    def _path(self, what: str) -> str:
        return os.path.join(self.directory, f"{self._name}.{what}")
