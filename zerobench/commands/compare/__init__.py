"""`zerobench compare` and `zerobench noise`: what moved between two runs, and how much times move by themselves."""
