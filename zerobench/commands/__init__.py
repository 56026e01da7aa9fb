"""The verbs of the command line: one module per verb, with a function of its name.

estimate               peak and traffic of cells before any run, side by side (execution/)
status, show, prune    results folders (commands/folder_contents.py); a run as an account (account.py)
export, columns        tables for other programs; the meaning of their columns
compare, noise         differences between runs, and between identical ones (judging/)
budget                 limits of chosen cells, recorded and checked (judging/)
dry_run                the runs that a sweep would start
"""
