"""What a node is: NUMA domains, cores, GPUs, network cards.

Names are imported from the modules, not from here: hpml-bind, started once per rank, needs
`cpulist` alone.
"""
