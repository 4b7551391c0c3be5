"""Check whether the cluster would accept and start a job; check and submit jobs."""
