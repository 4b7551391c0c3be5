"""What a cluster has and what it allows: plain records, whoever asked for them."""

from hpml_orchestrator.cluster.model import (
    Association,
    Cluster,
    Gres,
    Limits,
    Node,
    Partition,
    Qos,
    Reservation,
)

__all__ = [
    "Association",
    "Cluster",
    "Gres",
    "Limits",
    "Node",
    "Partition",
    "Qos",
    "Reservation",
]
