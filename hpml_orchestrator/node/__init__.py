"""Everything that runs inside a job: the node agent, hpml-bind, staging, the channel, the end."""
