"""Files by which nodes find each other, and give signs of life."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from hpml_orchestrator.errors import StagingError
from hpml_orchestrator.staging.member import Notices, Place

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def test_a_node_can_post_while_others_take_their_notices_away(root: Path) -> None:
    """One node begins with the next data while the last of the others ends with these."""
    done = threading.Event()

    def come_and_go() -> None:
        other = Notices(str(root), "a", Place(1, 2, "n1"), should_stop=lambda: False)
        while not done.is_set():
            other.post("1", port=1)
            other.remove("1")

    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        first = Notices(str(root), "b", Place(0, 2, "n0"), should_stop=lambda: False)
        for _ in range(500):
            first.post("secret", beat=1)
            assert first.read("secret") is not None
            first.remove("secret")
    finally:
        done.set()
        thread.join()


def waited(root: Path, monkeypatch: pytest.MonkeyPatch, pauses: Iterator[float]) -> str:
    """Wait for a node that lived once, with so much time between looks; it ends with its word."""
    now = [0.0]
    other = Notices(str(root), "a", Place(0, 2, "n0"), should_stop=lambda: False)
    other.beat()

    def sleep(_seconds: float) -> None:
        pause = next(pauses, 0.0)
        now[0] += pause
        if not pause:
            other.post("choice", method="chain")

    monkeypatch.setattr("hpml_orchestrator.staging.member.time.sleep", sleep)
    place = Place(1, 2, "n1", timeout=5.0)
    mine = Notices(str(root), "a", place, should_stop=lambda: False, clock=lambda: now[0])
    return str(mine.hear("choice")["method"])


def test_a_node_without_a_sign_of_life_is_lost(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looked at all the time, and silent for twice the timeout."""
    with pytest.raises(StagingError, match="was lost: no sign of life within 10 s"):
        waited(root, monkeypatch, iter([1.0] * 12))


def test_a_job_that_was_suspended_goes_on(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other node was silent for an hour in which this one was stopped, too."""
    assert waited(root, monkeypatch, iter([1.0, 3600.0, 1.0, 1.0])) == "chain"
