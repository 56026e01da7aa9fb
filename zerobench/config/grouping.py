"""Groups of cells that one launcher job runs, interleaved: cells that agree in the keys of `launch.group_by`.

key     as on the command line and in tables: a group's choice (`model`, `strategy`), `world_size`, `optimizer.lr`
all     one job for all cells
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from .cell import Cell
from .flat import by_key
from .identity import DEFAULTS, MOVED, VOLATILE
from .launcher import GROUP, LauncherChoice
from .unknown_keys import nearest

KEY, ALL = "launch.group_by", "all"


def keys_of(group_by: str) -> list[str]:
    """Returns the named keys, stripped of spaces."""
    return [key.strip() for key in group_by.split(",") if key.strip()]


def group_of(cell: Cell) -> Hashable:
    """Returns the results folder and the values in which a job's cells agree; without `launch.group_by`, an id."""
    group_by, where = cell.config.launch.group_by, cell.config.results_dir
    if group_by is None:
        return id(cell)
    flat = by_key(cell.config.as_dict())
    return where, *(str(flat.get(MOVED.get(key, key))) for key in keys_of(group_by) if key != ALL)


def problems_of_groups(cells: Sequence[Cell], launcher: LauncherChoice | None, words: Sequence[str]) -> list[str]:
    """Returns error messages for keys of `launch.group_by` that no cell has, or for `words` of the command line that
    set it without a launcher. An experiment may set it without knowing the launcher.
    """
    if launcher is None:
        return [
            f"{word}: it groups the cells of a launcher's jobs, and none is chosen; add {GROUP}= or leave it out"
            for word in words if word.lstrip("+").startswith(f"{KEY}=") and not word.endswith("=null")
        ]  # fmt: skip
    told = dict.fromkeys(cell.config.launch.group_by for cell in cells)
    configs = [cell.config.as_dict() for cell in cells]
    there = {key for config in configs for key in by_key(config)} | set(DEFAULTS) - set(VOLATILE)
    known = sorted({key for key in there if not key.endswith(".name")} | {ALL, "launch.threads"})
    problems = []
    for group_by in filter(None, told):
        keys = keys_of(group_by)
        problems += [f"{KEY}={key}: no such key{nearest(key, known)}" for key in keys if key not in known]
        if not keys:
            problems.append(f"{KEY}={group_by}: name keys, as model,world_size, or all")
        if ALL in keys and len(keys) > 1:
            problems.append(f"{KEY}={group_by}: all is one job for all cells; name keys or all, not both")
    return problems
