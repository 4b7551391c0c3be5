"""Slurm and the local machine behind one small Protocol."""
