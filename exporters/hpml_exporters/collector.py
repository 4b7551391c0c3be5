"""What every collector is: something with a name and a rhythm that reads and returns families."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from hpml_exporters.metric import Family, MetricSpec

__all__ = ["Collector", "DriverLostError", "NotHereError"]


class NotHereError(Exception):
    """There is nothing to read on this machine (now): no driver, no such file system.

    The collector shows no series and is no failure; the sampler asks again a minute later.
    """


class DriverLostError(Exception):
    """What was read is gone (a GPU off the bus, a driver reloaded): make the collector anew."""


class Collector(Protocol):
    """One source of metrics. Runs in a thread of its own, which may be stuck in a call.

    Attributes:
        name: of the switch (`--no-gpu`) and the label `collector`.
        interval: seconds between two samples.
        specs: all metrics it can ever return.
    """

    name: str
    interval: float
    specs: Sequence[MetricSpec]

    def sample(self, now: float) -> Sequence[Family]:
        """Read once and return all families as they are now.

        Args:
            now: time.monotonic() of this reading, seconds.

        Raises:
            NotHereError: there is nothing to read.
            DriverLostError: the collector has to be made anew.
            Exception: this reading failed; the families of the last one are dropped, the next
                reading is tried at its time.
        """

    def close(self) -> None:
        """Give back what was opened; may be called while a reading is stuck in another thread."""
