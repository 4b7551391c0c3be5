"""`/proc/PID/stat` is read whatever a process is called."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpml_orchestrator.records.process import read_stat


def test_this_process() -> None:
    """The kernel and Python agree on who we are."""
    stat = read_stat(os.getpid())
    assert stat is not None
    assert (stat.pid, stat.parent) == (os.getpid(), os.getppid())
    assert not stat.ended


@pytest.mark.parametrize("name", ["a b", "x) S 1 (y", "", "é"])
def test_names_do_not_mislead(tmp_path: Path, name: str) -> None:
    """A name may hold what separates fields."""
    (tmp_path / "7").mkdir()
    fields = " ".join(str(number) for number in range(4, 53))
    (tmp_path / "7" / "stat").write_text(f"7 ({name}) Z {fields}\n")
    stat = read_stat(7, str(tmp_path))
    assert stat is not None
    assert (stat.name, stat.parent) == (name, 4)
    assert (stat.cpu_ticks, stat.start_ticks, stat.ended) == (14 + 15, 22, True)
