"""Slurm by its commands: the client, its readers of text, its options and messages."""
