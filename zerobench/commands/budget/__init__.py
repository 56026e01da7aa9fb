"""`zerobench budget`: measured values become limits, and runs are held against them."""
