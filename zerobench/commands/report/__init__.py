"""`zerobench report`: finished runs, or the changes between two sets of runs, as one page that makes no requests.

A *setting* is a set of cells that train the same thing, so that their figures stand beside one another; the *reference*
of a setting is the cell that the others' costs are told beside. An *account* is what `zerobench show` prints of a run.
"""
