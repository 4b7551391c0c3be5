"""A job's way from file to record: prepare, submit once, recover, watch, summarise, prune."""
