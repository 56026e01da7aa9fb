"""Others' measured peaks next to our estimates: a file of published runs, each executed as the cell that stands for it.

runs.py      the file, and a run's model as an architecture of transformers
plan.py      a run becomes a cell and a device, and what that assumes is said
causes.py    an estimate next to a peak, and causes of an error, each executed
command.py   compares a file, and writes the file of errors
"""
