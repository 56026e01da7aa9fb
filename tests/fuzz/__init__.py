"""A fuzz of the files that zerobench reads from others, on hypothesis.

A damaged file is read, left out with a warning, or refused by its name. Nothing else is raised, written, imported,
executed or left changed (watch.py). Each run of the tests has a few damages per reader; `make fuzz` has 100.
"""
