"""What runs inside a job: the node agent, hpml-bind, staging, the channel reader, the end."""
