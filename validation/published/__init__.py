"""Figures of the ZeRO literature that cells reproduce: formula, executed value and printed value of each.

figure.py       a published figure as a row of data, next to the cells that reproduce it; quantities of a cell,
                and theory's closed forms per parameter
sources/        what papers and documents print, one file each
command.py      executes the cells, and writes the tables
"""
