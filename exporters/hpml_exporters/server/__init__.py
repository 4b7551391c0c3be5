"""The way out: a small, hardened web server for /metrics and /healthz."""
