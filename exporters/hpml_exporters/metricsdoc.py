"""The catalogue of metrics as a page: `python -m hpml_exporters.metricsdoc > docs/metrics.md`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from importlib import import_module

from hpml_exporters.metric import MetricSpec
from hpml_exporters.metrics import SUBJECTS

__all__ = ["page"]

_HEAD = """\
# Metrics

Made from the catalogue that the exporters themselves use (`hpml export metrics` prints it):
change a metric's description there, then run
`python -m hpml_exporters.metricsdoc > docs/metrics.md`. How to get them is told on the page
[Monitoring](monitoring.md).

Units are base units, and stand in the name. Counters end in `_total` and count from when the help
says, else from the exporter's start: use `rate()` and `increase()`. What identifies a thing stands
in an `_info` metric, whose value is always 1: join it, as in
`hpml_gpu_power_watts * on (uuid) group_left (jobid) hpml_job_gpu_info`. What cannot be read now
is not shown; it is never shown as 0.
"""

_TITLES = {
    "gpu": "GPUs",
    "job": "Jobs",
    "node": "Node",
    "train": "Training",
    "exporter": "The exporter itself",
}


def page() -> str:
    """Return the page as Markdown."""
    lines = [_HEAD]
    for subject in SUBJECTS:
        specs = import_module(f"hpml_exporters.metrics.{subject}").SPECS
        lines += [f"## {_TITLES[subject]}", "", *_table(specs), ""]
    return "\n".join(lines).rstrip("\n") + "\n"


def _table(specs: Iterable[MetricSpec]) -> Iterator[str]:
    yield "| metric | type | labels | meaning | source |"
    yield "|---|---|---|---|---|"
    for spec in specs:
        labels = " ".join(f"`{one}`" for one in spec.labels)
        cells = (f"`{spec.name}`", spec.type, labels, spec.help, spec.source)
        yield f"| {' | '.join(_cell(one) for one in cells)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    sys.stdout.write(page())
