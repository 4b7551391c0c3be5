"""GPUs: nvitop finds them and their processes, NVML's cheapest calls read them every second."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from prometheus_client.core import Metric

from hpml_exporters.core.collector import DriverLostError, MetricSpec, NotHereError, Row
from hpml_exporters.gpu import figures as gpu
from hpml_exporters.gpu.devices import (
    GpuDevice,
    GpuLostError,
    KnownGpu,
    Nvml,
    discover,
    gpus_on_bus,
)
from hpml_exporters.gpu.events import XidEvents, XidLog
from hpml_exporters.gpu.figures import Series
from hpml_exporters.gpu.jobs import Processes, job_families, process_families, processes_of, resolve
from hpml_exporters.gpu.reader import History, Reader
from hpml_exporters.jobs.board import Jobs, JobsBoard
from hpml_exporters.options import Context

# Everything that ends with the driver: the library, handles, readers, the event set.


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
        """The shown devices that can be lost alone: GPUs, and instances of hidden GPUs."""
        return _roots(self.shown)

    def discover(self, select: Callable[[Sequence[GpuDevice]], Sequence[GpuDevice]]) -> None:
        """Find the GPUs and instances, keeping the readers of unchanged ones.

        Args:
            select: returns the devices to show.

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
        except GpuLostError:  # the next reading finds it lost as well
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


LOOK_SECONDS = 30.0
"""Between two searches for GPUs and MIG instances that came or went."""
RETRY_SECONDS = (5.0, 300.0)
"""After a GPU was lost: the first attempt to find it again, and the longest wait between two."""
BUDGET_SECONDS = 0.01
"""What one reading of all GPUs may cost, as a mean of ten, before readings become rarer."""
_WINDOW = 10
_RAREST = 16
_RAREST_SECONDS = 60.0
"""Between two readings; well below the longest gap over which rates are integrated."""
_SPECS = {spec.name: spec for spec in gpu.SPECS}

Values = Sequence[tuple[GpuDevice, Mapping[Series, float]]]
"""The latest numbers of each GPU and instance."""


@dataclass
class _CountsSinceStart:
    """Counts since the exporter's start; they outlive a collector.

    Attributes:
        log: XID errors; those from before a reload of the driver stay.
        histories: of each GPU, by UUID.
    """

    log: XidLog
    histories: dict[str, History] = field(default_factory=dict)


_COUNTS: weakref.WeakKeyDictionary[JobsBoard, _CountsSinceStart] = weakref.WeakKeyDictionary()
"""By exporter, identified by its board; it outlives a collector whose driver was lost."""


class _Pace:
    """Ticks between two readings; doubled when ten readings have exceeded their budget."""

    def __init__(self, interval: float) -> None:
        self._every = 1
        self._rarest = max(1, min(_RAREST, int(_RAREST_SECONDS / interval)))
        self._ticks = self._readings = 0
        self._spent = 0.0

    def due(self) -> bool:
        self._ticks += 1
        return self._ticks % self._every == 0

    def spend(self, seconds: float) -> None:
        self._spent += seconds
        self._readings += 1
        if self._readings < _WINDOW:
            return
        allowed = BUDGET_SECONDS * self._readings * self._every
        if self._spent > allowed:
            self._every = min(2 * self._every, self._rarest)
        # Speeding up doubles the cost per tick. From a quarter of the budget that ends at half of
        # it; from half it would end at the limit, and the pace would swing back and forth.
        elif self._spent < allowed / 4:
            self._every = max(1, self._every // 2)
        self._readings, self._spent = 0, 0.0


class GpuCollector:
    """The collector of all GPUs of the node, or of one job's.

    Attributes:
        name: of the option and the label.
        interval: seconds between two samples.
        specs: all metrics it can return.
    """

    name = "gpu"
    specs: Sequence[MetricSpec] = gpu.SPECS

    def __init__(
        self,
        context: Context,
        *,
        clock: Callable[[], float] = time.time,
        look: float = LOOK_SECONDS,
        retry: tuple[float, float] = RETRY_SECONDS,
    ) -> None:
        """Prepare; nothing is loaded before the first sample.

        Args:
            context: options and jobs.
            clock: gives Unix time, for the time of XID errors.
            look: seconds between two searches for GPUs.
            retry: first and longest wait, in seconds, before searching for a lost GPU.
        """
        self.interval = context.options.gpu_interval
        self._context = context
        self._clock = clock
        self._look = look
        self._retry = retry
        self._wait = retry[0]
        self._session: Session | None = None
        self._pace = _Pace(self.interval)
        self._known: dict[str, GpuDevice] = {}
        self._down: dict[str, GpuDevice] = {}
        self._used: set[str] = set()
        self._nameless = 0
        self._restarted = float("-inf")
        if context.jobs not in _COUNTS:
            options = context.options
            log = XidLog(options.roots if options.job is None else None)
            _COUNTS[context.jobs] = _CountsSinceStart(log)
        kept = _COUNTS[context.jobs]
        self._log, self._histories = kept.log, kept.histories
        for history in self._histories.values():
            history.pause()  # nothing was read in between
        self._next_look = self._next_retry = self._next_processes = 0.0
        self._processes: Processes = {}
        self._jobs: Jobs | None = None
        self._job_families: list[Metric] = []
        self._made: dict[str, tuple[list[Row], Metric]] = {}

    def sample(self, now: float) -> Iterable[Metric]:
        """Read all GPUs that answer.

        Args:
            now: monotonic seconds.

        Raises:
            NotHereError: no driver, no GPU, or no nvitop.
            DriverLostError: the driver went away.
        """
        try:
            return self._sample(now)
        except Exception:
            # After any error handles may be stale: the next sample opens a new session.
            self.close()
            raise

    def close(self) -> None:
        """Release all resources of the driver."""
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def _sample(self, now: float) -> Iterable[Metric]:
        if self._session is not None and not self._pace.due():
            return self._families(self._session)
        session = self._current(now)
        wall, cpu = time.perf_counter(), time.thread_time()
        lost: set[str] = set()
        for reader in tuple(session.readers):
            gpu_uuid = reader.device.parent or reader.device.uuid
            try:
                if gpu_uuid not in lost:  # else it was closed together with its GPU
                    reader.read(now)
            except GpuLostError:
                lost.add(gpu_uuid)
                self._lose(session, reader.device, now)
        # A sleeping call costs no CPU time but delays the others.
        self._pace.spend(time.thread_time() - cpu + (time.perf_counter() - wall) / 20)
        session.events.poll(self._log, self._clock())
        jobs = self._context.jobs.now
        if now >= self._next_processes:
            self._next_processes = now + self._context.options.process_interval
            leaves = _leaves(session.shown, session.devices)
            self._processes = {leaf.uuid: session.processes(leaf) for leaf in leaves}
            self._jobs = None
        # The board replaces its view as a whole, so identity is enough to see a change.
        if jobs is not self._jobs:
            self._jobs = jobs
            self._job_families = self._of_jobs(session, jobs)
        return self._families(session)

    # Which GPUs ------------------------------------------------------------------------------

    def _current(self, now: float) -> Session:
        session = self._session
        if session is not None and (self._down or self._nameless) and now >= self._next_retry:
            # The driver forgets that a GPU was lost only after every client has closed it. Fetch
            # pending XID errors first: they end with the session, and explain the loss. Each
            # attempt also interrupts the healthy GPUs, so the pauses grow.
            session.events.poll(self._log, self._clock())
            self.close()
            session = None
            self._wait = min(self._wait * 2, self._retry[1])
            self._restarted, self._next_retry = now, now + self._wait
        if session is None:
            session = self._open(now)
        elif now >= self._next_look:
            self._look_for_gpus(session, now)
        return session

    def _open(self, now: float) -> Session:
        options = self._context.options
        try:
            session = Session(options.gpu_interval, self._histories, options.roots.sys)
            self._session = session
            self._look_for_gpus(session, now)
            if not session.devices and not self._down and not self._nameless:
                raise NotHereError("the NVIDIA driver has no GPU")
        except NotHereError as error:
            if self._histories:  # the driver was unloaded while the exporter ran
                raise DriverLostError(f"{error}; GPUs were read before") from None
            present = gpus_on_bus(options.roots.sys)
            if present and options.job is None:  # a job may have no access to them
                raise DriverLostError(f"{error}; but there is a GPU at {present[0]}") from None
            raise
        return session

    def _look_for_gpus(self, session: Session, now: float) -> None:
        self._next_look = now + self._look
        before = self._known
        session.discover(lambda devices: self._select(session, devices))
        self._known = {device.uuid: device for device in session.roots}
        nameless = sum(not device.uuid for device in session.lost)
        if before and not self._known and not session.lost and not self._down:
            raise DriverLostError("the NVIDIA driver no longer lists a GPU")
        named = {device.uuid: device for device in session.lost if device.uuid}
        # A silent GPU's owner is unknown: a job counts only GPUs that have answered before.
        if self._context.options.job is not None:
            named = {uuid: device for uuid, device in named.items() if uuid in before}
        self._note_missing({**named, **before}, now)
        # NVML may list a GPU without a name that `_down` already holds by its UUID: count it once.
        fresh = max(0, nameless - len(self._down))
        if fresh > self._nameless and not self._down:
            self._next_retry = now + self._wait
        self._nameless = fresh
        self._jobs = None
        self._next_processes = now

    def _lose(self, session: Session, device: GpuDevice, now: float) -> None:
        session.events.poll(self._log, self._clock())
        before = self._known
        session.remove(device.parent or device.uuid)
        self._known = {device.uuid: device for device in session.roots}
        self._note_missing(before, now)
        self._next_processes = now

    def _note_missing(self, were: dict[str, GpuDevice], now: float) -> None:
        """Record which of these GPUs do not answer, and when to try again."""
        up = {device.pci for device in self._known.values() if device.pci}
        down: dict[str, GpuDevice] = {}
        for uuid, device in {**self._down, **were}.items():
            # A GPU that failed before its UUID was read is known by its PCI address. Forget that
            # entry once the same GPU appears with its UUID, or it would count as lost for ever.
            called_by_address = uuid == device.pci
            others = {other.pci for other in {**self._down, **were}.values() if other.uuid != uuid}
            if uuid in self._known or (called_by_address and uuid in up | others):
                continue
            down[uuid] = device
        if down.keys() - self._down.keys():
            # Start with short pauses again only if the GPU had been up for a while: one that comes
            # and goes would reopen the session, and interrupt all others, every few seconds.
            if now - self._restarted > 2 * self._wait:
                self._wait = self._retry[0]
            self._next_retry = now + self._wait
        self._down = down

    def _select(self, session: Session, devices: Sequence[GpuDevice]) -> Sequence[GpuDevice]:
        """Return the GPUs to show: all, or those of the exporter's own job.

        If the job's GPUs are unknown, return those on which it has had a process.
        """
        job = self._context.options.job
        if job is None:
            return devices
        if job.gpus is not None:
            own, _ = resolve(job.gpus, devices)
        else:
            jobs = self._context.jobs.now
            # Between two steps a job has no process: a GPU that it has used stays its own.
            self._used |= {
                leaf.uuid
                for leaf in _leaves(devices, devices)
                if any(jobs.job_of(pid) == job.jobid for pid in session.processes(leaf) or ())
            }
            own = list(self._used)
            # With an unknown allocation only processes show its GPUs, so search as often as they
            # are read.
            self._next_look = min(
                self._next_look,
                self._next_look - self._look + self._context.options.process_interval,
            )
        return [device for device in devices if device.uuid in own]

    # Families ------------------------------------------------------------------------------

    def _families(self, session: Session) -> Iterable[Metric]:
        """Return the current families; most are built when a scrape needs them."""
        shown = {device.uuid for device in (*session.shown, *self._down.values())}
        # XID errors are reported for the whole GPU, even if only its instances are shown.
        shown |= {device.parent for device in session.shown}
        identity = (spec.family(rows) for spec, rows in self._identity(session))
        others = [*self._log.families(shown), *self._job_families]
        # Copied, because the generator runs later, in the thread of a scrape, while the next
        # reading changes the originals. An exporter that nobody scrapes builds no families.
        values = [(each.device, dict(each.history.values)) for each in session.readers]
        return chain(identity, others, _numbers(values, self._made))

    def _identity(self, session: Session) -> list[tuple[MetricSpec, list[Row]]]:
        states = {
            reader.device.uuid: reader.up for reader in session.readers if not reader.device.parent
        }
        states |= dict.fromkeys(self._down, False)
        up = sum(states.values())
        counts: list[Row] = [(("up",), up), (("lost",), len(states) - up + self._nameless)]
        return [
            (gpu.INFO, [(one.info, 1) for one in (*session.shown, *self._down.values())]),
            (gpu.DRIVER, [((session.driver,), 1)] if session.driver else []),
            (gpu.UP, [((uuid,), float(state)) for uuid, state in states.items()]),
            (gpu.GPUS, counts),
        ]

    def _of_jobs(self, session: Session, jobs: Jobs) -> list[Metric]:
        options = self._context.options
        if not self._context.jobs.wait(0) and "jobs" not in options.without:
            return []  # the owners of processes are not known yet
        # A job that may use any GPU need not use all of them.
        unknown = options.job is not None and options.job.gpus is None
        there = session.shown if unknown else session.devices
        devices = [*there, *self._down.values()]
        return [
            *process_families(self._processes, jobs),
            *job_families(
                jobs, devices, self._processes, cluster=options.cluster, only=options.job
            ),
        ]


def _leaves(shown: Iterable[GpuDevice], devices: Iterable[GpuDevice]) -> list[GpuDevice]:
    split = {device.parent for device in devices}
    return [device for device in shown if device.uuid not in split]


def _numbers(values: Values, made: dict[str, tuple[list[Row], Metric]]) -> Iterator[Metric]:
    rows: dict[str, list[Row]] = {name: [] for name in _SPECS}
    for device, numbers in values:
        for (name, labels), number in numbers.items():
            rows[name].append(((device.uuid, *labels), number))
    rows[gpu.UTILIZATION.name] += _of_split(values)
    for name, samples in rows.items():
        if samples:
            # Most numbers have not changed since the last scrape, and families are costly.
            if name not in made or made[name][0] != samples:
                made[name] = samples, _SPECS[name].family(samples)
            yield made[name][1]


def _of_split(values: Values) -> list[Row]:
    """Return the utilization of each split GPU, computed from its instances.

    Slices that belong to no instance are idle. Compute instances of one GPU instance share it.
    """
    series = (gpu.UTILIZATION.name, ())
    found: list[Row] = []
    for parent in (device for device, _ in values if device.mig == "enabled"):
        busy: dict[int, float | None] = {}
        for device, numbers in values:
            if device.parent == parent.uuid:
                ratio, slices = numbers.get(series), device.slices
                busy[device.instance] = ratio * slices if slices and ratio is not None else None
        # One unknown instance makes the whole GPU unknown: a partial sum would be too low.
        known_busy = [value for value in busy.values() if value is not None]
        if parent.slices and len(known_busy) == len(busy):
            found.append(((parent.uuid,), min(sum(known_busy) / parent.slices, 1.0)))
    return found


def make(context: Context) -> GpuCollector:
    """Return the collector; nothing is loaded before its first sample."""
    return GpuCollector(context)
