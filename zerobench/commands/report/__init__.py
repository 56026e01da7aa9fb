"""`zerobench report`: finished runs, or the changes between two sets of runs, as one page that makes no requests.

A *setting* is a set of cells that train the same thing, so that their figures can be compared; the *reference* of a
setting is the cell with which the others' costs are compared. An *account* is the output of `zerobench show` for a run.
"""
