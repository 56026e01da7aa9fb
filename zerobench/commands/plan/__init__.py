"""`zerobench plan`: what fits a device, the limiting memory, the recommended strategy, and its settings elsewhere.

plan/command.py      the verb: its options, and their checks
plan/candidates.py   the table of candidates, strategies x tiers x activation policies; the device and its memory
plan/search.py       the axes, the search along them, and the driver that simulates the cells of all rows in parallel
plan/recommend.py    the goals, the recommended row, and the plan as text and JSON
plan/settings.py     the chosen cell as settings of FSDP2, DeepSpeed and accelerate
"""
