"""Strategies of a sweep: built-in ones, peers' and users', each a row of one table.

Models and all above them may import it.

spec.py defines a row, table.py has the rows, engine.py defines an engine's interface.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from .options import StrategyOptions
from .spec import Composition, Look, StrategySpec
from .table import (
    built_in,
    find,
    names_with,
    predicts,
    reference,
    register_strategy,
    shape_of,
    spare_look,
    spec_of,
    specs,
    user_source,
)

if TYPE_CHECKING:
    from torch import nn, optim

    from .engine import Engine

__all__ = [
    "Composition", "Look", "StrategyOptions", "StrategySpec", "built_in", "find", "names_with", "predicts", "reference",
    "register_strategy", "shape_of", "spare_look", "spec_of", "specs", "synchronizing", "user_source", "wrap",
]  # fmt: skip


def wrap(
    strategy: dict[str, Any], model: nn.Module, optimizer: optim.Optimizer, *, clips: bool = False, **more: Any
) -> Engine:
    """Returns the engine that a resolved `strategy` section asks for, over `model` and `optimizer`.

    `clips`: the run clips gradients. `more`: settings from the run's other sections, including dtypes and loss scaling
    (precision.options_of). Raises TypeError for a user's engine that lacks a method.
    """
    spec = spec_of(strategy["name"])
    given = {key: value for key, value in more.items() if not spec.of_user or spec.takes(key)}
    engine: Engine = spec.build(model, optimizer, **spec.engine_options(strategy), **given)
    if not spec.of_user:
        return engine
    from .engine import AdaptedEngine  # with it comes torch, which a command that reads the table needs not

    return AdaptedEngine(spec, engine, model, optimizer, clips)


def synchronizing(engine: Engine, accumulate: str, last: bool) -> AbstractContextManager[Any]:
    """Wraps a micro-batch: with `accumulate` "last" only a step's last one communicates, with "every" all do."""
    return engine.no_sync() if accumulate == "last" and not last else nullcontext()
