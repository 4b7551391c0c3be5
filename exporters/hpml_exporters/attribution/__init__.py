"""Whose it is: processes, control groups and GPUs to job, step and user."""
