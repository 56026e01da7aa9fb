"""The strategies that theory covers: rows of figure 1 of ZeRO (arXiv 1910.02054), each with its schedule.

The only place in theory/ where a strategy's name is looked up.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .replay.buckets import replay_buckets
from .replay.ddp import replay_ddp
from .replay.stage3 import replay_units
from .strategy import StrategyShape, StrategyTheory

DDP = StrategyTheory(replay_ddp)
ZERO1 = StrategyTheory(replay_buckets, optimizer=True)
MEGATRON = StrategyTheory(replay_buckets, optimizer=True, persistent_gradients=True)
ZERO2 = StrategyTheory(replay_buckets, gradients=True, optimizer=True)
ZERO3 = StrategyTheory(replay_units, parameters=True, gradients=True, optimizer=True)

THEORIES = {"ddp": DDP, "zero1": ZERO1, "zero2": ZERO2, "zero3": ZERO3, "megatron": MEGATRON}


def predicts(section: Mapping[str, Any]) -> bool:
    """True where theory covers the strategy of a resolved section: DDP and ours. The peers are measured only."""
    return section["name"] in THEORIES


def shape_of(section: Mapping[str, Any]) -> StrategyShape:
    """The strategy of a resolved section. Raises KeyError where theory does not cover it."""
    return StrategyShape.of(THEORIES[section["name"]], section)
