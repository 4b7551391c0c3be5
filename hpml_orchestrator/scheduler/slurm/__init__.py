"""Slurm through its commands: the client, parsers of its output, its options and messages."""
