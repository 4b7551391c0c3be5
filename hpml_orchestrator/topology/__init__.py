"""What a node is: NUMA domains, cores, GPUs, network cards."""

from hpml_orchestrator.topology.model import Core, Domain, Gpu, Nic, Topology

__all__ = ["Core", "Domain", "Gpu", "Nic", "Topology"]
