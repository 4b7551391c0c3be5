"""A node's hardware: NUMA domains, cores, GPUs, network cards.

Import names from the modules: hpml-bind starts once per rank and needs only `cpulist`.
"""
