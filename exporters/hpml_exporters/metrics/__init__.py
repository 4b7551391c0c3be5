"""The catalogue: every metric that an exporter can show, by subject."""
