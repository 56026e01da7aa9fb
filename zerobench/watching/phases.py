"""Detects the phases of a step, and its end, in a loop that does not name them.

forward     from the call of the model, or of its `training_step` (Lightning), until backward is called: with the loss
backward    an engine's `backward`, or torch.autograd.backward, which Tensor.backward and every library calls
update      an engine's `step`, or any optimizer's, with the steps of other optimizers that it calls
data        everything else: drawing a batch, zero_grad, logging

An update whose closure recomputes the loss contains a forward and a backward, and continues after them.

A step ends after the step of an optimizer, or of an engine in its place:
optimizer   torch's own hook after a step; for a wrapper that steps only sometimes, the wrapped optimizer's
engine      its method `step`, including everything after the update in it
scaler      a GradScaler that skips the update because of an overflow ends the step as well
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from types import FrameType
from typing import Any, Protocol

import torch
from torch import nn, optim
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..zero import labels
from ..zero.modules.wrapping import inside_backward
from .held_tensors import uncompiled


class WatchHook:
    """A hook of a watch. A copy of its module, in memory or in a file, has a hook that does nothing."""

    def __init__(self, act: Callable[..., Any] | None = None) -> None:
        self._act = act

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return None if self._act is None else self._act(*args, **kwargs)

    def __reduce_ex__(self, _protocol: Any) -> tuple[type[WatchHook], tuple[()]]:
        return WatchHook, ()


class PhaseListener(Protocol):
    """Notified of the phases of a loop (watch.py)."""

    def enter_phase(self, phase: str) -> None: ...
    def on_inputs(self, inputs: Any) -> None: ...
    def on_update(self, optimizer: optim.Optimizer, closure: str = "", is_inner: bool = False) -> None: ...
    def on_loss(self, tensors: Any) -> None: ...
    def after_backward(self) -> None: ...


class Phases(AbstractContextManager["Phases"]):
    """Hooks of a model, of backward, of all optimizers and of `engines`, active in its block, that notify a watch."""

    def __init__(self, model: nn.Module, engines: Sequence[Any], listener: PhaseListener) -> None:
        self._model, self._engines, self._listener = model, engines, listener
        self._open: list[str] = []  # phases that have not ended, the innermost last
        self._stepping: list[Any] = []  # optimizers in their steps; a subclass's calls that of its base
        self._stack = ExitStack()

    def __enter__(self) -> Phases:
        for hook in (
            self._model.register_forward_pre_hook(WatchHook(self._before_forward), with_kwargs=True, prepend=True),
            register_optimizer_step_pre_hook(self._before_update),
            register_optimizer_step_post_hook(self._after_update),
        ):
            self._stack.callback(hook.remove)
        self._stack.callback(replaced(torch.autograd, "backward", self._backward))
        if callable(getattr(self._model, "training_step", None)):
            self._stack.callback(replaced(self._model, "training_step", self._training_step))
        for engine in self._engines:
            for method, phase in (("backward", "backward"), ("step", "update")):
                if callable(getattr(engine, method, None)):
                    self._stack.callback(replaced(engine, method, partial(self._phase, phase)))
        if callable(getattr(self._model, "_sync_buffers", None)):  # DDP's, torch-private, pinned by a test
            # its broadcast of buffers is control traffic, which is not part of the volume
            self._stack.callback(
                replaced(self._model, "_sync_buffers", lambda *_: labels.collective("control", labels.BUFFERS))
            )
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def begin_step(self) -> None:
        """Begins a step: no phase of the previous step continues, even if its update ended with an error."""
        self._open.clear()
        self._stepping.clear()

    def _begin(self, phase: str) -> None:
        self._open.append(phase)
        self._listener.enter_phase(phase)

    def _end(self) -> None:
        if self._open:  # else the step's end came first
            self._open.pop()
        self._listener.enter_phase(self._open[-1] if self._open else "data")

    def _before_forward(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._listener.on_inputs((args, kwargs))
        self._listener.enter_phase("forward")

    def _training_step(self, *args: Any, **kwargs: Any) -> AbstractContextManager[None]:
        self._before_forward(self._model, args, kwargs)
        return nullcontext()

    def _before_update(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        is_again, is_inner = any(outer is optimizer for outer in self._stepping), bool(self._stepping)
        self._stepping.append(optimizer)
        if is_again:
            return None
        closure = args[1] if args[1:] else kwargs.get("closure")
        self._listener.on_update(optimizer, "before" if callable(closure) else "", is_inner)
        self._begin("update")
        if not callable(closure):
            return None

        def observed_closure() -> Any:
            loss = closure()
            self._listener.on_update(optimizer, "after")
            return loss

        return (args[0], observed_closure, *args[2:]), {key: value for key, value in kwargs.items() if key != "closure"}

    def _after_update(self, optimizer: Any, *_: object) -> None:
        if self._stepping:  # else the step's end came first
            self._stepping.pop()
        if all(outer is not optimizer for outer in self._stepping):
            self._end()

    @contextmanager
    def _phase(self, phase: str, *_args: Any, **_kwargs: Any) -> Iterator[None]:
        self._begin(phase)
        try:
            yield
        finally:
            self._end()

    @contextmanager
    def _backward(self, tensors: Any, *_args: Any, **_kwargs: Any) -> Iterator[None]:
        if inside_backward():  # a reentrant checkpoint's, which is a part of the loop's
            yield
            return
        self._listener.on_loss(tensors)
        with self._phase("backward"):
            yield
            self._listener.after_backward()


def replaced(owner: Any, name: str, context: Callable[..., AbstractContextManager[Any]]) -> Callable[[], None]:
    """Wraps a method in `context`, called with its arguments; returns a function that undoes this if still in place."""
    owner = uncompiled(owner)  # a compiled module would pass the replacement on to the module in it
    own, method = vars(owner).get(name), getattr(owner, name)

    def replacement(*args: Any, **kwargs: Any) -> Any:
        with context(*args, **kwargs):
            return method(*args, **kwargs)

    setattr(owner, name, replacement)

    def undo() -> None:
        if vars(owner).get(name) is replacement:
            if own is None:
                delattr(owner, name)
            else:
                setattr(owner, name, own)

    return undo


def inside_compiled() -> bool:
    """Returns True inside a call that torch.compile has wrapped, such as an optimizer's step."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch._dynamo.eval_frame":
            return True
        frame = frame.f_back
    return False


def is_engine(candidate: Any) -> bool:
    """Returns True for an object with a step that is no optimizer; a module must have a backward, too."""
    methods = ("step", "backward") if isinstance(candidate, nn.Module) else ("step",)
    return not isinstance(candidate, optim.Optimizer) and all(callable(getattr(candidate, m, None)) for m in methods)


def on_step(optimizer: Any, act: Callable[[], None]) -> Callable[[], None]:
    """Calls `act` after each step; returns a function that undoes this."""
    undo, steps, depth = ExitStack(), 0, 0

    def end_step() -> None:
        nonlocal steps
        steps += 1
        act()

    def enter(*_: object) -> None:
        nonlocal depth
        depth += 1

    def leave(*_: object) -> None:
        nonlocal depth
        depth = max(0, depth - 1)
        if depth == 0:  # a subclass's step may call that of its base, which has a hook as well
            end_step()

    @contextmanager
    def stepped(*_args: Any, **_kwargs: Any) -> Iterator[None]:
        yield
        end_step()

    @contextmanager
    def stepped_or_skipped(_scaler: Any, scaled: Any, *_args: Any, **_kwargs: Any) -> Iterator[None]:
        before = steps
        yield
        if scaled in (optimizer, inner) and steps == before:
            end_step()

    inner = optimizer
    while isinstance(inner, optim.Optimizer) and not hasattr(inner, "_optimizer_step_post_hooks"):
        inside = getattr(inner, "optimizer", None) or getattr(inner, "optim", None)
        if inside is None:
            break
        inner = inside  # accelerate's, which steps when gradients are complete; PostLocalSGDOptimizer's
    if isinstance(inner, optim.Optimizer):
        undo.callback(inner.register_step_pre_hook(enter).remove)
        undo.callback(inner.register_step_post_hook(WatchHook(leave)).remove)
        undo.callback(replaced(torch.amp.GradScaler, "step", stepped_or_skipped))
    else:
        undo.callback(replaced(inner, "step", stepped))
    return undo.close
