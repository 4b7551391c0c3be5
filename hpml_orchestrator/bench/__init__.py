"""Measure nodes with a separate job, keep results per node type, and name outliers."""
