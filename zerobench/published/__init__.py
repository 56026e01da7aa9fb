"""Training runs that others published, and the cells that stand for them.

rows.py    a file of runs, a row each
cells.py   the cell and the device of a run, with what the row leaves open
"""
