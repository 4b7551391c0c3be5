"""What the tests of job files and site profiles share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hpml_orchestrator.jobfile.load import parse_setting
from hpml_orchestrator.runs.load import ResolvedJob, load_job
from hpml_orchestrator.site.model import ResolvedSite, load_site

Load = Callable[..., ResolvedJob]
LoadSite = Callable[..., ResolvedSite]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Write a job file and load it, with settings as the command line gives them."""

    def write_and_load(
        text: str | bytes, *settings: str, name: str = "job.yaml", site: ResolvedSite | None = None
    ) -> ResolvedJob:
        path = tmp_path / name
        path.write_bytes(text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text)
        return load_job(path, [parse_setting(setting) for setting in settings], site)

    return write_and_load


@pytest.fixture
def site(tmp_path: Path) -> LoadSite:
    """Write site profiles to the directories `0`, `1`, …, and load them."""

    def write_and_load(*texts: str) -> ResolvedSite:
        paths = [tmp_path / str(number) / "hpml.toml" for number in range(len(texts))]
        for path, text in zip(paths, texts, strict=True):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, "utf-8")
        return load_site(paths)

    return write_and_load
