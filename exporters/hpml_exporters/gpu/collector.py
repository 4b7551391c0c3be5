"""GPUs: nvitop finds them and their processes, NVML's cheapest calls read them every second."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client.core import Metric

from hpml_exporters.core.collector import DriverLostError, NotHereError
from hpml_exporters.core.metric import MetricSpec
from hpml_exporters.gpu.devices import Place
from hpml_exporters.gpu.events import XidLog
from hpml_exporters.gpu.families import identity, numbers
from hpml_exporters.gpu.jobs import Processes, job_families, process_families, resolve
from hpml_exporters.gpu.metrics import SPECS
from hpml_exporters.gpu.nvml import GpuLostError
from hpml_exporters.gpu.reader import Totals
from hpml_exporters.gpu.session import Session
from hpml_exporters.jobs.board import Jobs, JobsBoard
from hpml_exporters.options import Context

__all__ = ["GpuCollector", "make"]

LOOK_SECONDS = 30.0
"""Between two looks for GPUs and MIG instances that came or went."""
RETRY_SECONDS = (5.0, 300.0)
"""After a GPU was lost: the first attempt to find it again, and the longest wait between two."""
_SHUTDOWN_SECONDS = 2.0


@dataclass
class _Kept:
    """What an exporter has counted since it started, whichever collector did.

    Attributes:
        log: XID errors: what ended a driver is asked for after it was loaded again.
        totals: of each GPU, by UUID.
    """

    log: XidLog = field(default_factory=XidLog)
    totals: dict[str, Totals] = field(default_factory=dict)


_KEPT: weakref.WeakKeyDictionary[JobsBoard, _Kept] = weakref.WeakKeyDictionary()
"""By exporter, for which its board stands: a collector is made anew when the driver is lost."""


class GpuCollector:
    """The collector of all GPUs of the node, or of one job's.

    Attributes:
        name: of the switch and the label.
        interval: seconds between two samples.
        specs: all metrics it can return.
    """

    name = "gpu"
    specs: Sequence[MetricSpec] = SPECS

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
            look: seconds between two looks for GPUs.
            retry: first and longest wait, in seconds, before a lost GPU is looked for.
        """
        self.interval = context.options.gpu_interval
        self._context = context
        self._clock = clock
        self._look = look
        self._retry = retry
        self._wait = retry[0]
        self._lock = threading.Lock()
        self._closing = False
        self._session: Session | None = None
        self._known: dict[str, Place] = {}
        self._down: dict[str, Place] = {}
        self._restarted = float("-inf")
        kept = _KEPT.setdefault(context.jobs, _Kept())
        self._log, self._totals = kept.log, kept.totals
        for totals in self._totals.values():
            totals.pause()  # nobody saw what was between
        self._next_look = self._next_retry = self._next_processes = 0.0
        self._processes: Processes = {}
        self._jobs: Jobs | None = None
        self._job_families: list[Metric] = []

    @property
    def calls(self) -> int:
        """How many readings were made, each one call of the driver or two."""
        return 0 if self._session is None else self._session.calls

    def sample(self, now: float) -> list[Metric]:
        """Read all GPUs that answer.

        Args:
            now: monotonic seconds.

        Raises:
            NotHereError: no driver, no GPU, or no nvitop.
            DriverLostError: the driver went away.
        """
        with self._lock:
            if self._closing:
                raise DriverLostError("closed")
            try:
                return self._sample(now)
            except Exception:
                self._drop()
                raise
            finally:
                if self._closing:  # somebody gave up waiting for us
                    self._drop()

    def close(self) -> None:
        """Give everything back, without waiting for a driver that is stuck."""
        self._closing = True
        if not self._lock.acquire(timeout=0.1):
            return  # a reading is under way, in this moment or for ever; it cleans up itself
        # Giving back is a call too, and may be stuck: it must not hold up the one who asks for it.
        helper = threading.Thread(target=self._drop_and_release, daemon=True, name="gpu-close")
        helper.start()
        helper.join(_SHUTDOWN_SECONDS)

    def _drop_and_release(self) -> None:
        try:
            self._drop()
        finally:
            self._lock.release()

    def _drop(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def _sample(self, now: float) -> list[Metric]:
        session = self._current(now)
        for reader in tuple(session.readers):
            try:
                reader.read(now)
            except GpuLostError:
                self._lose(session, reader.place, now)
        session.watch.poll(self._log, self._clock())
        jobs = self._context.jobs.now
        if now >= self._next_processes:
            self._next_processes = now + self._context.options.process_interval
            self._processes = self._look_at_processes(session, now)
            self._jobs = None
        if jobs is not self._jobs:
            self._jobs = jobs
            self._job_families = self._of_jobs(session, jobs)
        shown = {one.uuid: one for one in (*session.shown, *self._down.values())}
        shown |= {one.parent: one for one in session.shown if one.parent}
        return [
            *identity(session.shown, self._down, session.nameless),
            *numbers(session.readers),
            *self._log.families(shown),
            *self._job_families,
        ]

    # Which GPUs ------------------------------------------------------------------------------

    def _current(self, now: float) -> Session:
        """Return the session, made anew or looked through again where it is time to."""
        session = self._session
        if session is not None and self._down and now >= self._next_retry:
            # A driver forgets that a GPU was lost only when nobody has it open any more.
            session.watch.poll(self._log, self._clock())
            self._drop()
            session = None
            self._wait = min(self._wait * 2, self._retry[1])
            self._restarted, self._next_retry = now, now + self._wait
        if session is None:
            session = self._session = Session(self._context.options.gpu_interval, self._totals)
            self._look_for_gpus(session, now)
            if not session.places and not self._down and not session.nameless:
                raise NotHereError("the NVIDIA driver has no GPU")
        elif now >= self._next_look:
            self._look_for_gpus(session, now)
        return session

    def _look_for_gpus(self, session: Session, now: float) -> None:
        self._next_look = now + self._look
        before = self._known
        session.discover(now, self._select)
        self._known = {one.uuid: one for one in session.roots}
        if before and not self._known and not session.nameless and not self._down:
            raise DriverLostError("the NVIDIA driver lists no GPU any more")
        self._take_down({**before, **session.dead}, now)
        self._jobs = None
        self._next_processes = now

    def _lose(self, session: Session, place: Place, now: float) -> None:
        """Take a GPU out; the others go on."""
        session.watch.poll(self._log, self._clock())
        before = self._known
        session.remove(place.parent or place.uuid)
        self._known = {one.uuid: one for one in session.roots}
        self._take_down(before, now)
        self._next_processes = now

    def _take_down(self, were: Mapping[str, Place], now: float) -> None:
        """Note which of these are missing, and when to look for them."""
        missing = {uuid: one for uuid, one in were.items() if uuid not in self._known}
        if missing.keys() - self._down.keys():
            if now - self._restarted > 2 * self._wait:  # else it is one that comes and goes
                self._wait = self._retry[0]
            self._next_retry = now + self._wait
        back = self._known.keys()
        self._down = {
            uuid: one for uuid, one in {**self._down, **missing}.items() if uuid not in back
        }

    def _select(self, places: Sequence[Place]) -> Sequence[Place]:
        """Return the GPUs that are shown: all, or those that the exporter's own job was given."""
        job = self._context.options.job
        if job is None or job.gpus is None:
            return places
        own, _ = resolve(job.gpus, places)
        return [one for one in places if one.uuid in own]

    # Whose -----------------------------------------------------------------------------------

    def _look_at_processes(self, session: Session, now: float) -> Processes:
        found = {}
        for place in session.leaves:
            try:
                found[place.uuid] = session.lists.of(place)
            except GpuLostError:
                self._lose(session, place, now)
        return found

    def _of_jobs(self, session: Session, jobs: Jobs) -> list[Metric]:
        options = self._context.options
        if not self._context.jobs.wait(0) and "jobs" not in options.without:
            return []  # nobody has said yet whose the processes are
        places = [*session.places, *self._down.values()]
        return [
            *process_families(self._processes, jobs),
            *job_families(jobs, places, self._processes, options.job),
        ]


def make(context: Context) -> GpuCollector:
    """Return the collector; nothing is loaded before its first sample."""
    return GpuCollector(context)
