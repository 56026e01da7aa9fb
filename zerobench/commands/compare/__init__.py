"""`zerobench compare` and `zerobench noise`: differences between two runs, and between identical ones."""
