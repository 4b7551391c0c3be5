"""A supply that all nodes share is planned, and told once what comes of it on this node."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hpml_orchestrator.errors import CapacityError, InputError, StagingError
from hpml_orchestrator.staging import Bases, CopyStager, Room, StageRequest
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


def test_a_node_whose_cache_has_the_data_says_so(
    stager: CopyStager, base: Path, source: Path
) -> None:
    """Kept by an earlier job that copied by itself."""
    earlier = CopyStager("1.0", bases=Bases(shm=str(base)), job_id="")
    earlier.stage(request(source, keep=True))
    earlier.cleanup()
    supply = Shared(source)
    result = stager.stage(request(source), supply)
    assert (result.reused, result.kept, result.method) == (True, True, "copy")
    assert supply.calls == ["plan", "reuse", "close"]


def test_a_node_without_room_says_so(base: Path, source: Path) -> None:
    """The others learn the reason."""

    def full(_path: str) -> Room:
        return Room(bytes=0, limit="test", inodes=None, block_bytes=4096, in_memory=False)

    stager = CopyStager("1.0", bases=Bases(shm=str(base)), room=full, job_id="")
    supply = Shared(source)
    with pytest.raises(CapacityError):
        stager.stage(request(source), supply)
    assert [call.partition(":")[0] for call in supply.calls] == ["plan", "fail", "close"]
    assert "needs" in supply.calls[1]
    stager.cleanup()


def test_what_fails_before_it_is_planned_is_told_too(stager: CopyStager, source: Path) -> None:
    """The other nodes wait for this one from the start."""
    supply = Shared(source)
    with pytest.raises(InputError):
        stager.stage(StageRequest("data", str(source), target="/nonexistent"), supply)
    assert [call.partition(":")[0] for call in supply.calls] == ["fail", "close"]


def test_a_failed_fill_is_told(stager: CopyStager, source: Path) -> None:
    """Nothing of it stays, in the cache neither."""
    supply = Shared(source)
    plan = supply.plan()
    (source / "one.bin").write_bytes(b"changed")
    supply.plan = lambda: plan  # type: ignore[method-assign]
    with pytest.raises(StagingError, match="changed"):
        stager.stage(request(source, keep=True), supply)
    assert [call.partition(":")[0] for call in supply.calls] == ["plan", "fill", "fail", "close"]
    assert not list(Path(stager.area("shm").store.path).glob(".cache/*"))


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


def test_a_supply_of_this_node_alone_is_not_planned_for_nothing(
    stager: CopyStager, source: Path
) -> None:
    """Data that the job has already costs no look at the source."""
    stager.stage(request(source))
    supply = Shared(source)
    supply.method = "copy"
    assert stager.stage(request(source), supply).reused
    assert supply.calls == ["reuse", "close"]


def test_a_source_is_looked_at_once_and_closed_once(source: Path) -> None:
    """Whoever chose the target has looked before the stager does, and both close it."""
    calls = []

    class Watched(TreeSource):
        def plan(self) -> Plan:
            calls.append("plan")
            return super().plan()

        def close(self) -> None:
            calls.append("close")

    supply = LocalSupply(Watched(str(source), Retry(lambda _seconds: None, lambda: False)))
    assert supply.plan() is supply.plan()
    supply.close()
    supply.close()
    assert calls == ["plan", "close"]
