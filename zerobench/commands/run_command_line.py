"""Runs the cells of a command line, or shows the plan: in this process, by a launcher's jobs, or for a sweeper."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from ..config.compose import Composed, RefusedError, refuse_senseless
from ..sweep.command import run_cells
from ..sweep.sweep import Sweep


def plan_composed(composed: Composed, chosen: Sequence[str] | None) -> int:
    """Prints what would run, in the columns `chosen`. Returns the exit code. Raises RefusedError for a sweeper, and if
    every cell is refused.
    """
    from .dry_run import print_plan

    if composed.proposed is not None:
        why = "its cells follow from what earlier ones measured, and are not known beforehand"
        raise RefusedError([f"--dry-run: {composed.proposed.chosen}: {why}; leave one out"])
    refuse_senseless(composed.cells)
    return print_plan(composed.cells, chosen, composed.launcher) if composed.cells else 0


def run_composed(composed: Composed, chosen: Sequence[str] | None) -> int:
    """Runs the sweep and prints its tables, of the columns `chosen`. Returns the exit code. Raises RefusedError."""
    if not composed.cells and composed.proposed is None:
        return 0
    kind: Callable[..., Sweep] = Sweep
    if composed.launcher is not None:
        from ..dispatch.plugin import Plugin
        from ..dispatch.sweep import DispatchedSweep

        kind = partial(DispatchedSweep, plugin=Plugin(composed.launcher, composed.check))
    if composed.proposed is not None:
        from ..trials.command import run_proposed

        return run_proposed(composed.proposed, composed.check, composed.launcher is None, chosen, kind)
    here = composed.launcher is None or composed.launcher.is_here
    return run_cells(composed.cells, chosen, kind=kind, here=here)[0]
