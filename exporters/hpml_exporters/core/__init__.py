"""What all exporters share: metrics, collectors and their schedule."""
