"""Everything that dies with the driver: the library, handles, readers, the event set."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hpml_exporters.collectors.gpu_devices import Place, discover
from hpml_exporters.collectors.gpu_events import Watch
from hpml_exporters.collectors.gpu_nvml import GpuLostError, Nvml
from hpml_exporters.collectors.gpu_processes import ProcessLists
from hpml_exporters.collectors.gpu_reader import Pace, Reader, Totals

__all__ = ["Session"]

BUDGET = 2.5e-3
"""CPU seconds per second that the readings of all GPUs may cost together."""
_TRIES = 5


class Session:
    """An initialised driver and all readers on it.

    Attributes:
        readers: of the GPUs and instances that are shown and answer.
        places: all GPUs and instances that answer.
        shown: those of them that are shown.
        nameless: number of GPUs that did not even tell their name.
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
        """
        self._nvml = Nvml()
        self._interval = interval
        self._totals = totals
        self.readers: list[Reader] = []
        self.places: Sequence[Place] = ()
        self.shown: Sequence[Place] = ()
        self.nameless = 0
        self.watch = Watch(self._nvml, ())
        self.lists = ProcessLists(self._nvml)
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

    def discover(
        self, now: float, select: Callable[[Sequence[Place]], Sequence[Place]]
    ) -> Sequence[Place]:
        """Look which GPUs and instances there are, and keep readers of what is as it was.

        Args:
            now: seconds, monotonic.
            select: which are to be shown.

        Returns:
            Those that were listed but did not answer.

        Raises:
            DriverLostError: nothing answers.
        """
        places, self.nameless = discover(self._nvml)
        shown = select(places)
        wanted = {one.key for one in shown}
        kept = {
            one.place.key: one for one in self.readers if one.place.key in wanted and not one.unsure
        }
        for reader in self.readers:
            if reader.place.key not in kept:
                self._close(reader)
        before = [one.handle for one in self.shown]
        pace = Pace(self._interval, BUDGET / max(1, len(shown)))
        lost: list[Place] = []
        self.readers = []
        for place in shown:
            if place.key in kept:
                self.readers.append(kept[place.key])
                continue
            totals = self._totals.setdefault(place.uuid, Totals())
            try:
                self.readers.append(Reader(self._nvml, place, totals, pace, now))
            except GpuLostError:
                lost.append(place)
        bad = {one.uuid for one in lost}
        self.places = [one for one in places if not {one.uuid, one.parent} & bad]
        self.shown = [one for one in shown if not {one.uuid, one.parent} & bad]
        if [one.handle for one in self.shown] != before:
            self._watch_again()
        return [one for one in lost if not one.parent]

    def remove(self, uuid: str) -> Sequence[Place]:
        """Take a GPU with all its instances out, and return what was taken out."""
        gone = [one for one in self.places if uuid in {one.uuid, one.parent}]
        names = {one.uuid for one in gone}
        for reader in self.readers:
            if reader.place.uuid in names:
                self._close(reader)
                self._totals[reader.place.uuid].pause()
        self.readers = [one for one in self.readers if one.place.uuid not in names]
        self.places = [one for one in self.places if one.uuid not in names]
        self.shown = [one for one in self.shown if one.uuid not in names]
        self._watch_again()
        return gone

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

    def _close(self, reader: Reader) -> None:
        self._spent += reader.calls
        reader.close()

    def _watch_again(self) -> None:
        self.watch.close()
        self.watch = Watch(self._nvml, [one for one in self.shown if not one.parent])
