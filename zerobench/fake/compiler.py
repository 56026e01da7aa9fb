"""torch's compiler, torch._dynamo, is loaded by code that compiles; until then a stand-in answers for it.

Optimizers, DDP, FSDP2, activation checkpoints and fake tensors import torch._dynamo, which takes as long as torch
itself, for a few names that do nothing in code that is not compiled.

stand-in    the module torch._dynamo, with these names
compiler    loaded for any other name, for any submodule but ALONE, and before torch._inductor, which needs it; then the
            stand-in's names are the compiler's
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_loader
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from . import graphs

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
    module.__spec__ = found = find_spec(COMPILER)
    assert found is not None
    module.__file__, module.__path__ = found.origin, found.submodule_search_locations or []
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
    if graphs.modes_active():
        graphs.dispatch_buffers()


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
    """The type of no source: torch asks whether a source is of the compiler's own type."""


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
