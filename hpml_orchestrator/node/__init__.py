"""Everything that runs inside a job: agent, hpml-bind, staging, training channel, end."""
