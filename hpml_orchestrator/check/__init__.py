"""Whether the cluster would accept and start a job; checks and submits for commands and API."""
