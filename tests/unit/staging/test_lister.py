"""Listing a tree: the same entries in the same order, by one thread and by many."""

from __future__ import annotations

import errno
import os
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from hpml_orchestrator.errors import StagingError
from hpml_orchestrator.staging import plan
from hpml_orchestrator.staging.faults import Retry
from hpml_orchestrator.staging.plan import scan_tree

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def leafy(tmp_path: Path) -> Path:
    """Give 60 directories of 5 files and one of 700, more than are looked at at once."""
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


def retry() -> Retry:
    return Retry(lambda _seconds: None, lambda: False)


def slow_metadata(monkeypatch: pytest.MonkeyPatch, seconds: float) -> set[int]:
    """Let a tree be served and slow to look at, and tell who looked."""
    monkeypatch.setattr(plan, "readers_for", lambda _path: 32)
    threads: set[int] = set()
    for name, pause in (("listdir", 10 * seconds), ("stat", seconds), ("lstat", seconds)):
        real = getattr(os, name)

        def slow(*words: Any, real: Any = real, pause: float = pause, **options: Any) -> Any:
            threads.add(threading.get_ident())
            time.sleep(pause)
            return real(*words, **options)

        monkeypatch.setattr(os, name, slow)
    return threads


def test_a_slow_source_is_listed_by_many_threads(
    leafy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan is the one that a single thread makes, order included."""
    fast = scan_tree(str(leafy), retry())
    threads = slow_metadata(monkeypatch, 0.001)
    slow = scan_tree(str(leafy), retry())
    assert len(threads) > 8
    assert slow == fast
    assert [entry.path for entry in fast.files][:2] == ["d0/e0/f0", "d0/e0/f1"]
    assert len(fast.files) == 1000


def test_faults_are_listed_by_path_from_many_threads(
    leafy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot be listed or looked at is told, in the order of the tree."""
    slow_metadata(monkeypatch, 0.001)
    listdir, lstat, stat = os.listdir, os.lstat, os.stat

    def closed(path: Any) -> list[str]:
        if str(path).endswith("e7"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return listdir(path)

    def gone(real: Any) -> Any:
        def look(path: Any, **options: Any) -> os.stat_result:
            if str(path).endswith("699"):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            return real(path, **options)  # type: ignore[no-any-return]

        return look

    monkeypatch.setattr(os, "listdir", closed)
    monkeypatch.setattr(os, "lstat", gone(lstat))
    monkeypatch.setattr(os, "stat", gone(stat))
    with pytest.raises(StagingError) as caught:
        scan_tree(str(leafy), retry())
    assert str(caught.value).splitlines()[1:] == [
        "  d1/e7/.: Permission denied",
        "  d3/many/699: No such file or directory",
    ]


@pytest.mark.parametrize("readers", [1, 32])
def test_no_more_entries_are_looked_at_than_allowed(
    leafy: Path, monkeypatch: pytest.MonkeyPatch, readers: int
) -> None:
    """A scan of a thousand files asks the file server as often as opening them does."""
    monkeypatch.setattr(plan, "readers_for", lambda _path: readers)
    begin = time.monotonic()
    assert len(scan_tree(str(leafy), retry(), rate=2000).files) == 1000
    assert time.monotonic() - begin > 0.2  # 1,068 entries, a fifth of a second's at once
