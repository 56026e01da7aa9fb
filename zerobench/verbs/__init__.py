"""What the command line does beside running: a module for each verb, with a function of its name.

status, show, prune    what results folders hold (holdings.py); a run as an account (account.py)
export                 tables for elsewhere
compare, noise         what moved (comparison.py, paired.py), and what identical code moves by (noise_floor.py)
budget                 limits and sentences (limits.py), their files (budget_file.py) and reports (budget_report.py)
dry_run                what a sweep would run
codes                  what ZeRO++'s codes change of weights and gradients
gpu_suite              what a GPU can do: the sections of suite/
"""
