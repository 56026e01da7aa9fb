"""A command line becomes cells: schemas, checked overrides, composition, and the axes of a resolved config.

From an override to its row there are eight forms:

word        `strategy=zero2`, with sizes in bytes (size_limits.py)
Override    parsed by Hydra; its key and value are checked (overrides.py)
DictConfig  composed by Hydra (compose.py)
Config      the dataclasses of schema.py, with their defaults
Cell        a CellConfig, derived and checked (resolve.py), and its problems
RankJob     one rank's part of a pass (worker.py), answered by a RankRecord (rank_record.py)
RunRow      the records of all ranks, joined (sweep/aggregate.py)
run.json    the row on the disk; read again, a row of the table of runs (results/tables.py)
"""
