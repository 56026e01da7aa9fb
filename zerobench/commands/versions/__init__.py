"""`zerobench versions`: bytes and volume of the same loops under releases of torch.

A *release* is a Python with a version of a package: a virtual environment that is made for it, or one that is there.

    loops.py          the loops, run by each release's Python: the only module that it runs
    environments.py   releases, and their environments
    table.py          bytes by category and volume, release by release, with steps marked
"""
