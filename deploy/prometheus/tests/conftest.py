"""A real Prometheus for its installer's own tests."""

from tests.monitoring.prometheus_support import prometheus, promtool

__all__ = ["prometheus", "promtool"]
