"""Let the site have the pages that lie outside of docs/, with links that hold in both places."""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
OUTSIDE = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "LICENSE",
    "training_jobs/README.md",
    "training_jobs/train.py",
    "deploy/devcluster/README.md",
    "deploy/gpusim/README.md",
    "deploy/prometheus/prometheus.yml",
    "deploy/README.md",
    "deploy/slurm/hpml-health.sh",
    "deploy/grafana/README.md",
    "deploy/prometheus/rules/hpml.yml",
    "deploy/prometheus/rules/hpml-alerts.yml",
    "deploy/prometheus/rules/optional/dcgm-exporter.yml",
    "deploy/prometheus/rules/optional/jobstats.yml",
    "exporters/README.md",
    "deploy/systemd/hpml-exporter-node.service",
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages outside of docs/ under their paths in the repository."""
    from mkdocs.structure.files import File  # noqa: PLC0415 - MkDocs alone runs this

    for path in OUTSIDE:
        files.append(File.generated(config, path, content=(ROOT / path).read_text("utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Turn links as they are in the repository into links between pages of the site.

    Fences lose the file's name behind their language, which the tests of the pages read: the site's
    Markdown would not take them for fences.
    """
    here = page.file.src_uri
    source = here if here in OUTSIDE else f"docs/{here}"

    def moved(found: re.Match[str]) -> str:
        path, mark, anchor = found[1].partition("#")
        if not path or re.match(r"[a-z]+:", path):
            return found[0]
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        target = target.removeprefix("docs/")
        return f"]({os.path.relpath(target, posixpath.dirname(here) or '.')}{mark}{anchor})"

    markdown = re.sub(r"^(```[a-z]+) .*$", r"\1", markdown, flags=re.MULTILINE)
    return re.sub(r"\]\(([^)\s]+)\)", moved, markdown)
