"""torch.compile graphs under dispatch modes: work that inductor's code does in C++ is dispatched so that modes see it.

modes        torch silently runs a compiled function eagerly if a mode is active; a GraphMode lets the graph run
buffers      inductor allocates in C++; torch.empty_strided replaces that, an operator that a ledger sees
views        of fake tensors are made by torch.as_strided, whose results are fake
kernels      do not run on fake tensors, and are not compiled until they get real ones
draws        that backward repeats are higher-order operators, which need a rule for each mode

In the timed pass there is no mode, and inductor's code runs unchanged. Private to torch: the names in
torch._C._dynamo.guards that inductor's code binds when loaded, and AsyncCompile.cpp_pybinding; a test fails if they
move.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes


class GraphMode(TorchDispatchMode):
    """A mode that sees the operators that a compiled graph calls, not the ones it was traced from."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Returns True: the graph runs as it does without the mode."""
        return True


def modes_active() -> bool:
    """Whether dispatch modes are active in this thread: probes, or a fake world."""
    return torch._C._len_torch_dispatch_stack() > 0


@cache
def dispatch_buffers() -> None:
    """Makes graphs that this process loads later allocate by an operator, and run on fake tensors."""
    from torch._inductor.async_compile import AsyncCompile
    from torch._prims import rng_prims

    bound: Any = torch._C._dynamo.guards
    bound._reinterpret_tensor = partial(_reinterpret, bound._reinterpret_tensor)
    for device in ("cpu", "cuda"):
        setattr(bound, f"_empty_strided_{device}", partial(_allocate, torch.device(device)))
    for kind in kinds_below(GraphMode):
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


def kinds_below(kind: type) -> Iterator[type]:
    """Yields all subclasses of a class that exist so far."""
    below: type
    for below in kind.__subclasses__():
        yield below
        yield from kinds_below(below)


def _run_and_save_state(mode: GraphMode, operator: Any, *inputs: Any, **named: Any) -> tuple[torch.Tensor, Any]:
    """Runs an operator that draws random numbers, for a graph whose backward repeats it; `mode` sees the operator."""
    with _disable_current_modes():
        state = _generator_of(inputs).get_rng_state()
    with mode:
        return state, operator(*inputs, **named)


def _run_with_state(mode: GraphMode, state: torch.Tensor, operator: Any, *inputs: Any, **named: Any) -> Any:
    """Repeats the operator with the same random numbers."""
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
    """Returns the module whose random generator an operator on these inputs uses."""
    return torch.cuda if any(isinstance(one, torch.Tensor) and one.is_cuda for one in inputs) else torch


def _compiled_when_run(compile_kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Returns AsyncCompile.cpp_pybinding with kernels that are compiled when they first get real tensors."""

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
