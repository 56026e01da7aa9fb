"""The verbs of the command line: one module per verb, with a function of its name.

estimate               peak and traffic of cells before any run, side by side (execution/)
status, show, prune    results folders (commands/holdings.py); a run as an account (account/account.py)
sync                   merges results folders by content
export, columns        tables for other programs; the meaning of their columns
compare, noise         differences between runs (compare/comparison.py, paired.py), and between identical ones
                       (noise_floor.py)
budget                 limits and sentences (budget/judge.py), their files (budget/file.py) and reports (report.py)
bisect, history        the commit that moved a metric, figures over commits (revisions.py: git and worktrees)
dry_run                the runs that a sweep would start
"""
