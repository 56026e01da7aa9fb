"""A fuzz of all that zerobench reads from others, on hypothesis: command lines with their config folders, and files.

A command line, valid or damaged, makes cells or is refused with messages that name a word of it; a damaged file is
read, left out with a warning, or refused by its name. Nothing else is raised, written, imported, executed or left
changed (watch.py). Each run of the tests has a few examples; `make fuzz` has 10,000 command lines and 100 damages per
reader.
"""
