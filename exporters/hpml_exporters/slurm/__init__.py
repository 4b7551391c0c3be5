"""The cluster as Slurm sees it: queue, nodes, resources and scheduler (`hpml export slurm`)."""
