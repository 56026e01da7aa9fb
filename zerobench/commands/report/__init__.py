"""`zerobench report`: finished runs, or what moved between two sets of them, as one page that asks for nothing.

A *setting* is a set of cells that train the same thing, so that their figures stand beside one another; the *reference*
of a setting is the cell that the others' costs are told beside. An *account* is what `zerobench show` prints of a run.
"""
