"""What the tests of this folder share: each part lives in a module of its own."""

from __future__ import annotations

from tests.monitoring.gpusim_support import gpusim, gpusim_library

__all__ = ["gpusim", "gpusim_library"]
