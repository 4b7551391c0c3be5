"""Plan where each rank of a node runs, and verify that it runs there.

Import names from the modules: hpml-bind starts once per rank and needs only `planfile`.
"""
