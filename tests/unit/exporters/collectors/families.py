"""Families as plain values, for assertions."""

from __future__ import annotations

from collections.abc import Sequence

from hpml_exporters.metric import Family

__all__ = ["values"]


def values(families: Sequence[Family]) -> dict[tuple[str, ...], float]:
    """Every series by name and label values; each one is there once."""
    found: dict[tuple[str, ...], float] = {}
    for one in families:
        for sample in one.samples:
            key = (one.spec.name, *sample.labels)
            assert key not in found, key
            assert len(sample.labels) == len(one.spec.labels), key
            assert isinstance(sample.value, int | float)
            found[key] = sample.value
    return found
