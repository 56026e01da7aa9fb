"""`zerobench plan`: what fits a device, the limiting memory, the recommended strategy, and its settings elsewhere."""
