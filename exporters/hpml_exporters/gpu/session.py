"""Everything that ends with the driver: the library, handles, readers, the event set."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hpml_exporters.gpu.devices import GpuDevice, GpuLostError, KnownGpu, Nvml, discover
from hpml_exporters.gpu.events import XidEvents
from hpml_exporters.gpu.jobs import processes_of
from hpml_exporters.gpu.reader import History, Reader


def _roots(devices: Sequence[GpuDevice]) -> Sequence[GpuDevice]:
    names = {device.uuid for device in devices}
    return [device for device in devices if device.parent not in names]


class Session:
    """An initialised driver and all readers on it.

    Attributes:
        driver: its version, empty if unknown.
        readers: of the GPUs and instances that are shown and answer.
        devices: all GPUs and instances that answer.
        shown: the devices to show.
        lost: devices that did not answer at the last `discover`.
        events: XID errors.
    """

    def __init__(self, interval: float, histories: dict[str, History], sys: str) -> None:
        """Initialise the driver.

        Args:
            interval: seconds between two readings.
            histories: by UUID; they outlive this object.
            sys: mount point of sysfs.

        Raises:
            NotHereError: no driver is installed.
            DriverLostError: it does not work.
        """
        self._nvml = Nvml()
        self._interval, self._histories, self._sys = interval, histories, sys
        self.driver = self._nvml.driver_version()
        self.readers: list[Reader] = []
        self.devices: Sequence[GpuDevice] = ()
        self.shown: Sequence[GpuDevice] = ()
        self.lost: list[GpuDevice] = []
        self.events = XidEvents(self._nvml, ())
        self._known: dict[int, KnownGpu] = {}

    @property
    def roots(self) -> Sequence[GpuDevice]:
        """The shown devices that can be lost alone: GPUs, and instances whose GPU is not shown."""
        return _roots(self.shown)

    def discover(self, select: Callable[[Sequence[GpuDevice]], Sequence[GpuDevice]]) -> None:
        """Find the GPUs and instances, keeping the readers of unchanged ones.

        Args:
            select: which ones to show.

        Raises:
            DriverLostError: nothing answers.
        """
        before = [device.handle for device in self.shown]
        devices, self.lost = discover(self._nvml, self._known, self._sys)
        shown = select(devices)
        wanted = {device.key for device in shown}
        # A new reader probes every source of its GPU: keep readers with a valid handle.
        kept = {reader.device.key: reader for reader in self.readers}
        for key in kept.keys() - wanted:
            kept.pop(key).close()
        self.readers = []
        bad: set[str] = set()
        for device in shown:
            try:
                self.readers.append(kept.get(device.key) or self._reader(device))
            except GpuLostError:
                bad.add(device.parent or device.uuid)
        self.devices, self.shown = devices, shown
        self.lost += [root for root in _roots(shown) if {root.uuid, root.parent} & bad]
        for uuid in bad:
            self._take_out(uuid)
        if [device.handle for device in self.shown] != before:
            self._register()

    def remove(self, uuid: str) -> None:
        """Remove a GPU with all its instances."""
        self._take_out(uuid)
        self._register()

    def processes(self, device: GpuDevice) -> dict[int, int | None] | None:
        """Return bytes of GPU memory by process id; None while the list cannot be read.

        Raises:
            DriverLostError: nothing answers.
        """
        try:
            return processes_of(self._nvml, device)
        except GpuLostError:  # left to the next reading, which finds it lost as well
            return None

    def close(self) -> None:
        """Release everything; blocks for as long as the driver is stuck."""
        self.events.close()
        for reader in self.readers:
            reader.close()
        self.readers = []
        self._nvml.shutdown()

    def _reader(self, device: GpuDevice) -> Reader:
        history = self._histories.setdefault(device.uuid, History(self._interval))
        return Reader(self._nvml, device, history)

    def _take_out(self, uuid: str) -> None:
        for reader in self.readers:
            if _belongs(reader.device, uuid):
                reader.close()
                # The history stays: if the GPU comes back, its totals continue where they were.
                reader.history.pause()
        self.readers = [each for each in self.readers if not _belongs(each.device, uuid)]
        self.devices = [each for each in self.devices if not _belongs(each, uuid)]
        self.shown = [each for each in self.shown if not _belongs(each, uuid)]

    def _register(self) -> None:
        self.events.close()
        self.events = XidEvents(self._nvml, [each for each in self.shown if not each.parent])


def _belongs(device: GpuDevice, uuid: str) -> bool:
    return uuid in {device.uuid, device.parent}
