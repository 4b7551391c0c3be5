#!/bin/sh
# Slurm's HealthCheckProgram: drains a node that is not fit for jobs. See docs/node-health.md.
# It runs the hpml of the virtual environment that it is installed in: PREFIX/share/hpml/slurm.
own=$(readlink -f "$0")
exec "${own%/share/hpml/*}/bin/hpml" doctor --node --drain
