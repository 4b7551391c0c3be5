"""A file server is asked by many threads at once, and no more often than allowed."""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from hpml_orchestrator.records.job import Stage
from hpml_orchestrator.staging.copy import CopyOptions
from hpml_orchestrator.staging.stage import CopyStager

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def leafy(tmp_path: Path) -> Path:
    """Give 60 directories of 5 files and one of 700, more than one thread looks at at once."""
    top = tmp_path / "leafy"
    for number in range(60):
        below = top / f"d{number % 6}" / f"e{number}"
        below.mkdir(parents=True)
        for other in range(5):
            (below / f"f{other}").write_bytes(b"%d" % other)
    (top / "d3" / "many").mkdir()
    for number in range(700):
        (top / "d3" / "many" / str(number)).touch()
    (top / "d3" / "link").symlink_to("many/3")
    return top


def test_a_slow_source_is_listed_by_many_threads(
    stager: CopyStager, leafy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tree and its digest are those that one thread makes."""
    by_one = stager.stage(Stage("one", str(leafy), target="shm"))
    threads: set[int] = set()
    for name, seconds in (("listdir", 0.01), ("lstat", 0.001)):
        real = getattr(os, name)

        def slow(path: Any, real: Any = real, seconds: float = seconds) -> Any:
            threads.add(threading.get_ident())
            time.sleep(seconds)
            return real(path)

        monkeypatch.setattr(os, name, slow)
    # FAKE: this machine's disk counts as a file server
    monkeypatch.setattr("hpml_orchestrator.staging.space.is_served_type", lambda _kind: True)
    by_many = stager.stage(Stage("many", str(leafy), target="local"))
    assert len(threads) > 8
    assert by_many.digest == by_one.digest != ""
    assert by_many.files == 1000


@pytest.mark.parametrize("threads", [1, 32])
def test_no_more_is_opened_than_allowed(stager: CopyStager, leafy: Path, threads: int) -> None:
    """2,068 looks and opens at 2,000 per second, two fifths of a second's at once."""
    stager.options = CopyOptions(processes=2, threads=threads, opens_per_second=2000)
    begin = time.monotonic()
    assert stager.stage(Stage("data", str(leafy), target="shm")).files == 1000
    assert time.monotonic() - begin > 0.6
