"""What the tests of this folder share: each part lives in a module of its own."""

from __future__ import annotations

from tests.monitoring.prometheus_support import prometheus, promtool

__all__ = ["prometheus", "promtool"]
