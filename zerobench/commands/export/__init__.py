"""`zerobench export`: finished runs for other programs.

command.py       the verb, its formats
table.py         one table as text: CSV, Markdown, LaTeX; swept keys among the columns
curves.py        values that change from step to step, by tag, for TensorBoard and in Weights & Biases' naming
perfetto.py      one trace of all ranks: phases, modules, collectives, units and memory, for ui.perfetto.dev
"""
