"""The strategies that theory covers: rows of figure 1 of ZeRO (arXiv 1910.02054), each with its schedule.

They have no names here: the table of strategies (strategies/table.py) gives each of its rows one of these, or none.
"""

from __future__ import annotations

from .replay.buckets import replay_buckets
from .replay.ddp import replay_ddp
from .replay.stage3 import replay_units
from .strategy import StrategyTheory

DDP = StrategyTheory(replay_ddp)
ZERO1 = StrategyTheory(replay_buckets, optimizer=True)
MEGATRON = StrategyTheory(replay_buckets, optimizer=True, persistent_gradients=True)
ZERO2 = StrategyTheory(replay_buckets, gradients=True, optimizer=True)
ZERO3 = StrategyTheory(replay_units, parameters=True, gradients=True, optimizer=True)
