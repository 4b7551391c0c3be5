"""What runs inside a job: the node agent, hpml-bind, the channel reader, the local srun."""
