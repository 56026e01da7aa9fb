"""Turns a command line into cells: schemas, checked overrides, composition, and the axes of a resolved config.

Everything from results upwards may import it.

An override takes eight forms on its way to a printed figure:

word        `strategy=zero2`, with sizes in bytes; Hydra parses it, and its key and value are checked (compose.py)
Config      the dataclasses of schema.py, composed by Hydra, with their defaults (composer.py)
Cell        a CellConfig, derived and checked (resolve.py), its problems, and the number of its launch
RankJob     one rank's part of a pass (worker.py)
RankRecord  what that rank returns (rank_record.py)
RunRow      the records of all ranks, joined (sweep/aggregate.py): a row in a sweep, and run.json on disk
frame       the rows of runs, summarized by cell (results/tables.py, results/summary.py)
Grid        the printed table (results/grid.py)
"""
