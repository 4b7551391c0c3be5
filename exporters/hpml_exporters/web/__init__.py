"""A small, hardened web server for /metrics and /healthz."""
