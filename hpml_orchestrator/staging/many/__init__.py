"""Data for all nodes of a job: each reads, a chain passes on, Slurm sends, or each has a part."""
