"""Turns a command line into cells: schemas, checked overrides, composition, and the axes of a resolved config.

Everything from results upwards may import it.

An override takes eight forms on its way to a row:

word        `strategy=zero2`, with sizes in bytes (compose.py)
Override    parsed by Hydra; its key and value are checked (compose.py)
DictConfig  composed by Hydra (composer.py)
Config      the dataclasses of schema.py, with their defaults
Cell        a CellConfig, derived and checked (resolve.py), its problems, and the number of its launch
RankJob     one rank's part of a pass (worker.py), answered by a RankRecord (rank_record.py)
RunRow      the records of all ranks, joined (sweep/aggregate.py)
run.json    the row on disk; read back, a row of the table of runs (results/tables.py)
"""
