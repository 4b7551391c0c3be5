"""Sums of counters that come and go."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TypeAlias

from hpml_exporters.core.collector import MetricSpec, Row

Part: TypeAlias = tuple[tuple[str, ...], Hashable, Sequence[float]]
"""What one mount counted: labels of its sum, what identifies the mount, its counters by column."""


class Totals:
    """Sums the counters of several mounts; the sum does not fall when one is unmounted.

    A plain sum would fall then, which Prometheus takes for a reset: `rate()` would count all of the
    remaining mounts' traffic again.

    Args:
        columns: metric of each counter, and its labels after those of the sum.
    """

    def __init__(self, columns: Sequence[tuple[MetricSpec, tuple[str, ...]]]) -> None:
        self._columns = columns
        self._values: Mapping[Hashable, Sequence[float]] = {}
        self._totals: Mapping[tuple[str, ...], Sequence[float]] = {}

    def update(self, parts: Iterable[Part]) -> dict[MetricSpec, list[Row]]:
        """Add what the parts counted since the last call; returns the series.

        A source that is given twice counts once. A sum without a part is forgotten.
        """
        zero = [0.0] * len(self._columns)
        values: dict[Hashable, Sequence[float]] = {}
        totals: dict[tuple[str, ...], Sequence[float]] = {}
        for labels, source, now in parts:
            if source in values:
                continue
            values[source] = now
            total = totals.get(labels, self._totals.get(labels, zero))
            # A part that fell was mounted anew: all of its present count is growth.
            grown = zip(total, now, self._values.get(source, zero), strict=True)
            totals[labels] = [sum_ + (new - old if new >= old else new) for sum_, new, old in grown]
        self._values, self._totals = values, totals
        rows: dict[MetricSpec, list[Row]] = {}
        for labels, total in totals.items():
            for (spec, more), value in zip(self._columns, total, strict=True):
                rows.setdefault(spec, []).append(((*labels, *more), value))
        return rows
