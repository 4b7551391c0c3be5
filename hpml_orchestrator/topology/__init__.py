"""What a node is: NUMA domains, cores, GPUs, network cards."""

from hpml_orchestrator.topology.cpulist import format_list, parse_list, parse_mask
from hpml_orchestrator.topology.model import Core, Domain, Gpu, Nic, Topology
from hpml_orchestrator.topology.sysfs import read_sysfs

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
]
