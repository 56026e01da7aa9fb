"""Sweeps from Python, for example in a notebook: runs the same as `zerobench -m KEY=VALUE,VALUE ...`, returns tables.

The calling process is the parent of the ranks, as on the command line: it composes, watches and writes, but does not
train. Cells that the results folder already has, with the same code, are not measured again.
"""

from __future__ import annotations

import ast
import inspect
import multiprocessing
import os
import sys
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from ..config.cell import Cell
from ..config.compose import compose_cells
from ..config.flat import show_value
from ..host.job import find_job
from ..host.terminal import quiet as silence
from ..ranks import fork_server
from ..records import RunRow
from ..registry import GROUPS, installed
from ..results.frames import frame_of, to_frame
from ..results.tables import Results, load, merge
from ..strategies import specs
from ..strategies.table import PACKAGES
from .command import run_cells


def run(*choices: str, quiet: bool = False, **keys: Any) -> Results:
    """Runs every combination of the choices, and returns the tables of the runs, including failed ones; an invalid cell
    has only a row in `runs`, with the status invalid.

    Choices are strings as on the command line, "strategy=ddp,zero1", or keywords, with a list for several values:
    `run(strategy=["ddp", "zero1"], model="gpt_tiny", world_size=2)`. A key with a dot needs a string:
    "measure.steps=5". `results_dir` is the folder of the runs, by default results/runs. `quiet`: show no progress.

    Rank processes import the calling script, so a script calls it below `if __name__ == "__main__":`.

    Raises ValueError before anything runs for invalid choices, if every cell is invalid, or for a model, data or
    strategy registered in the notebook itself; RuntimeError in a process that is a rank, or in a script without that
    line; KeyboardInterrupt if it was stopped, in which case finished cells are kept.
    """
    _check_caller()
    if flags := [choice for choice in choices if choice.startswith("-")]:
        raise ValueError(f"zerobench.run: {flags[0]} is a flag of the command line; write choices as KEY=VALUE")
    if bare := [choice for choice in choices if "=" not in choice and not choice.startswith("~")]:
        names = ", ".join(specs())
        raise ValueError(
            f"zerobench.run: {bare[0]!r} is not KEY=VALUE, such as strategy=ddp,zero1; strategies are {names}"
        )
    arguments = ["-m", *choices, *(f"{key}={_written(value)}" for key, value in keys.items())]
    recorded = mock.patch.object(sys, "argv", ["zerobench", *arguments])  # as the command, in the runs' provenance
    with recorded, silence() if quiet else nullcontext():
        fork_server.start()
        try:
            cells = compose_cells(arguments)
            _check_known_to_ranks(cells)
            code, rows = run_cells(cells, tables=False) if cells else (0, [])
        finally:
            fork_server.end()
    if code == 130:
        raise KeyboardInterrupt
    folders = sorted({cell.config.results_dir for cell in cells})
    results = merge([load(folder) for folder in folders if Path(folder).is_dir()]).of(row.run_id for row in rows)
    invalid = [row for row in rows if row.status == "invalid"]
    return replace(results, runs=to_frame([results.runs, frame_of(invalid, RunRow)], RunRow)) if invalid else results


def _check_caller() -> None:
    """Raises RuntimeError in a process that is a rank, and in a script whose import by a rank would run this again."""
    if multiprocessing.parent_process() is not None or find_job(os.environ) is not None:
        raise RuntimeError(
            'zerobench.run: this process is a rank; in a script call it below `if __name__ == "__main__":`,'
            " and in a job of torchrun, srun or mpirun use the command line"
        )
    # Does a line of the main script lead here outside of any `if`?
    main = sys.modules["__main__"]
    file = Path(getattr(main, "__file__", None) or "")
    frame = inspect.currentframe()
    while frame is not None and not (frame.f_globals is vars(main) and frame.f_code.co_name == "<module>"):
        frame = frame.f_back
    if frame is None or Path(frame.f_code.co_filename).name != file.name:
        return
    try:
        nodes = ast.walk(ast.parse(file.read_bytes()))
    except (OSError, SyntaxError):  # it has changed since
        return
    line, ifs = frame.f_lineno, (node for node in nodes if isinstance(node, ast.If))
    if not any(node.lineno <= line <= (node.end_lineno or 0) for node in ifs):
        raise RuntimeError(
            f'zerobench.run: line {line} of {file.name} calls it without `if __name__ == "__main__":`; ranks import the'
            " script and would call it again, so put the call below that line"
        )


def _check_known_to_ranks(cells: Sequence[Cell]) -> None:
    """Raises ValueError for a user's model, data or strategy registered in a notebook: ranks import the script that
    registers it, and a notebook is not one.
    """
    if getattr(sys.modules["__main__"], "__file__", None) is not None:
        return
    for config in (cell.config for cell in cells):
        chosen = {"model": config.model.kind, "data": config.data.name, "strategy": config.strategy.name}
        for key, name in chosen.items():
            group = GROUPS.get(key)
            registered: Collection[str] = (
                group.builders if group else [n for n, spec in specs().items() if spec.of_user]
            )
            packages = [point.name for point in installed(group.group if group else PACKAGES)]
            if name in registered and name not in packages:
                raise ValueError(
                    f"zerobench.run: {key}={name} is registered in this notebook, which ranks cannot import; put it"
                    " into a script that ends with zerobench.main(), run that, and zerobench.load its results here"
                )


def _written(value: Any) -> str:
    """Formats a value as on a command line; items of a list or tuple are joined by commas, for a sweep over them."""
    return ",".join(map(_written, value)) if isinstance(value, list | tuple) else show_value(value)
