"""Models by name. Each is a builder of a module whose `forward(tokens, targets)` returns the loss.

A model of your own is a function whose keyword parameters are its options::

    def build(width: int = 64, depth: int = 2, vocabulary: int = 256) -> nn.Module: ...

    zerobench.register_model("mine", build)      # in your script, at top level
    zerobench.main()                             # then: python mine.py -m model=mine model.width=64,128

`vocabulary` and `sequence`, where the function takes them, are filled from the run's data. A package can
offer models without a script, by entry points of the group "zerobench.models".
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import field, make_dataclass
from importlib.metadata import entry_points
from typing import Any, get_type_hints

from torch import nn

from . import huggingface
from .gpt import GPT
from .mlp import MLP

Builder = Callable[..., nn.Module]

_BUILT_IN: dict[str, Builder] = {"gpt": GPT, "mlp": MLP, "huggingface": huggingface.build}
_registered: dict[str, Builder] = {}

FILLED = ("vocabulary", "sequence")
"""Parameters of a user's builder that the run fills in."""


def register_model(name: str, build: Builder) -> None:
    """Makes `model=name` build `build(**options)`, its options being the function's keyword parameters.

    Every parameter but `vocabulary` and `sequence` needs a default, and a type among int, float, str and
    bool. Raises ValueError otherwise, or for a name that is taken.
    """
    if not name.isidentifier():
        raise ValueError(f"register_model: {name!r} is no usable name; use letters, digits and _")
    if name in _BUILT_IN or _registered.get(name, build) is not build:
        raise ValueError(f"register_model: the name {name!r} is taken")
    schema_of(name, build)
    _registered[name] = build


def registered_models() -> dict[str, Builder]:
    """Users' models: registered ones, and those that installed packages offer by entry points."""
    for point in entry_points(group="zerobench.models"):
        if point.name not in _registered:
            register_model(point.name, point.load())
    return dict(_registered)


def schema_of(name: str, build: Builder, base: type = object) -> type:
    """A dataclass, below `base`, of the builder's options, with a `kind` that names the model."""
    hints = get_type_hints(build)
    fields: list[Any] = [("kind", str, field(default=name))]
    for parameter in inspect.signature(build).parameters.values():
        kind = hints.get(parameter.name, type(parameter.default))
        if parameter.name in FILLED:
            fields.append((parameter.name, int | None, field(default=None)))
        elif parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ValueError(f"register_model: {name}'s parameter {parameter.name} cannot be given by name")
        elif parameter.default is parameter.empty or kind not in (int, float, str, bool):
            raise ValueError(
                f"register_model: {name}'s parameter {parameter.name} needs a default and a type among"
                " int, float, str, bool"
            )
        else:
            fields.append((parameter.name, kind, field(default=parameter.default)))
    return make_dataclass(f"{name}_options", fields, bases=(base,))


def build(kind: str, options: dict[str, Any]) -> nn.Module:
    """Builds model `kind` from its resolved options."""
    builder = _BUILT_IN.get(kind) or registered_models()[kind]
    return builder(**options)
