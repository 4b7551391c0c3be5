"""Simulated GPUs for the simulator's own tests."""

from tests.monitoring.gpusim_support import gpusim, gpusim_library

__all__ = ["gpusim", "gpusim_library"]
