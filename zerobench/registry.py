"""Registries of users' models and data by name; each entry is a builder from a script or package.

A builder is a function whose keyword parameters are its options and become command line keys: each needs a default and
a type among int, float, str and bool, optionally or None. The run fills in some parameters.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, make_dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, get_type_hints

Builder = Callable[..., Any]

TYPES = (int, float, str, bool)


def check_name(function: str, name: str, build: Builder) -> None:
    """Raises ValueError, for a call of `function`, if `name` is not a valid name or `build` not a builder."""
    if not name.isidentifier():
        raise ValueError(f"{function}: {name!r} is no usable name; use letters, digits and _")
    if not callable(build):
        raise ValueError(f"{function}: {name} needs a function that builds it, not {build!r}")


def check_leading(function: str, name: str, build: Builder, leading: int) -> list[inspect.Parameter]:
    """Returns a builder's parameters after the `leading` positional ones. Raises ValueError for one with fewer."""
    parameters = list(inspect.signature(build).parameters.values())
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(positional) < leading:
        raise ValueError(f"{function}: {name}'s builder must be build(model, optimizer, ...), with options after these")
    return parameters[leading:]


def options_of(
    function: str, name: str, build: Builder, filled: Sequence[str] = (), shown: Sequence[str] = (),
    identity: str = "name", base: type = object, leading: int = 0,
) -> type:  # fmt: skip
    """Returns a dataclass, derived from `base`, of the options of a builder registered by `function`, and `identity`.

    `leading`: number of positional parameters that the harness passes; for the others see Registry. Raises ValueError
    for a parameter that cannot be an option.
    """
    hints = get_type_hints(build.__init__ if inspect.isclass(build) else build)
    parameters = check_leading(function, name, build, leading)
    fields: list[Any] = [(identity, str, field(default=name))]
    for parameter in parameters:
        kind = hints.get(parameter.name, type(parameter.default))
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ValueError(f"{function}: {name}'s parameter {parameter.name} cannot be given by name")
        if parameter.name in filled:
            if parameter.name in shown:
                fields.append((parameter.name, int | None, field(default=None)))
        elif parameter.default is parameter.empty or kind not in (*TYPES, *(kind | None for kind in TYPES)):
            raise ValueError(
                f"{function}: {name}'s parameter {parameter.name} needs a default and a type among"
                " int, float, str, bool (or one of them | None)"
            )
        else:
            fields.append((parameter.name, kind, field(default=parameter.default)))
    return make_dataclass(f"{name}_options", fields, bases=(base,))


def source_of(build: Builder) -> bytes:
    """Returns the file that defines a builder; empty if there is none."""
    where = inspect.getsourcefile(build if inspect.isroutine(build) or inspect.isclass(build) else type(build))
    if where is None:
        return b""
    with open(where, "rb") as file:
        return file.read()


@cache
def installed(group: str) -> tuple[EntryPoint, ...]:
    """Returns the entry points of installed packages; cached, since the search reads the metadata of all packages."""
    return tuple(entry_points(group=group))


@dataclass
class Registry:
    """Builders of one group by name. `own`: names taken by built-in choices. `filled`: parameters that the run fills
    in; `shown`: those among them that are also options, where null leaves them to the run. `identity`: the key that
    names the builder in a config.
    """

    function: str
    group: str
    own: tuple[str, ...]
    filled: tuple[str, ...]
    shown: tuple[str, ...]
    identity: str
    builders: dict[str, Builder] = field(default_factory=dict)

    def register(self, name: str, build: Builder) -> None:
        """Registers `build` under `name`. Raises ValueError for a name or a parameter that cannot be used."""
        check_name(self.function, name, build)
        if name in self.own or self.builders.get(name, build) is not build:
            raise ValueError(f"{self.function}: the name {name!r} is taken")
        self.schema_of(name, build)
        self.builders[name] = build

    def all(self) -> dict[str, Builder]:
        """Returns registered builders, and those of installed packages by entry points of `zerobench.GROUP`."""
        for point in installed(self.group):
            if point.name not in self.builders:
                self.register(point.name, point.load())
        return dict(self.builders)

    def schema_of(self, name: str, build: Builder, base: type = object) -> type:
        """Returns a dataclass, derived from `base`, of the builder's options and the key that identifies it."""
        return options_of(self.function, name, build, self.filled, self.shown, self.identity, base)

    def takes(self, name: str, parameter: str) -> bool:
        """Returns whether the builder of that name has such a parameter."""
        return name in self.all() and parameter in inspect.signature(self.all()[name]).parameters

    def source_of(self, name: str) -> bytes:
        """Returns the file that defines the builder of that name; empty if there is none."""
        return source_of(self.all()[name]) if name in self.all() else b""


MODELS = Registry(
    "register_model",
    "zerobench.models",
    own=("gpt", "gpt_moe", "mlp", "huggingface"),
    filled=("vocabulary", "sequence"),
    shown=("vocabulary", "sequence"),
    identity="kind",
)

DATA = Registry(
    "register_data",
    "zerobench.data",
    own=("text", "synthetic"),
    filled=("rank", "world_size", "micro_batch", "accumulation", "sequence", "seed"),
    shown=(),
    identity="name",
)

GROUPS = {"model": MODELS, "data": DATA}
"""Group -> the registry of choices added by users."""


def register_model(name: str, build: Builder) -> None:
    """Makes `model=name` train `build(**options)`, an `nn.Module` in float32 whose `forward`, given a batch, returns
    the loss, a scalar: `forward(tokens, targets)` with our data, or as described in `register_data` with yours.

    The options are the function's keyword parameters, each with a default and a type among int, float, str and bool;
    the run fills in `vocabulary` and `sequence`. Raises ValueError for any other parameter, or a name that is taken.
    Call it at the top level of a script: rank processes import the script to find the model.
    """
    MODELS.register(name, build)


def register_data(name: str, build: Builder) -> None:
    """Makes `data=name` train on what `build(**options)` returns for one rank: a function of (step, micro-batch), both
    from 0, or an iterable such as a DataLoader, which is restarted at its end.

    A batch is a tuple or list (`forward(*batch)`), a dict (`forward(**batch)`) or one object (`forward(batch)`);
    tensors in it, at any depth, are moved to the rank's device, floating-point ones in the dtype of `precision`.

    The options are keyword parameters as for `register_model`; the run fills in `rank`, `world_size`, `micro_batch`
    (samples in a batch), `accumulation`, `sequence` and `seed`, if the function has them. For losses to be equal at
    every world size, samples must depend only on seed and step, and rank r must take its part of them.
    Raises ValueError for a parameter or a name that cannot be used.
    """
    DATA.register(name, build)
