"""The table of strategies: DDP, our stages and the peers, one row each. A user's script adds rows by the same call.

Engines are imported when they are built: a command that only reads the table loads none of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, field, fields, is_dataclass, make_dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, get_type_hints
from zlib import crc32

from ..records.palette import BLACK, BLUE, GRAY, GREEN, ORANGE, PURPLE, SKY, VERMILION, YELLOW
from ..registry import TYPES, check_leading, check_name, installed, options_of, source_of
from ..theory import strategy as theories
from ..theory.strategy import StrategyShape, StrategyTheory
from . import options
from .options import StrategyOptions
from .spec import ALONE, Build, Composition, Look, StrategySpec, fullest_rank

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
    if unknown := row.keys() - {column.name for column in fields(StrategySpec)}:
        raise ValueError(f"{FUNCTION}: {name}: {sorted(unknown)[0]} is no field of StrategySpec")
    schema = _schema(name, build, options)
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
    if (spec := find(name)) is None:
        raise ValueError(f"strategy={name}: it is none of {', '.join(specs())}; run the script that registers it")
    return spec


def reference() -> StrategySpec:
    """Returns the row that other strategies' training is compared with."""
    return next(spec for spec in _SPECS.values() if spec.reference is not None)


def names_with(feature: str) -> tuple[str, ...]:
    """Returns the strategies that compose with `feature`, a field of Composition."""
    return tuple(name for name, spec in specs().items() if getattr(spec.composes, feature))


def predicts(section: Mapping[str, Any]) -> bool:
    """Returns True if theory covers the strategy of a resolved section; the peers are only measured."""
    spec = find(section["name"])
    return spec is not None and spec.theory is not None


def shape_of(section: Mapping[str, Any]) -> StrategyShape:
    """Returns the shape of a resolved section's strategy for theory. Raises ValueError if theory does not cover it."""
    theory = spec_of(section["name"]).theory
    if theory is None:
        raise ValueError(f"strategy={section['name']}: theory does not cover it")
    return StrategyShape.of(theory, section)


def user_source(name: str) -> bytes:
    """Returns the file that defines a user's builder; empty if built in, since the package's hash covers it."""
    spec = find(name)
    return source_of(spec.build) if spec is not None and spec.of_user else b""


def _schema(name: str, build: Build, options: type | None) -> type:
    """Returns a dataclass derived from StrategyOptions with the strategy's keys, including `name`."""
    if options is None:
        return options_of(FUNCTION, name, build, leading=2, filled=FILLED, base=StrategyOptions, identity="name")
    if not (isinstance(options, type) and is_dataclass(options)):
        raise ValueError(f"{FUNCTION}: {name}: options must be a dataclass, not {options!r}")
    if issubclass(options, StrategyOptions):
        return options
    check_leading(FUNCTION, name, build, 2)
    hints, parameters = get_type_hints(options), inspect.signature(build).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    kept: list[Any] = [("name", str, field(default=name))]
    for option in fields(options):
        key, kind = option.name, hints[option.name]
        if option.default is MISSING or kind not in (*TYPES, *(kind | None for kind in TYPES)):
            raise ValueError(
                f"{FUNCTION}: {name}'s option {key} needs a default and a type among int, float, str, bool (or one of"
                " these | None)"
            )
        kept.append((key, kind, field(default=option.default)))
        if key not in parameters and not takes_any:
            raise ValueError(f"{FUNCTION}: {name}'s builder takes no parameter {key}, which is one of its options")
    schema = make_dataclass(f"{name}_options", kept, bases=(StrategyOptions,))
    schema.__doc__ = inspect.getdoc(options)
    return schema


if TYPE_CHECKING:
    from torch import nn, optim

STAGE = Composition(
    offload=("optimizer", "gradients"), groups=True, fused_buffers=True, arena=True, simulated=True,
    gradient_dtypes=True, owned=True, tensor_parallel=True, saves=True,
)  # fmt: skip
STAGE3 = Composition(
    offload=("optimizer", "gradients", "parameters"), groups=True, zeropp=True, fused_buffers=True, arena=True,
    simulated=True, gradient_dtypes=True, owned=True, tensor_parallel=True, saves=True,
)  # fmt: skip
DEEPSPEED = "it is the extra `peers`: DS_BUILD_OPS=0 pip install --no-build-isolation deepspeed"
SIMULATED = Composition(simulated=True, owned=True, tensor_parallel=True)


def _ddp(
    model: nn.Module, optimizer: optim.Optimizer, bucket_bytes: int, broadcast_buffers: bool, tile_bytes: int,
    **more: Any,
) -> Any:  # fmt: skip
    from ..zero.precision import HALF
    from .ddp import DdpEngine, MasterDdpEngine

    if not broadcast_buffers:  # the default needs no word, and torch 2.13 warns of this one
        more["broadcast_buffers"] = False
    if "group" in more:
        more["process_group"] = more.pop("group")
    more["bucket_cap_mb"] = bucket_bytes / 2**20
    if any(p.dtype in HALF for p in model.parameters()):
        return MasterDdpEngine(model, optimizer, tile_bytes=tile_bytes, **more)
    return DdpEngine(model, optimizer, **more)


def _stage(name: str) -> Callable[..., Any]:
    def build(model: nn.Module, optimizer: optim.Optimizer, **more: Any) -> Any:
        from .. import zero

        return zero.initialize(model, optimizer, name, **more)

    return build


def _peer(module: str, engine: str, **fixed: Any) -> Callable[..., Any]:
    def build(model: nn.Module, optimizer: optim.Optimizer, **more: Any) -> Any:
        return getattr(import_module(f".{module}", __package__), engine)(model, optimizer, **fixed, **more)

    return build


register_strategy(
    "ddp", _ddp, options=options.Ddp, theory=theories.DDP, label="DDP", look=Look(BLACK, "o", "-"), composes=SIMULATED,
    half="masters", reference={"find_unused_parameters": True},
)  # fmt: skip
for _name, _options, _theory, _label, _look, _composes in (
    ("zero1", options.Zero1, theories.ZERO1, "ZeRO-1", Look(ORANGE, "s", "--"), STAGE),
    ("zero2", options.Zero2, theories.ZERO2, "ZeRO-2", Look(BLUE, "^", "-."), STAGE),
    ("zero3", options.Zero3, theories.ZERO3, "ZeRO-3", Look(VERMILION, "D", ":"), STAGE3),
):
    register_strategy(
        _name, _stage(_name), options=_options, theory=_theory, label=_label, look=_look, composes=_composes,
        half="masters", rounds_as_reference=True, settles_after=1, read_by_harness=("accumulate", "mode", "construct"),
    )  # fmt: skip
register_strategy(
    "megatron", _stage("megatron"), options=options.Megatron, theory=theories.MEGATRON, label="Megatron",
    look=Look(GREEN, "P", (0, (5, 1, 1, 1, 1, 1))),
    composes=Composition(simulated=True, gradient_dtypes=True, owned=True), half="masters",
    precision_defaults={"gradient_dtype": "fp32", "tile_bytes": None}, settles_after=1,
)  # fmt: skip
for _fsdp2, _reshards, _label, _look in (
    (options.Fsdp2, True, "FSDP2", Look(SKY, ">", (0, (1, 1)))),
    (options.Fsdp2NoReshard, False, "FSDP2, no reshard", Look(PURPLE, "v", (0, (3, 1, 1, 1)))),
):
    register_strategy(
        _fsdp2.name, _peer("fsdp2", "Fsdp2Engine", reshard=_reshards), options=_fsdp2, label=_label, look=_look,
        half="casts", tuning=options.FSDP2, partitions_as="zero3", settles_after=1,
        refused_optimizers=options.WITHOUT_RULE, read_by_harness=("accumulate", "upcast_frozen"),
    )  # fmt: skip
register_strategy(
    "zero_redundancy", _peer("ddp", "ZeroRedundancyEngine"), options=options.ZeroRedundancy,
    label="ZeroRedundancyOptimizer", look=Look(YELLOW, "<", (0, (3, 1))), tuning=options.ZERO_REDUNDANCY,
    fullest_rank=fullest_rank, partitions_as="zero1",
)  # fmt: skip
for _level, _settings, _tuning, _marker in (
    (1, options.DeepspeedZero1, options.DEEPSPEED_12, "h"),
    (2, options.DeepspeedZero2, options.DEEPSPEED_12, "p"),
    (3, options.DeepspeedZero3, options.DEEPSPEED_3, "X"),
):
    register_strategy(
        f"deepspeed_zero{_level}", _peer("deepspeed", "DeepspeedEngine", level=_level), options=_settings,
        label=f"DeepSpeed ZeRO-{_level}", look=Look(GRAY, _marker, (0, (5, 2))),
        composes=Composition(clip=False, compiles=False),
        tuning=_tuning, partitions_as=f"zero{_level}", requires="deepspeed", install=DEEPSPEED,
    )  # fmt: skip
