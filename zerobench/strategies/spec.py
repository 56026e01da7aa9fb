"""One row of the table of strategies: all there is to know of one, so that nothing else lists them by name.

Partition of whole parameters, as torch's ZeroRedundancyOptimizer makes it: the largest parameter first, each to the
rank that has least so far, the lowest of several (`_partition_parameters`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple

from ..theory.shapes import OptimizerShape, ParameterShape, updated_bytes
from ..theory.strategy import StrategyTheory

Build = Callable[..., Any]
"""`build(model, optimizer, **options)` returns an engine (engine.py). It imports what it needs when it is called."""

Tuning = Mapping[str, tuple[Any, Any]]
"""Option -> (the peer's own default, what `strategy.tuned` makes of it); for options that are null."""

Half = Literal["masters", "casts"] | None
"""How precision=bf16 is had: the engine keeps fp32 masters of a bf16 model, or casts an fp32 model as it gathers."""


class Look(NamedTuple):
    """Points and lines of a strategy in figures, in matplotlib's words."""

    color: str
    marker: str
    line: str | tuple[int, tuple[int, ...]]


@dataclass(frozen=True)
class Composition:
    """The features that a strategy composes with. Policies of activations treat the model, and compose with every
    strategy.
    """

    offload: tuple[str, ...] = ()
    """Model states that may leave the device: among optimizer, gradients and parameters."""
    groups: bool = False
    """Collectives in groups of ranks: node_size and shard_group."""
    zeropp: bool = False
    fused_buffers: bool = False
    arena: bool = False
    clip: bool = True
    compiles: bool = True
    """Blocks that torch.compile has made graphs of."""
    gradient_dtypes: bool = False
    """Gradients in another dtype than the model's, on a rank or on the wire."""
    tensor_parallel: bool = False
    """A process group of its own, beside ranks that share the model's matrices."""
    owned: bool = False
    """Optimizers that need whole matrices, which one rank each owns: Muon."""
    simulated: bool = False
    """One rank alone, in a process group that sends nothing."""


ALONE = Composition()
"""The composition of a strategy that knows of nothing beside it."""


@dataclass(frozen=True)
class StrategySpec:
    """All there is to know of a strategy. `options`: a dataclass, whose fields are the keys `strategy.FIELD`."""

    name: str
    build: Build
    options: type
    label: str
    look: Look
    theory: StrategyTheory | None = None
    """None: it is measured only, and predicted columns are empty."""
    partitions_as: str | None = None
    """For a peer, whose schedule theory does not know: our stage that partitions the same states."""
    fullest_rank: Callable[[Sequence[ParameterShape], int, OptimizerShape], int] = lambda shapes, ranks, optimizer: 0
    """Where there is no theory: the rank that holds most, given the parameters, the number of ranks and the optimizer.
    The first, where all are alike or the last ones are padded.
    """
    composes: Composition = ALONE
    refused_optimizers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """torch's optimizer -> those of its implementations that cannot update what the strategy has for parameters."""
    half: Half = None
    precision_defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of null keys of `precision`, where they differ from other strategies'."""
    tuning: Tuning = field(default_factory=dict)
    requires: str | None = None
    """A module beside torch that must be installed."""
    install: str = ""
    """How it is installed, to follow a sentence that says it is not."""
    reference: Mapping[str, Any] | None = None
    """Options of the reference strategy in a run that others are compared with."""
    rounds_as_reference: bool = False
    """On one and two ranks it adds up what the reference adds up, in its order."""
    settles_after: int = 2
    """Steps after which every later one is alike in memory and traffic: two where an engine arranges its buffers
    after the first.
    """
    read_by_harness: tuple[str, ...] = ("accumulate",)
    """Options that are not the engine's: its builder gets them where it names them."""

    @property
    def of_user(self) -> bool:
        """True for a row that a user's script or an installed package has registered."""
        return not self.build.__module__.startswith(f"{__package__}.")

    @property
    def installed(self) -> bool:
        """True if all that it requires is there."""
        return self.requires is None or find_spec(self.requires) is not None

    @property
    def description(self) -> str:
        """The docstring of what builds it, or of our own options, as one line."""
        text = " ".join((inspect.getdoc(self.build if self.of_user else self.options) or "").split())
        text = text or "registered by the script or the package of a user"
        return f"{self.label}: {text}" if self.of_user and self.label != self.name else text

    def filled(self, section: Mapping[str, Any]) -> dict[str, Any]:
        """A section of a config with every null that follows `tuned` filled in."""
        tuned = bool(section.get("tuned"))
        chosen = {key: pair[tuned] for key, pair in self.tuning.items() if section[key] is None}
        return {**section, **chosen}

    def takes(self, parameter: str, by_name_alone: bool = False) -> bool:
        """True if the builder accepts a keyword `parameter`; `by_name_alone`: not by way of **options."""
        parameters = inspect.signature(self.build).parameters
        rest = any(one.kind is one.VAR_KEYWORD for one in parameters.values()) and not by_name_alone
        return rest or parameter in parameters

    def engine_options(self, section: Mapping[str, Any]) -> dict[str, Any]:
        """Keyword arguments for the builder, of a resolved section."""
        kept = {"name", *(key for key in self.read_by_harness if not self.takes(key, by_name_alone=True))}
        return {key: value for key, value in section.items() if key not in kept}


def fullest_rank(shapes: Sequence[ParameterShape], ranks: int, optimizer: OptimizerShape) -> int:
    """Returns the rank whose optimizer keeps most bytes for its trainable parameters; the lowest of several."""
    given, kept = [0] * ranks, [0] * ranks
    for shape in sorted(shapes, key=lambda one: -one.numel):
        rank = given.index(min(given))
        given[rank] += shape.numel
        kept[rank] += optimizer.bytes_of(shape.numel, updated_bytes(shape)) * shape.trainable
    return kept.index(max(kept))
