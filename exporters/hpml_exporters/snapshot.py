"""What all collectors read last, as one immutable thing that is rendered at most once per form."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterable

from hpml_exporters.metric import Family
from hpml_exporters.render import Renderer

__all__ = ["Snapshot"]

_GZIP = 16 + zlib.MAX_WBITS
_LEVEL = 1
"""Least work: the answer travels once, and is a tenth of its size already."""


class Snapshot:
    """The families of all collectors at one moment.

    Attributes:
        families: of all collectors.
        time: when they were put together, seconds since the epoch.
        monotonic: the same by time.monotonic().
    """

    def __init__(
        self,
        families: Iterable[Family],
        *,
        time: float,
        monotonic: float,
        renderer: Renderer | None = None,
    ) -> None:
        self.families = tuple(families)
        self.time = time
        self.monotonic = monotonic
        self._renderer = renderer or Renderer()
        self._lock = threading.Lock()
        self._bodies: dict[tuple[bool, bool], bytes] = {}

    def body(self, *, openmetrics: bool = False, gzip: bool = False) -> bytes:
        """Return the families as an answer's body.

        Who asks first renders; who asks meanwhile waits for that, and nobody does it again.

        Args:
            openmetrics: in OpenMetrics 1.0.0, else in text 0.0.4.
            gzip: compressed.
        """
        with self._lock:
            return self._body(openmetrics, gzip)

    def _body(self, openmetrics: bool, gzip: bool) -> bytes:
        known = self._bodies.get((openmetrics, gzip))
        if known is None:
            if gzip:
                packer = zlib.compressobj(_LEVEL, zlib.DEFLATED, _GZIP)
                known = packer.compress(self._body(openmetrics, False)) + packer.flush()
            elif openmetrics:
                known = self._renderer.openmetrics(self.families)
            else:
                known = self._renderer.text(self.families)
            self._bodies[openmetrics, gzip] = known
        return known
