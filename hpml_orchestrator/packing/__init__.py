"""Pack a tree of many small files into a few tar archives; on the login node alone."""

from __future__ import annotations

from hpml_orchestrator.packing.shards import OnPack, PackRequest, PackResult, pack

__all__ = ["OnPack", "PackRequest", "PackResult", "pack"]
