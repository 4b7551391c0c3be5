"""What the exporter says of itself, as families."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from hpml_exporters.metric import Family, MetricSpec, Sample
from hpml_exporters.metrics import exporter as specs
from hpml_exporters.slot import State
from hpml_orchestrator import __version__

if TYPE_CHECKING:
    from hpml_exporters.web.limits import Counters

__all__ = ["SelfMetrics"]

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class SelfMetrics:
    """Counts what nobody else counts, and tells it with the states of the collectors.

    Attributes:
        scrapes: answers with metrics so far.
        server: what the web server counts, if there is one.
    """

    def __init__(self) -> None:
        self.scrapes = 0
        self.server: Counters | None = None
        self._started = time.time()
        self._build = _one(specs.BUILD, 1, __version__, platform.python_version())

    def families(self, states: Iterable[tuple[str, State]]) -> list[Family]:
        """Return the exporter's own metrics.

        Args:
            states: names of all collectors, and how they do.
        """
        known = [((name,), one) for name, one in states if one.outcome != "new" or one.stuck]
        found = [
            Family(specs.UP, tuple(Sample(n, int(s.outcome != "failed")) for n, s in known)),
            Family(specs.PRESENT, tuple(Sample(n, int(s.outcome != "absent")) for n, s in known)),
            Family(specs.DURATION, tuple(Sample(n, s.duration) for n, s in known)),
            Family(
                specs.LAST_SUCCESS,
                tuple(Sample(n, s.last_success) for n, s in known if s.last_success),
            ),
            Family(specs.ERRORS, tuple(Sample(n, s.errors) for n, s in known)),
            Family(specs.STUCK, tuple(Sample(n, s.stuck_readings) for n, s in known)),
            Family(
                specs.SERIES,
                tuple(Sample(n, sum(len(f.samples) for f in s.families)) for n, s in known),
            ),
            _one(specs.CPU, time.process_time()),
            _one(specs.STARTED, self._started),
            _one(specs.SCRAPES, self.scrapes),
            self._build,
        ]
        resident = _resident_bytes()
        if resident is not None:
            found.append(_one(specs.MEMORY, resident))
        if self.server is not None:
            found += _server_families(self.server)
        return found


def _server_families(server: Counters) -> list[Family]:
    return [
        _one(specs.CONNECTIONS, server.connections),
        Family(
            specs.RESPONSES,
            tuple(Sample((str(code),), count) for code, count in server.responses.items()),
        ),
        Family(specs.CLOSED, tuple(Sample((why,), count) for why, count in server.closed.items())),
        _one(specs.RELOAD_FAILURES, server.reload_failures),
    ]


def _one(spec: MetricSpec, value: float, *labels: str) -> Family:
    return Family(spec, (Sample(labels, value),))


def _resident_bytes() -> int | None:
    """Return the process's memory in RAM; None where /proc is not there."""
    try:
        descriptor = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return int(os.read(descriptor, 256).split()[1]) * _PAGE_BYTES
    finally:
        os.close(descriptor)
