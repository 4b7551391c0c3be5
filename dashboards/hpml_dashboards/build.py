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
from hpml_dashboards.usage import usage
from hpml_dashboards.user import user
from hpml_orchestrator.errors import InputError
from hpml_orchestrator.records.files import write_text


def build() -> dict[str, str]:
    """Return the JSON text of each dashboard, by uid."""
    built = (made() for made in (cluster, health, job, node, sweep, usage, user))
    texts = (json.dumps(one, cls=JSONEncoder, indent=1, sort_keys=True) for one in built)
    return {json.loads(text)["uid"]: f"{text}\n" for text in texts}


def write(directory: Path, *, overwrite: bool) -> list[Path]:
    """Write each dashboard as `<uid>.json` into a directory and return the paths.

    Args:
        directory: of the files, created if necessary.
        overwrite: whether to replace files with other content.

    Raises:
        InputError: there are files with other content; nothing was written.
        RecordError: a file cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    texts = {directory / f"{uid}.json": text for uid, text in build().items()}
    # Compare all files before writing the first, so that a refusal changes nothing.
    for path, text in texts.items():
        if not overwrite and path.exists() and path.read_text("utf-8") != text:
            message = "is there already and differs from what would be written"
            raise InputError(message, field="--output", value=path, hint="--overwrite replaces it")
    for path, text in texts.items():
        write_text(path, text)
    return list(texts)
