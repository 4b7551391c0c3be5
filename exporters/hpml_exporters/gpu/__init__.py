"""GPUs: found by nvitop, read by NVML."""
