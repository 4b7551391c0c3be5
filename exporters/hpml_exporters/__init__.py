"""Prometheus exporters for nodes and jobs that train.

`NodeCollector` can be registered in any registry of prometheus_client.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpml_exporters.app import NodeCollector

__all__ = ["NodeCollector"]


def __getattr__(name: str) -> type[NodeCollector]:
    """Import on demand, so that a process which needs little stays small."""
    if name == "NodeCollector":
        from hpml_exporters.app import NodeCollector  # noqa: PLC0415 - for users of the API

        return NodeCollector
    raise AttributeError(name)
