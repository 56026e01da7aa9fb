"""`zerobench plan`: what fits a device, the limiting memory, the recommended strategy, and its settings elsewhere.

plan/command.py      the verb: its options, and their checks
plan/candidates.py   the table of candidates, strategies x tiers x activation policies, each composed to a cell
plan/memory.py       the device and its memory, and a simulated cell
plan/search.py       the axes, the search of a row along them, and the loop that simulates the cells of all rows
plan/fastest.py      goal fastest: variants of the leading rows, and when another row would be ahead
plan/answer.py       the goals, the recommended row, and the plan as text and JSON
plan/settings.py     the chosen cell as settings of FSDP2, DeepSpeed and accelerate
"""
