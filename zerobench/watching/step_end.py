"""Where a step of a loop ends: after the step of an optimizer, or of an engine in its place.

optimizer    torch's own hook after a step; of a wrapper that steps now and then, that of the optimizer inside
engine       its method `step`, with all that comes after the update in it
scaler       a GradScaler that skips the update for an overflow ends the step as well
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn, optim

from .phases import replaced


def is_engine(one: Any) -> bool:
    """Returns True for an object with a step that is no optimizer of torch's, nor a wrapper of one; a module with a
    step is one if it has a backward, too.
    """
    methods = ("step", "backward") if isinstance(one, nn.Module) else ("step",)
    return not isinstance(one, optim.Optimizer) and all(callable(getattr(one, name, None)) for name in methods)


def on_step(optimizer: Any, act: Callable[[], None]) -> Callable[[], None]:
    """Has `act` called after each step; returns what undoes it."""
    undo, seen = ExitStack(), [0]

    def tell() -> None:
        seen[0] += 1
        act()

    def after(step: Callable[..., Any]) -> Callable[..., Any]:
        def step_and_tell(*args: Any, **kwargs: Any) -> Any:
            result = step(*args, **kwargs)
            tell()
            return result

        return step_and_tell

    def also_skipped(step: Callable[..., Any]) -> Callable[..., Any]:
        def step_or_skip(scaler: Any, given: Any, *args: Any, **kwargs: Any) -> Any:
            before = seen[0]
            result = step(scaler, given, *args, **kwargs)
            if given in (optimizer, inner) and seen[0] == before:
                tell()
            return result

        return step_or_skip

    inner = optimizer
    while isinstance(inner, optim.Optimizer) and not hasattr(inner, "_optimizer_step_post_hooks"):
        inner = inner.optimizer  # type: ignore[attr-defined]  # accelerate's, which steps when gradients are complete
    if isinstance(inner, optim.Optimizer):
        undo.callback(inner.register_step_post_hook(lambda *_: tell()).remove)
        undo.callback(replaced(torch.amp.GradScaler, "step", also_skipped))
    else:
        undo.callback(replaced(inner, "step", after))
    return undo.close
