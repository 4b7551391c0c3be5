"""Everything that dies with the driver: the library, handles, readers, the event set."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hpml_exporters.gpu.devices import Place, discover
from hpml_exporters.gpu.events import Watch
from hpml_exporters.gpu.nvml import GpuLostError, Nvml
from hpml_exporters.gpu.processes import ProcessLists
from hpml_exporters.gpu.reader import Pace, Reader, Totals

__all__ = ["Session"]

BUDGET = 2.5e-3
"""CPU seconds per second that the readings of all GPUs may cost together."""
_TRIES = 5


def _roots(places: Sequence[Place]) -> Sequence[Place]:
    names = {one.uuid for one in places}
    return [one for one in places if one.parent not in names]


class Session:
    """An initialised driver and all readers on it.

    Attributes:
        readers: of the GPUs and instances that are shown and answer.
        places: all GPUs and instances that answer.
        shown: those of them that are shown.
        nameless: number of GPUs that did not even tell their name.
        dead: what told its name in the last look and nothing more, by UUID.
        watch: for XID errors.
        lists: of processes.
    """

    def __init__(self, interval: float, totals: dict[str, Totals]) -> None:
        """Initialise the driver.

        Args:
            interval: seconds between two readings.
            totals: what has come together, by UUID; it outlives this object.

        Raises:
            NotHereError: there is no driver.
            DriverLostError: it does not work.
        """
        self._nvml = Nvml()
        self._interval = interval
        self._totals = totals
        self.readers: list[Reader] = []
        self.places: Sequence[Place] = ()
        self.shown: Sequence[Place] = ()
        self.nameless = 0
        self.dead: dict[str, Place] = {}
        self.watch = Watch(self._nvml, ())
        self.lists = ProcessLists(self._nvml)
        self._devices: dict[int, Any] = {}
        self._spent = 0
        self._tries: dict[str, int] = {}

    @property
    def calls(self) -> int:
        """How many readings were made."""
        return self._spent + self.lists.calls + sum(one.calls for one in self.readers)

    @property
    def leaves(self) -> Sequence[Place]:
        """What processes can be on: instances, and GPUs that have none."""
        split = {one.parent for one in self.places}
        return [one for one in self.shown if one.uuid not in split]

    @property
    def roots(self) -> Sequence[Place]:
        """What is shown and can be lost by itself: GPUs, and instances whose GPU is not shown."""
        return _roots(self.shown)

    def discover(self, now: float, select: Callable[[Sequence[Place]], Sequence[Place]]) -> None:
        """Look which GPUs and instances there are, and keep readers of what is as it was.

        Args:
            now: seconds, monotonic.
            select: which are to be shown.

        Raises:
            DriverLostError: nothing answers.
        """
        before = [one.handle for one in self.shown]
        places, self.nameless = discover(self._nvml, self._devices)
        shown = select(places)
        wanted = {one.key for one in shown}
        kept: dict[object, Reader] = {}
        for reader in self.readers:
            if reader.place.key in wanted and not self._try_again(reader):
                kept[reader.place.key] = reader
            else:
                self._close(reader)
        pace = Pace(self._interval, BUDGET / max(1, len(shown)))
        self.readers = []
        bad: set[str] = set()
        for place in shown:
            try:
                self.readers.append(kept.get(place.key) or self._reader(place, pace, now))
            except GpuLostError:
                bad.add(place.parent or place.uuid)
        self.places, self.shown = places, shown
        self.dead = {one.uuid: one for one in _roots(shown) if {one.uuid, one.parent} & bad}
        for uuid in bad:
            self._take_out(uuid)
        if [one.handle for one in self.shown] != before:
            self._watch_again()

    def remove(self, uuid: str) -> None:
        """Take a GPU with all its instances out."""
        self._take_out(uuid)
        self._watch_again()

    def close(self) -> None:
        """Give everything back; it may block for as long as the driver is stuck."""
        self.watch.close()
        for reader in self.readers:
            self._close(reader)
        self.readers = []
        self._nvml.shutdown()

    def _try_again(self, reader: Reader) -> bool:
        """Whether another reader of the same GPU may find more; asking costs, so not for ever."""
        if not reader.unsure:
            return False
        tries = self._tries[reader.place.uuid] = self._tries.get(reader.place.uuid, 0) + 1
        return tries <= _TRIES

    def _reader(self, place: Place, pace: Pace, now: float) -> Reader:
        totals = self._totals.setdefault(place.uuid, Totals())
        return Reader(self._nvml, place, totals, pace, now)

    def _take_out(self, uuid: str) -> None:
        for reader in self.readers:
            if uuid in {reader.place.uuid, reader.place.parent}:
                self._close(reader)
                self._totals[reader.place.uuid].pause()
        self.readers = [one for one in self.readers if one.place.uuid != uuid != one.place.parent]
        self.places = [one for one in self.places if one.uuid != uuid != one.parent]
        self.shown = [one for one in self.shown if one.uuid != uuid != one.parent]

    def _close(self, reader: Reader) -> None:
        self._spent += reader.calls
        reader.close()

    def _watch_again(self) -> None:
        self.watch.close()
        self.watch = Watch(self._nvml, [one for one in self.shown if not one.parent])
