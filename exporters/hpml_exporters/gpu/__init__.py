"""GPUs: nvitop finds them, NVML reads them."""
