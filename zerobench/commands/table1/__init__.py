"""`zerobench table1`: table 1 of the ZeRO paper, executed."""
