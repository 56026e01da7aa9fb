"""`zerobench export`: finished runs for other programs.

command.py       the verb, its formats
table.py         one table as text: CSV, Markdown, LaTeX; swept keys among the columns
scalars.py       what changes from step to step, by tag: for the two that follow
tensorboard.py   a folder of event files, for TensorBoard
wandb_lines.py   history, summary and config of each run as Weights & Biases names them, as JSON lines
perfetto.py      one trace of all ranks: phases, modules, collectives, units and memory, for ui.perfetto.dev
"""
