"""Figures of the ZeRO literature that cells reproduce: formula, executed value and printed value of each.

figure.py       a published figure as a row of data, next to the cells that reproduce it
equations.py    values of theory's closed forms per parameter
quantities.py   bytes and operations of an executed cell, and the sizes that divide them
sources/        what papers and documents print, one file each
command.py      executes the cells, and writes the tables
"""
