"""Signs of life through the attempt's directory, for steps that have no connection."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from hpml_orchestrator.errors import StagingError
from hpml_orchestrator.staging.request import StagingStopped

if TYPE_CHECKING:
    from hpml_orchestrator.staging.many.member import ChainPlace
    from hpml_orchestrator.staging.many.notices import Notices

__all__ = ["Pulse"]

_BEATS_PER_TIMEOUT = 6.0
_FIRST_PAUSE_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 1.0


class Pulse:
    """Tells that this node lives while it works, and waits for others as long as they do."""

    def __init__(self, notices: Notices, place: ChainPlace) -> None:
        self._notices = notices
        self._place = place
        self._next = 0.0
        self._beats = 0

    def beat(self) -> bool:
        """Give a sign of life a few times per timeout; returns whether to stop."""
        now = self._notices.clock()
        if now >= self._next:
            self._next = now + self._place.timeout / _BEATS_PER_TIMEOUT
            self._beats += 1
            self._notices.post(f"{self._place.index}.alive", beat=self._beats)
        return self._notices.should_stop()

    def wait(self, what: str, index: int) -> dict[str, Any]:
        """Return a notice of another node once it is there.

        Raises:
            StagingError: that node did not come, or shows no sign of life any more.
            StagingStopped: should_stop said so.
        """
        notices, place = self._notices, self._place
        patience, since = place.come_seconds, notices.clock()
        looked = since
        seen: dict[str, Any] | None = None
        pause = _FIRST_PAUSE_SECONDS
        while True:
            found = notices.read(what)
            if found is not None:
                return found
            if self.beat():
                raise StagingStopped
            beat = notices.read(f"{index}.alive")
            if beat != seen:
                seen, since, patience = beat, notices.clock(), 2 * place.timeout
            now = notices.clock()
            if now - looked > place.timeout:  # this process was stopped, and perhaps the whole job
                since += now - looked
            looked = now
            if now - since > patience:
                gone = "was lost: no sign of life" if seen else "did not come"
                raise StagingError(f"{place.called(index)} {gone} within {patience:.0f} s")
            time.sleep(pause)
            pause = min(_LONGEST_PAUSE_SECONDS, pause * 1.3)
