"""Published training runs of others, and the cells that represent them.

rows.py    a file with one run per row
cells.py   the cell and the device of a run, with assumptions for values missing from the row
"""
