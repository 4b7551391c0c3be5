"""hpml: run machine-learning training on Slurm clusters well."""

__version__ = "0.1.0"
