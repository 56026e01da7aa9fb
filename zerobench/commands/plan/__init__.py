"""`zerobench plan`: what fits a device, what binds, which strategy to take, and its settings in other systems' words.

plan/command.py      the verb: its options, and the checks of them
plan/candidates.py   the table of strategies x tiers x activation policies that are tried; the device and its memory
plan/search.py       the axes, the search along them, and the driver that executes the cells of all rows side by side
plan/recommend.py    the goals, the row that is recommended, and the plan in words and JSON
plan/settings.py     the chosen cell as settings of FSDP2, DeepSpeed, Megatron and accelerate
"""
