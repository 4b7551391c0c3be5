"""Measure nodes by a job of its own, keep the results per node type, and name outliers."""
