"""`zerobench calibrate`: what each collective costs by its size, and what a disk moves."""
