"""What the collectors of one exporter share."""

from __future__ import annotations

from dataclasses import dataclass, field

from hpml_exporters.attribution.jobs import JobsBoard
from hpml_exporters.options import NodeOptions

__all__ = ["Context"]


@dataclass(frozen=True)
class Context:
    """Handed to `make(context) -> Collector` of every module in `hpml_exporters.collectors`.

    Attributes:
        options: what the exporter was told.
        jobs: the jobs of the node; the collector `jobs` posts, the others look.
    """

    options: NodeOptions
    jobs: JobsBoard = field(default_factory=JobsBoard)
