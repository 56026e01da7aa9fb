"""`zerobench show`'s account of one run: memory, traffic, tiers, and other witnesses than the ledger."""
