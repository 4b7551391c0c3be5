"""A job's way from file to record: prepare, submit, resume, watch, summarise.

This room joins spec, batch, scheduler and records; the command line and sweeps call it.
"""
