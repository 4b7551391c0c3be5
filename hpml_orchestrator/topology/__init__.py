"""What a node is: NUMA domains, cores, GPUs, network cards.

The names below are imported when they are first used: hpml-bind, started once per rank, needs
`cpulist` alone.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from hpml_orchestrator.topology.cpulist import format_list, parse_list, parse_mask
    from hpml_orchestrator.topology.model import (
        Core,
        Domain,
        Gpu,
        Nic,
        Topology,
        topology_json,
        topology_of_json,
    )
    from hpml_orchestrator.topology.recognise import read_topology, topology_of_text
    from hpml_orchestrator.topology.sysfs import read_sysfs

_MODULES = {
    "cpulist": ("format_list", "parse_list", "parse_mask"),
    "model": ("Core", "Domain", "Gpu", "Nic", "Topology", "topology_json", "topology_of_json"),
    "recognise": ("read_topology", "topology_of_text"),
    "sysfs": ("read_sysfs",),
}

__all__ = [
    "Core",
    "Domain",
    "Gpu",
    "Nic",
    "Topology",
    "format_list",
    "parse_list",
    "parse_mask",
    "read_sysfs",
    "read_topology",
    "topology_json",
    "topology_of_json",
    "topology_of_text",
]


def __getattr__(name: str) -> object:
    """Import a public name from its module."""
    import importlib  # noqa: PLC0415 - hpml-bind does without

    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
