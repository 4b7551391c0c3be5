"""Collectors controlled by tests: stand-ins for faults that cannot be produced on a machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from hpml_exporters.core.collector import MetricSpec
from hpml_exporters.core.sampler import CollectorSource
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families


def spec_of(name: str) -> MetricSpec:
    """The gauge that a probe of that name shows."""
    return MetricSpec(f"hpml_{name}_level", "gauge", "The value given to a probe.", source="x")


def family(name: str, value: float) -> Metric:
    """The one series of a probe."""
    return spec_of(name).family([((), value)])


@dataclass
class Probe:
    """A collector that counts its calls, and asks `act` what to do in each of them."""

    name: str
    interval: float = 0.05
    act: Callable[[int], Iterable[Metric] | None] = lambda _: None
    specs: Sequence[MetricSpec] = ()
    times: list[float] = field(default_factory=list)
    made: int = 0
    closed: int = 0

    def sample(self, now: float) -> Iterable[Metric]:
        """Run the test's action; by default, return the number of the call."""
        self.times.append(now)
        found = self.act(len(self.times))
        return (family(self.name, len(self.times)),) if found is None else found

    def close(self) -> None:
        """Count it."""
        self.closed += 1

    def source(self) -> CollectorSource:
        """What makes this collector, again and again."""

        def make() -> Probe:
            self.made += 1
            return self

        return CollectorSource(self.name, make)


def figures(body: bytes) -> dict[str, float]:
    """Series as they are written -> values, of a body in the text format."""
    return {
        one.name + "".join(f"{{{k}={v}}}" for k, v in one.labels.items()): one.value
        for found in text_string_to_metric_families(body.decode())
        for one in found.samples
    }


class Turned:
    """A clock in the place of the module `time`, which a test puts forward.

    Attributes:
        ahead: seconds that it goes before the real one.
        still: the moment at which it is stopped; none: it runs.
    """

    def __init__(self, still: float | None = None) -> None:
        self.ahead = 0.0
        self.still = still

    def monotonic(self) -> float:
        """Seconds of this clock."""
        return (time.monotonic() if self.still is None else self.still) + self.ahead

    sleep = staticmethod(time.sleep)
    time = staticmethod(time.time)
