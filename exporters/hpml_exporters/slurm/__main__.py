"""`python -m hpml_exporters.slurm OPTIONS_JSON`: the Slurm exporter as a process."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from hpml_exporters.__main__ import program

if TYPE_CHECKING:
    from hpml_exporters.core.sampler import CollectorSource
    from hpml_exporters.options import NodeOptions


def _load(text: str) -> tuple[NodeOptions, list[CollectorSource]]:
    from hpml_exporters.slurm.options import SlurmOptions  # noqa: PLC0415 - signals first

    options = SlurmOptions(**json.loads(text))
    return options.server(), options.sources()


if __name__ == "__main__":
    program(_load)
