"""What every exporter of hpml consists of: metrics, collectors and their rhythm."""
