"""Fixtures that the tests of this folder share; each is defined in a separate module."""

from __future__ import annotations

from tests.monitoring.browser_support import browser
from tests.monitoring.exporter_support import exporter
from tests.monitoring.gpu_support import gpu_collector
from tests.monitoring.gpusim_support import gpusim, gpusim_library
from tests.monitoring.prometheus_support import prometheus, promtool

__all__ = [
    "browser",
    "exporter",
    "gpu_collector",
    "gpusim",
    "gpusim_library",
    "prometheus",
    "promtool",
]
