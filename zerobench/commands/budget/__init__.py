"""`zerobench budget`: measured values become limits, and runs are checked against them."""
