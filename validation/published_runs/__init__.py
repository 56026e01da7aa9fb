"""Others' measured peaks next to our estimates: a file of published runs, each executed as the cell that stands for it.

causes.py    an estimate next to a peak, and causes of an error, each executed
command.py   compares a file, and writes the file of errors
"""
