"""Account of one run for `zerobench show`: memory, traffic, tiers, and measurements independent of the ledger."""
