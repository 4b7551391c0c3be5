"""Job files and sweep files: read, merge and validate them, and resolve their paths."""
