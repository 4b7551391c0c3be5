"""The local backend: the same batch script on this machine, without Slurm."""
