"""Families as plain values, for assertions."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client.core import Metric


def values(families: Sequence[Metric]) -> dict[tuple[str, ...], float]:
    """Every series by name and label values; each one is there once."""
    found: dict[tuple[str, ...], float] = {}
    for one in families:
        for sample in one.samples:
            key = (sample.name, *sample.labels.values())
            assert key not in found, key
            found[key] = sample.value
    return found
