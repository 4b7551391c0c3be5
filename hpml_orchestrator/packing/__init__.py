"""Make tar archives with an index of a tree of many files, and check them.

On the login node alone, so it may use a hash from outside the standard library; what reads a pack
in a job is `training_jobs/hpml_packed.py`.
"""

from __future__ import annotations

from hpml_orchestrator.packing.index import INDEX_FILE, KINDS, Index, Row, read_index
from hpml_orchestrator.packing.pack import OnPack, PackRequest, PackResult, pack
from hpml_orchestrator.packing.verify import Damage, Verified, verify

__all__ = [
    "INDEX_FILE",
    "KINDS",
    "Damage",
    "Index",
    "OnPack",
    "PackRequest",
    "PackResult",
    "Row",
    "Verified",
    "pack",
    "read_index",
    "verify",
]
