"""What a collector is: something with a name and an interval that reads and returns families."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from prometheus_client.core import Metric

from hpml_exporters.core.metric import MetricSpec


class NotHereError(Exception):
    """There is nothing to read on this machine now: no driver, no such file system.

    The collector shows no series, which is not a failure; it is tried again a minute later.
    """


class DriverLostError(Exception):
    """The source is gone (a GPU off the bus, a driver reloaded): create the collector again."""


class StaleError(Exception):
    """This reading failed; keep showing the families of an earlier one."""

    def __init__(self, message: str, families: Iterable[Metric]) -> None:
        super().__init__(message)
        self.families = families


class Collector(Protocol):
    """One source of metrics. It reads in a separate thread, which may hang in a call.

    Attributes:
        name: of the switch (`--no-gpu`) and the label `collector`.
        interval: seconds between two readings.
        specs: all metrics it can ever return.
    """

    name: str
    interval: float
    specs: Sequence[MetricSpec]

    def sample(self, now: float) -> Iterable[Metric]:
        """Read once and return all families as they are now.

        A scrape iterates them once, when it first needs them, so a generator can put off expensive
        work until then. An error raised there counts as this reading's.

        Args:
            now: time.monotonic() of this reading, seconds.

        Raises:
            NotHereError: there is nothing to read.
            DriverLostError: the collector must be created again.
            StaleError: this reading failed; the families that it brings are shown.
            Exception: this reading failed; the families of the last one are dropped, the next
                reading is tried at its time.
        """

    def close(self) -> None:
        """Release what was opened; called by the reading thread."""
