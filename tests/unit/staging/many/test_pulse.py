"""How long a node waits for another one's notice, by signs of life in files."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from hpml_orchestrator.errors import StagingError
from hpml_orchestrator.staging.many import pulse
from hpml_orchestrator.staging.many.member import ChainPlace
from hpml_orchestrator.staging.many.notices import Notices

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def waited(root: Path, monkeypatch: pytest.MonkeyPatch, pauses: Iterator[float]) -> int:
    """Wait for a node that lived once, with so much time between looks; it ends with its word."""
    now = [0.0]
    other = Notices(str(root), "a", should_stop=lambda: False)
    other.post("1.alive", beat=1)

    def sleep(_seconds: float) -> None:
        pause = next(pauses, 0.0)
        now[0] += pause
        if not pause:
            other.post("1.ready", rate=7)

    monkeypatch.setattr("hpml_orchestrator.staging.many.pulse.time.sleep", sleep)
    mine = Notices(str(root), "a", should_stop=lambda: False, clock=lambda: now[0])
    waiting = pulse.Pulse(mine, ChainPlace(0, 2, "n0", timeout=5.0))
    return int(waiting.wait("1.ready", 1)["rate"])


def test_a_node_without_a_sign_of_life_is_lost(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looked at all the time, and silent for twice the timeout."""
    with pytest.raises(StagingError, match="was lost: no sign of life within 10 s"):
        waited(root, monkeypatch, iter([1.0] * 12))


def test_a_job_that_was_suspended_goes_on(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other node was silent for an hour in which this one was stopped, too."""
    assert waited(root, monkeypatch, iter([1.0, 3600.0, 1.0, 1.0])) == 7
