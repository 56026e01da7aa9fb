"""Runs the cells of a command line, or shows the plan: on this machine, in a launcher's jobs, or for a sweeper."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from ..config.compose import CommandLine, RefusedError, refuse_senseless
from ..config.plugins import SWEEPER
from ..sweep.command import run_cells, run_proposed
from ..sweep.sweep import Sweep


def plan_composed(composed: CommandLine, chosen: Sequence[str] | None) -> int:
    """Prints what would run, in the columns `chosen`. Returns the exit code. Raises RefusedError for a sweeper that
    proposes cells, and if every cell is refused.
    """
    from .dry_run import print_plan

    if composed.proposes:
        why = "its cells follow from what earlier ones measured, and are not known beforehand"
        raise RefusedError([f"--dry-run: {SWEEPER}={composed.sweeper}: {why}; leave one out"])
    refuse_senseless(composed.cells)
    return print_plan(composed.cells, chosen, composed.launcher) if composed.cells else 0


def run_composed(composed: CommandLine, chosen: Sequence[str] | None) -> int:
    """Runs the cells, and prints the table of the columns `chosen`. Returns the exit code. Raises RefusedError."""
    launcher = composed.launcher
    here = launcher is None or launcher.is_here
    kind: Callable[..., Sweep] = Sweep
    if launcher is not None:
        from ..sweep.jobs import JobSweep

        kind = partial(JobSweep, composed=composed)
    if composed.proposes:
        return run_proposed(composed, chosen, kind, here)
    return run_cells(composed.cells, chosen, kind=kind, here=here, price=composed.price)[0]
