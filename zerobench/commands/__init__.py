"""What the command line does beside running: a module for each verb, with a function of its name.

status, show, prune    what results folders hold (commands/holdings.py); a run as an account (account/account.py)
export, columns        tables for elsewhere; what their columns mean
compare, noise         what moved (compare/comparison.py, paired.py), and what identical code moves by (noise_floor.py)
budget                 limits and sentences (budget/limits.py), their files (budget/file.py) and reports (report.py)
dry_run                what a sweep would run
codes                  what ZeRO++'s codes change of weights and gradients
gpu_suite              what a GPU can do: the sections of suite/
"""
