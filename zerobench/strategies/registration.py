"""How rows of the table of strategies are added and found. Built-in and users' rows use the same call."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import MISSING, field, fields, is_dataclass, make_dataclass
from typing import Any, get_type_hints
from zlib import crc32

from ..registry import TYPES, check_leading, check_name, installed, options_of, source_of
from ..theory.strategy import StrategyShape, StrategyTheory
from .options import StrategyOptions
from .spec import ALONE, Build, Composition, Look, StrategySpec

FUNCTION, PACKAGES = "register_strategy", "zerobench.strategies"
"""The function's name in error messages, and the entry points by which installed packages offer builders."""

FILLED = (
    "tile_bytes", "gradient_dtype", "wire_dtype", "loss_scaling", "param_dtype", "reduce_dtype", "node_size",
    "shard_group", "zeropp", "offload", "arena", "initial_device",
)  # fmt: skip
"""Parameters of a builder that are not options of the strategy: the run fills them in from its other sections."""

COLORS = ("#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#0072B2", "#D55E00", "#F0E442")
MARKERS = ("*", "d", "8", "H", "1", "x")
"""Looks of rows that do not define one."""

_SPECS: dict[str, StrategySpec] = {}


def register_strategy(
    name: str, build: Build, *, options: type | None = None, theory: StrategyTheory | None = None, label: str = "",
    color: str | None = None, composes: Composition = ALONE, **row: Any,
) -> None:  # fmt: skip
    """Makes `strategy=name` train under the engine that `build(model, optimizer, **options)` returns.

    The engine: `engine(*inputs)` returns the loss, then come `backward(loss)`, `step()` and `zero_grad()`; the rest of
    strategies/engine.py is optional. `options`: a dataclass whose fields are the keys `strategy.FIELD` and keyword
    arguments of `build`; without one the keyword parameters of `build` are the options. Either way each has a default
    and a type among int, float, str and bool, or one of these | None.

    `theory`: a row of zerobench.theory, or None, which leaves predicted columns empty. `label`, `color`: in figures.
    `composes`: the other config features that the engine honors. `row`: other fields of StrategySpec
    (strategies/spec.py).

    Raises ValueError for a name that is taken, or a builder or options that cannot be used. Call it at the top level of
    a script: rank processes import the script to find the strategy.
    """
    check_name(FUNCTION, name, build)
    if name in _SPECS and _SPECS[name].build is not build:
        raise ValueError(f"{FUNCTION}: the name {name!r} is taken")
    if unknown := row.keys() - {one.name for one in fields(StrategySpec)}:
        raise ValueError(f"{FUNCTION}: {name}: {sorted(unknown)[0]} is no field of StrategySpec")
    schema = _schema_of(name, build, options)
    spare = spare_look(crc32(name.encode()))
    row = {"look": spare._replace(color=color or spare.color), **row}
    _SPECS[name] = StrategySpec(name, build, schema, label=label or name, theory=theory, composes=composes, **row)


def spare_look(number: int) -> Look:
    """Returns a look for a strategy that does not define one."""
    return Look(COLORS[number % len(COLORS)], MARKERS[number % len(MARKERS)], (0, (5, 1, 1, 1, 1, 1)))


def specs() -> Mapping[str, StrategySpec]:
    """Returns the table: name -> row, built-in ones first, then those of users' scripts and of installed packages."""
    for point in installed(PACKAGES):
        if point.name not in _SPECS:
            register_strategy(point.name, point.load())
    return _SPECS


def built_in() -> Mapping[str, StrategySpec]:
    """Returns the rows of this package."""
    return {name: spec for name, spec in _SPECS.items() if not spec.of_user}


def find(name: str) -> StrategySpec | None:
    """Returns the row of that name; None for a strategy that another user's script registers."""
    return _SPECS.get(name) or specs().get(name)


def spec_of(name: str) -> StrategySpec:
    """Returns the row of that name. Raises ValueError if there is none."""
    found = find(name)
    if found is None:
        raise ValueError(f"strategy={name}: it is none of {', '.join(specs())}; run the script that registers it")
    return found


def reference() -> StrategySpec:
    """Returns the row that other strategies' training is compared with."""
    return next(spec for spec in _SPECS.values() if spec.reference is not None)


def names_with(feature: str) -> tuple[str, ...]:
    """Returns the strategies that compose with `feature`, a field of Composition."""
    return tuple(name for name, spec in specs().items() if getattr(spec.composes, feature))


def predicts(section: Mapping[str, Any]) -> bool:
    """Returns True if theory covers the strategy of a resolved section; the peers are only measured."""
    found = find(section["name"])
    return found is not None and found.theory is not None


def shape_of(section: Mapping[str, Any]) -> StrategyShape:
    """Returns the shape of a resolved section's strategy for theory. Raises ValueError if theory does not cover it."""
    theory = spec_of(section["name"]).theory
    if theory is None:
        raise ValueError(f"strategy={section['name']}: theory does not cover it")
    return StrategyShape.of(theory, section)


def user_source(name: str) -> bytes:
    """Returns the file that defines a user's builder; empty if built in, since the package's hash covers it."""
    found = find(name)
    return source_of(found.build) if found is not None and found.of_user else b""


def _schema_of(name: str, build: Build, options: type | None) -> type:
    """Returns a dataclass derived from StrategyOptions with the strategy's keys, including `name`."""
    if options is None:
        return options_of(FUNCTION, name, build, leading=2, filled=FILLED, base=StrategyOptions, identity="name")
    if not (isinstance(options, type) and is_dataclass(options)):
        raise ValueError(f"{FUNCTION}: {name}: options must be a dataclass, not {options!r}")
    if issubclass(options, StrategyOptions):
        return options
    check_leading(FUNCTION, name, build, 2)
    hints, parameters = get_type_hints(options), inspect.signature(build).parameters
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    kept: list[Any] = [("name", str, field(default=name))]
    for one in fields(options):
        kind = hints[one.name]
        if one.default is MISSING or kind not in (*TYPES, *(kind | None for kind in TYPES)):
            raise ValueError(
                f"{FUNCTION}: {name}'s option {one.name} needs a default and a type among int, float, str, bool (or one"
                " of these | None)"
            )
        kept.append((one.name, hints[one.name], field(default=one.default)))
        if one.name not in parameters and not takes_any:
            raise ValueError(f"{FUNCTION}: {name}'s builder takes no parameter {one.name}, which is one of its options")
    schema = make_dataclass(f"{name}_options", kept, bases=(StrategyOptions,))
    schema.__doc__ = inspect.getdoc(options)
    return schema
