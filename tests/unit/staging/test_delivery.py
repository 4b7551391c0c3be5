"""A supply that all nodes share is planned, and told once what comes of it on this node."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hpml_orchestrator.staging import Bases, CopyStager, StageRequest
from hpml_orchestrator.staging.faults import Retry
from hpml_orchestrator.staging.files import NameLock
from hpml_orchestrator.staging.sources import LocalSupply, TreeSource

if TYPE_CHECKING:
    from hpml_orchestrator.staging.copy import Copied
    from hpml_orchestrator.staging.plan import Plan
    from hpml_orchestrator.staging.progress import Progress


class Shared(LocalSupply):
    """A supply of a chain in which this node is alone: copies, and writes down its calls."""

    def __init__(self, source: Path) -> None:
        super().__init__(TreeSource(str(source), Retry(lambda _seconds: None, lambda: False)))
        self.method = "chain"
        self.calls: list[str] = []

    def plan(self) -> Plan:
        self.calls.append("plan")
        return super().plan()

    def fill(self, plan: Plan, partial_dir: str, *, retry: Retry, progress: Progress) -> Copied:
        self.calls.append("fill")
        return super().fill(plan, partial_dir, retry=retry, progress=progress)

    def reuse(self) -> None:
        self.calls.append("reuse")

    def fail(self, reason: str, hint: str = "") -> None:
        self.calls.append(f"fail: {reason} ({hint})")

    def close(self) -> None:
        self.calls.append("close")
        super().close()


def request(source: Path, *, keep: bool = False) -> StageRequest:
    """The tree into RAM."""
    return StageRequest("data", str(source), target="shm", keep=keep)


@pytest.mark.parametrize("keep", [False, True])
def test_a_node_that_needs_the_data_fills(stager: CopyStager, source: Path, keep: bool) -> None:
    """Planned, filled, closed; the manifest tells the method."""
    supply = Shared(source)
    result = stager.stage(request(source, keep=keep), supply)
    assert supply.calls == ["plan", "fill", "close"]
    assert (result.method, result.kept) == ("chain", keep)


@pytest.mark.parametrize("keep", [False, True])
def test_a_node_that_has_the_data_says_so(stager: CopyStager, source: Path, keep: bool) -> None:
    """The others may need it from this node all the same."""
    stager.stage(request(source, keep=keep), Shared(source))
    again = Shared(source)
    assert stager.stage(request(source, keep=keep), again).reused
    assert again.calls == ["plan", "reuse", "close"]


def test_a_chain_does_not_wait_for_another_jobs_copy(
    stager: CopyStager, base: Path, source: Path
) -> None:
    """Two chains that wait for each other on two nodes would never end: it makes its own copy."""
    earlier = CopyStager("1.0", bases=Bases(shm=str(base)), job_id="")
    earlier.stage(request(source, keep=True))
    entry = next(Path(stager.area("shm").store.path).glob(".cache/*"))
    retry = Retry(lambda _seconds: None, lambda: False)
    with NameLock(f"{entry}/.data.lock", retry):
        supply = Shared(source)
        result = stager.stage(request(source, keep=True), supply)
    assert (result.reused, result.kept) == (False, False)
    assert supply.calls == ["plan", "fill", "close"]
    earlier.cleanup()
