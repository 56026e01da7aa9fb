"""torch's compiler, torch._dynamo, and the graphs that it makes, without values and under dispatch modes.

Optimizers, DDP, FSDP2, activation checkpoints and fake tensors import torch._dynamo, which takes as long as torch
itself, for a few names that do nothing in code that is not compiled. So it is loaded by code that compiles:

stand-in     takes the place of the module torch._dynamo until then, and has these names
compiler     is loaded for any other name, any submodule except those in ALONE, and before torch._inductor, which needs
             it; from then on the stand-in's names are the compiler's

Work that inductor's code does in C++ is dispatched, so that modes see it:

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

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_loader
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

COMPILER = "torch._dynamo"

SOURCE = f"{COMPILER}.source"

ALONE = ("config", "_trace_wrapped_higher_order_op")
"""Submodules that do not need the compiler: its options, and a class that transformers imports."""

MARKS = ("allow_in_graph", "assume_constant_result")
"""Decorators that return their function itself, which transformers uses."""

_marked: list[tuple[str, Callable[..., Any]]] = []


class LightModule(ModuleType):
    """A module with a few names; for any other one it loads the compiler, and has the names of the real module."""

    def __init__(self, name: str, **names: Any) -> None:
        super().__init__(name)
        self._names = names

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if not is_loaded() and name in self._names:
            return self._names[name]
        if not is_loaded() and self.__name__ == COMPILER and name in ALONE:
            return import_module(f"{COMPILER}.{name}")
        load()
        return getattr(import_module(self.__name__), name)


def stand_in() -> None:
    """Puts the stand-in in the place of a compiler that is not loaded yet."""
    if COMPILER in sys.modules:
        return
    rules = LightModule(f"{COMPILER}.trace_rules", clear_lru_cache=lambda: None)
    utils = LightModule(f"{COMPILER}.utils", get_optimize_ddp_mode=_ddp_mode)
    marks = {name: functools.partial(_mark, name) for name in MARKS}
    names = {"disable": _disable, "graph_break": lambda msg="": None, "trace_rules": rules, "utils": utils}
    module = LightModule(COMPILER, **names, **marks)
    module.__spec__ = spec = find_spec(COMPILER)
    assert spec is not None
    module.__file__, module.__path__ = spec.origin, spec.submodule_search_locations or []
    sys.modules[COMPILER] = torch._dynamo = module
    sys.modules[SOURCE] = LightModule(SOURCE, ConstantSource=_source, RandomValueSource=_NoSource)
    sys.meta_path.insert(0, _Submodules())


def is_loaded() -> bool:
    """Whether the compiler is loaded, or being loaded."""
    return not isinstance(sys.modules.get(COMPILER), LightModule)


def load() -> None:
    """Loads the compiler, if the stand-in is in its place."""
    if is_loaded():
        return
    del sys.modules[COMPILER], sys.modules[SOURCE], torch._dynamo
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Submodules)]
    with _disable_current_modes():
        compiler = import_module(COMPILER)
    for name in ALONE:
        if module := sys.modules.get(f"{COMPILER}.{name}"):
            setattr(compiler, name, module)
    for name, function in _marked:
        getattr(compiler, name)(function)
    if modes_active():
        dispatch_buffers()


def _disable(function: Callable[..., Any] | None = None, recursive: bool = True, **options: Any) -> Callable[..., Any]:
    """Returns the function, which is called as it is until there is a compiler that could trace it."""
    if function is None:
        return functools.partial(_disable, recursive=recursive, **options)

    @functools.wraps(function)
    def disabled(*inputs: Any, **named_inputs: Any) -> Any:
        chosen = torch._dynamo.disable(function, recursive, **options) if is_loaded() else function
        return chosen(*inputs, **named_inputs)

    return disabled


def _mark(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function, which the compiler will mark when it is loaded."""
    _marked.append((name, function))
    return function


def _ddp_mode() -> str:
    mode = import_module(f"{COMPILER}.config").optimize_ddp
    if mode is True:  # the default
        return "ddp_optimizer"
    load()
    return str(torch._dynamo.utils.get_optimize_ddp_mode())


def _source(name: str) -> Any:
    """Returns the source of a tensor that becomes fake, which only symbolic shapes read."""
    if sys._getframe(1).f_locals.get("shape_env", name) is None:
        return SimpleNamespace(name=name)
    load()
    return import_module(SOURCE).ConstantSource(name)


class _NoSource:
    """A type without instances, in place of the compiler's RandomValueSource, for which torch checks each source."""


class _Submodules(MetaPathFinder):
    """Loads the compiler before a module that needs it; the import then finds the module that came with it."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        package, _, submodule = name.rpartition(".")
        if name != "torch._inductor" and (package != COMPILER or submodule in ALONE):
            return None
        load()
        return spec_from_loader(name, _Loaded(sys.modules[name])) if name in sys.modules else None


class _Loaded(Loader):
    """Yields a module that is loaded already."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__
        module.__spec__ = None  # otherwise importlib would execute it again

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


# -- graphs ----------------------------------------------------------------------------------------


class GraphMode(TorchDispatchMode):
    """A mode that sees the operators that a compiled graph calls, not the ones it was traced from."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Returns True: the graph runs as it does without the mode."""
        return True


def modes_active() -> bool:
    """Whether dispatch modes are active in this thread: probes, or a fake world."""
    return torch._C._len_torch_dispatch_stack() > 0


@functools.cache
def dispatch_buffers() -> None:
    """Makes graphs that this process loads later allocate by an operator, and run on fake tensors."""
    from torch._inductor.async_compile import AsyncCompile
    from torch._prims import rng_prims

    bound: Any = torch._C._dynamo.guards
    bound._reinterpret_tensor = functools.partial(_reinterpret, bound._reinterpret_tensor)
    for device in ("cpu", "cuda"):
        setattr(bound, f"_empty_strided_{device}", functools.partial(_allocate, torch.device(device)))
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
    return torch.cuda if any(isinstance(value, torch.Tensor) and value.is_cuda for value in inputs) else torch


def _compiled_when_run(compile_kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Returns AsyncCompile.cpp_pybinding with kernels that are compiled when they first get real tensors."""

    def cpp_pybinding(compiler: Any, types: list[str], source: str) -> Callable[..., None]:
        compiled: list[Any] = []

        def run(*arguments: Any) -> None:
            if any(isinstance(argument, FakeTensor) for argument in arguments):
                return
            if not compiled:
                made = compile_kernel(compiler, types, source)
                compiled.append(made.result() if hasattr(made, "result") else made)
            compiled[0](*arguments)

        return run

    return cpp_pybinding
