"""The section of the literature that a strategy's closed forms are from, as pages show it beside an equation.

The forms themselves are in states.py and volume.py, whose tables name the same sections.
"""

from __future__ import annotations

from .strategy import StrategyTheory

ZERO = "ZeRO, arXiv 1910.02054"
MEGATRON = "Megatron-core, dist_optimizer.md"


def states_source(theory: StrategyTheory) -> str:
    """Returns the section on the memory of what a strategy partitions."""
    if theory.persistent_gradients:
        return MEGATRON
    if theory.parameters:
        return f"{ZERO}, section 5.3 (P_os+g+p)"
    if theory.gradients:
        return f"{ZERO}, section 5.2 (P_os+g)"
    return f"{ZERO}, section 5.1 (P_os)" if theory.optimizer else f"{ZERO}, section 3.1"


def volume_source(theory: StrategyTheory) -> str:
    """Returns the section on a strategy's communication."""
    if theory.parameters:
        return f"{ZERO}, section 7.2.2"
    return f"{ZERO}, section 7.2.1" if theory.optimizer else f"{ZERO}, section 7.1"
