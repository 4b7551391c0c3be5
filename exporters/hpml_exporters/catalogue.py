"""Every metric that can be shown; `python -m hpml_exporters.catalogue` prints docs/metrics.md."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

from hpml_exporters.core import selfmetrics
from hpml_exporters.core.metric import MetricSpec
from hpml_exporters.gpu import figures as gpu
from hpml_exporters.jobs import metrics as jobs
from hpml_exporters.node import disks, health, infiniband, lustre, nfs, shm
from hpml_exporters.slurm import metrics as slurm
from hpml_exporters.training import metrics as training

SUBJECTS = {
    "GPUs": gpu.SPECS,
    "Jobs": jobs.SPECS,
    "Node": (*shm.SPECS, *disks.SPECS, *infiniband.SPECS, *nfs.SPECS, *lustre.SPECS, *health.SPECS),
    "Training": training.SPECS,
    "Slurm": slurm.SPECS,
    "The exporter itself": selfmetrics.SPECS,
}
"""Metrics by the headings of the documentation."""

ALL: tuple[MetricSpec, ...] = tuple(spec for specs in SUBJECTS.values() for spec in specs)

_HEAD = """\
# Metrics

Written by `make docs` from the descriptions that the exporters use; `hpml export metrics` prints
the same. How to get them: [Monitoring](monitoring.md).

Units are base units and part of the name. Counters end in `_total`: use `rate()` and `increase()`.
They count from the exporter's start unless the description differs. What identifies a thing
is in an `_info` metric, whose value is always 1: join it, as in
`hpml_gpu_power_watts * on (uuid) group_left (jobid) hpml_job_gpu_info{owner="1"}`. A value that
cannot be read now is absent, never 0. The exporter's own CPU time, memory and start are the
`process_*` metrics of Prometheus' client library.
"""


def page() -> str:
    """Return the page as Markdown."""
    lines = [_HEAD]
    for title, specs in SUBJECTS.items():
        lines += [f"## {title}", "", *_table(specs), ""]
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
