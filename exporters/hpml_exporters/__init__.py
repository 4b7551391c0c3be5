"""Prometheus exporters: GPU, memory, I/O and training of every job, at almost no cost."""
