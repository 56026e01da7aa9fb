"""`zerobench plan`: what fits a device, what binds, which strategy to take, and its settings in other systems' words.

plan/command.py     the verb: its options, and the checks of them
plan/candidates.py  the table of strategies x tiers x activation policies that are tried
plan/axis.py        what is looked for: layers, micro-batch or GPUs, and the search along it
plan/capacity.py    the device, what of it may be used, and how full an execution makes it
plan/bound.py       theory's states: less than that no execution needs
plan/search.py      one row's search, as a generator of cells to execute
plan/driver.py      runs the searches of all rows side by side; each cell is executed once
plan/choice.py      the goals, and the row that is recommended
plan/report.py      table, sentence, commands, JSON
plan/settings/      the chosen cell as settings of FSDP2, DeepSpeed, Megatron and accelerate
"""
