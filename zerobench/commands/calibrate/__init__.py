"""`zerobench calibrate`: the cost of each collective by its size, and the rates of a disk."""
