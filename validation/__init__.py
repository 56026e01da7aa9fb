"""The proofs of zerobench: it runs, or executes on fake tensors, what papers print and what others have measured.

No part of the wheel; `python -m validation --help` lists what there is, `make` has a target for each.

    cells -> execute on fake tensors, or run in real worlds (runner.py) -> compare with a number -> rows (store.py)
"""
