"""The strategies that theory covers: rows of figure 1 of ZeRO (arXiv 1910.02054), each with its schedule, and the
sections of the literature that their closed forms come from.

They have no names here: strategies/table.py assigns one of them, or none, to each of its rows.
"""

from __future__ import annotations

from .replay.ddp_and_buckets import replay_buckets, replay_ddp
from .replay.stage3 import replay_units
from .strategy import StrategyTheory

DDP = StrategyTheory(replay_ddp)
ZERO1 = StrategyTheory(replay_buckets, optimizer=True)
MEGATRON = StrategyTheory(replay_buckets, optimizer=True, persistent_gradients=True)
ZERO2 = StrategyTheory(replay_buckets, gradients=True, optimizer=True)
ZERO3 = StrategyTheory(replay_units, parameters=True, gradients=True, optimizer=True)


ZERO = "ZeRO, arXiv 1910.02054"
MEGATRON_CORE = "Megatron-core, dist_optimizer.md"


def states_source(theory: StrategyTheory) -> str:
    """Returns the section on the memory of what a strategy partitions."""
    if theory.persistent_gradients:
        return MEGATRON_CORE
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
