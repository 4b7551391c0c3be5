"""What a run did, read from its records: figures, binding, staging, monitor, and their text."""
