"""Published training runs of others: a file with a row per run, the cells that represent them, and their peaks.

rows.py       the file
cells.py      the cell and the device of a run; hardware.py describes the device and the network for times
peaks.py      estimates next to published peaks, and causes of their errors
"""
