"""Builds the dashboards from their code."""

from __future__ import annotations

import json
from pathlib import Path

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from hpml_dashboards.cluster import cluster
from hpml_dashboards.health import health
from hpml_dashboards.job import job
from hpml_dashboards.node import node
from hpml_dashboards.sweep import sweep
from hpml_dashboards.user import user
from hpml_orchestrator.records.files import write_text

__all__ = ["build", "write"]


def build() -> dict[str, str]:
    """Return the JSON text of each dashboard, by uid."""
    built = (made() for made in (cluster, health, job, node, sweep, user))
    texts = (json.dumps(one, cls=JSONEncoder, indent=1, sort_keys=True) for one in built)
    return {json.loads(text)["uid"]: f"{text}\n" for text in texts}


def write(directory: Path) -> list[Path]:
    """Write each dashboard as `<uid>.json` into a directory, which is made, and return the paths.

    Raises:
        RecordError: a file cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for uid, text in build().items():
        paths.append(directory / f"{uid}.json")
        write_text(paths[-1], text)
    return paths
