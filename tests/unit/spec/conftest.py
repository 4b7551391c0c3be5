"""What the tests of job files share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hpml_orchestrator.spec import ResolvedJob, load_job, parse_setting

Load = Callable[..., ResolvedJob]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Write a job file and load it, with settings as the command line gives them."""

    def write_and_load(text: str | bytes, *settings: str, name: str = "job.yaml") -> ResolvedJob:
        path = tmp_path / name
        path.write_bytes(text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text)
        return load_job(path, [parse_setting(setting) for setting in settings])

    return write_and_load
