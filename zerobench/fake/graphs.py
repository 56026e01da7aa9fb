"""Graphs of torch.compile beneath dispatch modes: what inductor's code does in C++ is dispatched, so that modes see it.

modes        torch runs a compiled function eagerly, without a word, if a mode is active; a GraphMode lets its graph run
buffers      inductor allocates in C++; torch.empty_strided, in its place, is an operator that a ledger sees
views        of fake tensors are made by torch.as_strided, which keeps them fake
kernels      of fake tensors are not run, and are not compiled before they are given real ones
draws        that a backward repeats are operators of a higher order, which a mode must say what to do with

In the timed pass there is no mode, and inductor's code runs as it is. Private to torch: the names that inductor's code
binds when it is loaded, in torch._C._dynamo.guards, and AsyncCompile.cpp_pybinding; a test fails if they move.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes


class GraphMode(TorchDispatchMode):
    """A mode that sees the operators that a compiled graph calls, not those that it was traced from."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True: the graph runs as without the mode."""
        return True


def modes_active() -> bool:
    """Returns True if dispatch modes are active in this thread: probes, or a fake world."""
    return torch._C._len_torch_dispatch_stack() > 0


@cache
def dispatch_buffers() -> None:
    """Makes the graphs that this process loads from now on allocate by an operator, and run on fake tensors."""
    from torch._inductor.async_compile import AsyncCompile
    from torch._prims import rng_prims

    bound: Any = torch._C._dynamo.guards
    bound._reinterpret_tensor = partial(_reinterpret, bound._reinterpret_tensor)
    for device in ("cpu", "cuda"):
        setattr(bound, f"_empty_strided_{device}", partial(_allocate, torch.device(device)))
    for kind in _kinds_below(GraphMode):
        rng_prims.run_and_save_rng_state.py_impl(kind)(_run_and_save_state)
        rng_prims.run_with_rng_state.py_impl(kind)(_run_with_state)
    AsyncCompile.cpp_pybinding = _compiled_when_run(AsyncCompile.cpp_pybinding)


def _allocate(device: torch.device, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


def _reinterpret(
    in_c: Callable[..., torch.Tensor], whole: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int = 0
) -> torch.Tensor:
    if not isinstance(whole, FakeTensor):
        return in_c(whole, size, stride, offset)
    return whole.as_strided(size, stride, whole.storage_offset() + offset)


def _kinds_below(kind: type) -> Iterator[type]:
    below: type
    for below in kind.__subclasses__():
        yield below
        yield from _kinds_below(below)


def _run_and_save_state(mode: GraphMode, operator: Any, *inputs: Any, **named: Any) -> tuple[torch.Tensor, Any]:
    """Runs an operator that draws, for a graph whose backward runs it again; `mode` sees the operator."""
    with _disable_current_modes():
        state = _generator_of(inputs).get_rng_state()
    with mode:
        return state, operator(*inputs, **named)


def _run_with_state(mode: GraphMode, state: torch.Tensor, operator: Any, *inputs: Any, **named: Any) -> Any:
    """Runs it again, with the same draws."""
    generator = _generator_of(inputs)
    with _disable_current_modes():
        current = generator.get_rng_state()
        generator.set_rng_state(state)
    with mode:
        out = operator(*inputs, **named)
    with _disable_current_modes():
        generator.set_rng_state(current)
    return out


def _generator_of(inputs: Sequence[Any]) -> Any:
    """Returns the module whose generator the operator on these inputs draws from."""
    return torch.cuda if any(isinstance(one, torch.Tensor) and one.is_cuda for one in inputs) else torch


def _compiled_when_run(compile_kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Returns AsyncCompile.cpp_pybinding with kernels that are compiled when they are first given real tensors."""

    def cpp_pybinding(compiler: Any, types: list[str], source: str) -> Callable[..., None]:
        compiled: list[Any] = []

        def run(*arguments: Any) -> None:
            if any(isinstance(one, FakeTensor) for one in arguments):
                return
            if not compiled:
                made = compile_kernel(compiler, types, source)
                compiled.append(made.result() if hasattr(made, "result") else made)
            compiled[0](*arguments)

        return run

    return cpp_pybinding
