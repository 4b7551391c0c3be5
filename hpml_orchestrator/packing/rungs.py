"""hpml's own ways to copy, for the ladder of ways: loose files, a pack unpacked, a pack kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpml_orchestrator.packing.pack import PackRequest, pack
from hpml_orchestrator.staging.engine import EngineOptions
from hpml_orchestrator.staging.ladder import LARGE, SMALL, Way
from hpml_orchestrator.staging.request import StageRequest
from hpml_orchestrator.staging.stager import CopyStager

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpml_orchestrator.staging.ladder import Data

__all__ = ["made_pack", "own_ways"]


def made_pack(data: Data, directory: str) -> float:
    """Pack the small files into a new directory; return how many seconds that took.

    Raises:
        HpmlError: as `pack`.
    """
    shard_bytes = max(1 << 20, data.small_bytes // 8)
    return pack(PackRequest(data.small, directory, shard_bytes)).seconds


def own_ways(data: Data, packed: str, should_stop: Callable[[], bool]) -> list[Way]:
    """Return hpml's ways, all of them with the room checked, published whole.

    Args:
        data: what is copied.
        packed: the pack of the small files.
        should_stop: asked while they copy.
    """

    def way(name: str, source: str, kind: str, data: str = SMALL, *, checked: bool = True) -> Way:
        def run(target: str) -> None:
            stager = CopyStager(
                "bench", should_stop=should_stop, options=EngineOptions(hash=checked)
            )
            try:
                stager.stage(StageRequest("data", source, kind, target))
            finally:
                stager.leave()

        return Way(name, data, checked, run)

    return [
        way("hpml stage", data.small, "tree"),
        way("hpml stage --no-hash", data.small, "tree", checked=False),
        way("hpml stage PACK", packed, "pack"),
        way("hpml stage PACK --kind tree", packed, "tree"),
        way("hpml stage, one file", data.large, "tree", LARGE),
        way("hpml stage --no-hash, one file", data.large, "tree", LARGE, checked=False),
    ]
