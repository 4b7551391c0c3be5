"""Families as text: Prometheus' format 0.0.4 and OpenMetrics 1.0.0.

The lines of the samples are the same in both; only what stands above them differs. What precedes a
number, `name{label="value"} `, is kept from one rendering to the next, for it rarely changes; what
a rendering did not use is forgotten, so that the memory is bounded by what is shown.

Grammars: https://prometheus.io/docs/instrumenting/exposition_formats/ and
https://github.com/prometheus/OpenMetrics/blob/main/specification/OpenMetrics.md
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from math import isfinite, isnan

from hpml_exporters.metric import Family, Histogram, MetricSpec, Sample

__all__ = ["Renderer", "family_name", "openmetrics", "text"]

_SUFFIX = {"counter": "_total", "info": "_info"}
_TEXT_TYPE = {"info": "gauge"}
_ESCAPES = str.maketrans({"\\": "\\\\", "\n": "\\n", '"': '\\"', "\0": "\ufffd"})
_TEXT_HELP_ESCAPES = str.maketrans({"\\": "\\\\", "\n": "\\n", "\0": "\ufffd"})

Labels = tuple[str, ...]
_Known = dict[Labels, str]
"""Labels' values -> what stands before the number; of a histogram the labels alone."""


def family_name(spec: MetricSpec) -> str:
    """Return the name of the family in OpenMetrics: without the suffix that its type brings."""
    return spec.name.removesuffix(_SUFFIX.get(spec.type, ""))


class Renderer:
    """Renders families, and remembers what stands before the numbers."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}
        self._lock = threading.Lock()

    @property
    def remembered(self) -> int:
        """How many series' names are kept."""
        return sum(map(len, self._known.values()))

    def text(self, families: Iterable[Family]) -> bytes:
        """Return the families in Prometheus' text format 0.0.4."""
        return self._rendered(families, _text_head, "")

    def openmetrics(self, families: Iterable[Family]) -> bytes:
        """Return the families in OpenMetrics 1.0.0."""
        return self._rendered(families, _openmetrics_head, "# EOF\n")

    def _rendered(
        self, families: Iterable[Family], head: Callable[[MetricSpec], str], end: str
    ) -> bytes:
        merged: dict[str, tuple[MetricSpec, list[Sequence[Sample]]]] = {}
        for family in families:
            merged.setdefault(family.spec.name, (family.spec, []))[1].append(family.samples)
        parts: list[str] = []
        used: dict[str, _Known] = {}
        with self._lock:
            for name, (spec, groups) in merged.items():
                lines: list[str] = []
                add = _add_histograms if spec.type == "histogram" else _add_numbers
                used[name] = add(spec, groups, self._known.get(name, {}), lines)
                if lines:
                    parts.append(head(spec))
                    parts += lines
            self._known = used
        parts.append(end)
        return "".join(parts).encode("utf-8", "replace")


def _add_numbers(
    spec: MetricSpec, groups: Iterable[Sequence[Sample]], known: _Known, lines: list[str]
) -> _Known:
    """Append the lines of all samples; returns what stands before their numbers."""
    used: _Known = {}
    rising = spec.type == "counter"
    for samples in groups:
        for labels, value in samples:
            if labels in used or isinstance(value, Histogram) or (rising and not value >= 0):
                continue  # a counter that is no number has no value: not shown
            before = known.get(labels)
            if before is None:
                pairs = _pairs(spec.labels, labels)
                before = f"{spec.name}{{{pairs}}} " if pairs else f"{spec.name} "
            used[labels] = before
            lines.append(before + _number(value) + "\n")
    return used


def _add_histograms(
    spec: MetricSpec, groups: Iterable[Sequence[Sample]], known: _Known, lines: list[str]
) -> _Known:
    used: _Known = {}
    name = spec.name
    for samples in groups:
        for labels, value in samples:
            if labels in used or not isinstance(value, Histogram) or not value.sum >= 0:
                continue
            pairs = known.get(labels)
            if pairs is None:
                pairs = _pairs(spec.labels, labels)
            used[labels] = pairs
            comma = pairs + "," if pairs else ""
            for bound, count in zip(value.bounds, value.counts, strict=True):
                lines.append(f'{name}_bucket{{{comma}le="{float(bound)!r}"}} {count}\n')
            alone = f"{{{pairs}}}" if pairs else ""
            lines.append(
                f'{name}_bucket{{{comma}le="+Inf"}} {value.total}\n'
                f"{name}_sum{alone} {_number(value.sum)}\n"
                f"{name}_count{alone} {value.total}\n"
            )
    return used


def _pairs(names: Sequence[str], values: Sequence[str]) -> str:
    """Return `a="b",c="d"`; a label with an empty value is to Prometheus one that is not there."""
    return ",".join(
        f'{name}="{_escaped(value)}"' for name, value in zip(names, values, strict=True) if value
    )


def _escaped(value: str) -> str:
    """Return a label's value as it is written; most of them as they are, which is quickly seen."""
    if "\\" in value or '"' in value or "\n" in value or "\0" in value:
        return value.translate(_ESCAPES)
    return value


def _number(value: float) -> str:
    """Return a number: whole ones exactly, others as short as they can be read back the same."""
    if isinstance(value, int):
        return repr(int(value))
    if isfinite(value):
        return float.__repr__(value)
    return "NaN" if isnan(value) else "+Inf" if value > 0 else "-Inf"


def _text_head(spec: MetricSpec) -> str:
    told = spec.help.translate(_TEXT_HELP_ESCAPES)
    return (
        f"# HELP {spec.name} {told}\n"
        f"# TYPE {spec.name} {_TEXT_TYPE.get(spec.type, spec.type)}\n"
    )  # fmt: skip


def _openmetrics_head(spec: MetricSpec) -> str:
    name = family_name(spec)
    unit = f"# UNIT {name} {spec.unit}\n" if spec.unit else ""
    return f"# TYPE {name} {spec.type}\n{unit}# HELP {name} {spec.help.translate(_ESCAPES)}\n"


_SHARED = Renderer()


def text(families: Iterable[Family]) -> bytes:
    """Return families in Prometheus' text format 0.0.4; those of one metric are merged.

    >>> spec = MetricSpec("hpml_x_seconds_total", "counter", "Seconds.", ("disk",), "seconds")
    >>> print(text([Family(spec, (Sample(("sda",), 1.5),))]).decode(), end="")
    # HELP hpml_x_seconds_total Seconds.
    # TYPE hpml_x_seconds_total counter
    hpml_x_seconds_total{disk="sda"} 1.5
    """
    return _SHARED.text(families)


def openmetrics(families: Iterable[Family]) -> bytes:
    """Return families in OpenMetrics 1.0.0; those of one metric are merged.

    >>> spec = MetricSpec("hpml_x_seconds_total", "counter", "Seconds.", ("disk",), "seconds")
    >>> print(openmetrics([Family(spec, (Sample(("sda",), 1.5),))]).decode(), end="")
    # TYPE hpml_x_seconds counter
    # UNIT hpml_x_seconds seconds
    # HELP hpml_x_seconds Seconds.
    hpml_x_seconds_total{disk="sda"} 1.5
    # EOF
    """
    return _SHARED.openmetrics(families)
