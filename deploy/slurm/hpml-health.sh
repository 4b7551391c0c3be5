#!/bin/sh
# Slurm's HealthCheckProgram: drains a node that is not fit for jobs. See docs/node-health.md.
exec "${HPML:-/opt/hpml/bin/hpml}" doctor --node --drain
