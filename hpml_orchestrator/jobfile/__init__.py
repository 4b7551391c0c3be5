"""Job files and sweep files: read, merged, checked, and their paths resolved."""
