"""Where each rank of a node runs: the pure planner and the plan file.

Names are imported from the modules, not from here: hpml-bind, started once per rank, reads one line
through `planfile` and must not pay for the planner.
"""
