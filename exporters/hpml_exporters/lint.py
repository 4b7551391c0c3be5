"""Rules for names, units, labels and words of metrics, checked on their descriptions.

Sources: https://prometheus.io/docs/practices/naming/ and the OpenMetrics specification, which
derives the names of series from the family's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from hpml_exporters.metric import MetricSpec
from hpml_exporters.render import family_name

__all__ = ["UNITS", "faults"]

UNITS = (
    "seconds", "bytes", "ratio", "joules", "watts", "celsius", "hertz", "volts", "amperes"
)  # fmt: skip
"""Base units; a plain number has none."""

_PREFIX = "hpml_"
_NAME = re.compile(r"hpml(_[a-z0-9]+)+")
_LABEL = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
_OTHER_UNITS = frozenset(
    "ms us ns milliseconds microseconds nanoseconds minutes hours days kilobytes megabytes "
    "gigabytes kb mb gb tb kib mib gib tib kbytes bits bps percent percentage mhz ghz khz "
    "megahertz kw mw milliwatts kilowatts millijoules wh kwh fahrenheit kelvin second byte".split()
)
_RESERVED = {
    "le": "is a histogram's own",
    "quantile": "is a summary's own",
    "job": "is Prometheus' own: say jobid",
    "instance": "is Prometheus' own: say node",
}
_TAKEN_ENDINGS = ("_bucket", "_sum", "_count", "_created")
_HELP_CHARS_MAX = 200


def faults(specs: Iterable[MetricSpec]) -> list[str]:
    """Return what is wrong with metrics' descriptions, a line each; nothing when all is well.

    >>> faults([MetricSpec("hpml_wait_ms", "gauge", "How long it waits.", source="a file")])
    ['hpml_wait_ms: ms is no base unit: seconds, bytes, ratio, joules, watts, celsius, hertz, …']
    """
    specs = list(specs)
    found = [f"{spec.name}: {fault}" for spec in specs for fault in _faults_of(spec)]
    return found + list(_clashes(specs))


def _faults_of(spec: MetricSpec) -> Iterator[str]:
    yield from _faults_of_name(spec)
    yield from _faults_of_labels(spec)
    yield from _faults_of_help(spec)
    if not spec.source:
        yield "its source is not told"


def _faults_of_name(spec: MetricSpec) -> Iterator[str]:
    if not _NAME.fullmatch(spec.name):
        yield f"is not {_PREFIX} and words of a-z and 0-9 joined by single _"
    for kind, ending in (("counter", "_total"), ("info", "_info")):
        if spec.name.endswith(ending) != (spec.type == kind):
            yield f"{ending} is the ending of a {kind}, and of nothing else"
    if spec.name.endswith(_TAKEN_ENDINGS):
        yield f"ends in one of {', '.join(_TAKEN_ENDINGS)}, which series of histograms do"
    stem = family_name(spec)
    for word in stem.split("_"):
        if word in _OTHER_UNITS:
            yield f"{word} is no base unit: {', '.join(UNITS[:7])}, …"
    yield from _faults_of_unit(spec, stem)


def _faults_of_unit(spec: MetricSpec, stem: str) -> Iterator[str]:
    if spec.unit and spec.unit not in UNITS:
        yield f"the unit {spec.unit} is none of {', '.join(UNITS)}"
    elif spec.unit and spec.type == "info":
        yield "identity has no unit"
    elif spec.unit and not stem.endswith(f"_{spec.unit}"):
        yield f"its unit {spec.unit} is not the last word of its name"
    elif not spec.unit and stem.rpartition("_")[2] in UNITS:
        yield f"its name says {stem.rpartition('_')[2]}, its unit does not"


def _faults_of_labels(spec: MetricSpec) -> Iterator[str]:
    for label in spec.labels:
        if label in _RESERVED:
            yield f"label {label} {_RESERVED[label]}"
        elif not _LABEL.fullmatch(label):
            yield f"label {label} is not words of a-z and 0-9 joined by single _"
    if len(set(spec.labels)) != len(spec.labels):
        yield "has a label twice"
    if spec.type == "info" and not spec.labels:
        yield "identity without labels says nothing"


def _faults_of_help(spec: MetricSpec) -> Iterator[str]:
    if not spec.help[:1].isupper() or not spec.help.endswith("."):
        yield "its help does not begin with a capital letter and end with a full stop"
    if re.search(r"[.!?]\s", spec.help) or "\n" in spec.help:
        yield "its help is more than one sentence"
    if len(spec.help) > _HELP_CHARS_MAX:
        yield f"its help is longer than {_HELP_CHARS_MAX} characters"


def _clashes(specs: Iterable[MetricSpec]) -> Iterator[str]:
    """Tell names of families or series that two metrics would share."""
    owners: dict[str, str] = {}
    for spec in specs:
        names = {spec.name, family_name(spec)}
        if spec.type == "histogram":
            names |= {spec.name + ending for ending in _TAKEN_ENDINGS}
        for name in sorted(names):
            if name in owners:
                yield f"{spec.name}: {name} is also of {owners[name]}"
                break
            owners[name] = spec.name
