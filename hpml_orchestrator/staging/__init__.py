"""Bring data from the shared file system to the node.

Standard library only and Python >= 3.9: it travels in `hpml-node.pyz`.
"""

from __future__ import annotations

from hpml_orchestrator.records.owner import Owner, owner_is_alive, this_owner
from hpml_orchestrator.staging.area import JobArea
from hpml_orchestrator.staging.copy import CopyOptions
from hpml_orchestrator.staging.manifest import Manifest
from hpml_orchestrator.staging.progress import OnProgress
from hpml_orchestrator.staging.request import (
    Bases,
    StageRequest,
    StageResult,
    StagingStopped,
    target_path,
)
from hpml_orchestrator.staging.space import Need, Room, check_room, room_at
from hpml_orchestrator.staging.stage import CopyStager
from hpml_orchestrator.staging.supply import LocalSupply, Supply

__all__ = [
    "Bases",
    "CopyOptions",
    "CopyStager",
    "JobArea",
    "LocalSupply",
    "Manifest",
    "Need",
    "OnProgress",
    "Owner",
    "Room",
    "StageRequest",
    "StageResult",
    "StagingStopped",
    "Supply",
    "check_room",
    "owner_is_alive",
    "room_at",
    "target_path",
    "this_owner",
]
