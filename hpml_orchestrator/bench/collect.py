"""Collect the results of a run of `hpml bench`, and remove files that killed nodes left."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from hpml_orchestrator.bench.results import Measurement, node_type, parse
from hpml_orchestrator.errors import HpmlError
from hpml_orchestrator.records.files import read_json

if TYPE_CHECKING:
    from hpml_orchestrator.site.model import Site

_CUT_OFF = {"reason": "the job ended before all was measured", "failed": True}


def collect(run: Path, rid: str, site: Site | None) -> tuple[list[Measurement], list[Path]]:
    """Return the measurements in order of the nodes' names, and the files that cannot be read.

    Args:
        run: the run's directory.
        rid: its id.
        site: the site profile, which names types of nodes.
    """
    found: list[Measurement] = []
    damaged: list[Path] = []
    for path in sorted((run / "bench").glob("*.json")):
        try:
            record = read_json(path)
            if not record.get("complete"):
                record.setdefault("missing", {})["measurement"] = _CUT_OFF
            found.append(parse({**record, "run": rid, "type": node_type(record, site)}))
        except (HpmlError, AttributeError, TypeError):
            damaged.append(path)
    return found, damaged


def clean_up(shared: Path, rid: str) -> None:
    """Remove what nodes that were killed left on the shared file system.

    Args:
        shared: the directory that was measured.
        rid: the run's id, which is part of the names of the nodes' files.
    """
    for path in shared.glob(f".hpml-bench-{rid}-*"):
        with contextlib.suppress(OSError):
            shutil.rmtree(path)
