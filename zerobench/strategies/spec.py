"""One row of the table of strategies: all facts about one strategy, so that no other code lists strategies by name.

Partition of whole parameters as in torch's ZeroRedundancyOptimizer: the largest parameter first, each to the rank with
the fewest elements so far, the lowest rank in a tie (`_partition_parameters`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple

from ..theory.shapes import OptimizerShape, ParameterShape
from ..theory.strategy import StrategyTheory

Build = Callable[..., Any]
"""`build(model, optimizer, **options)` returns an engine (engine.py). It imports its dependencies when it is called."""

Tuning = Mapping[str, tuple[Any, Any]]
"""Option -> (the peer's own default, the value under `strategy.tuned`); for options that are null."""

Half = Literal["masters", "casts"] | None
"""For precision=bf16: the engine keeps fp32 masters of a bf16 model, or casts an fp32 model as it gathers."""


class Look(NamedTuple):
    """Points and lines of a strategy in figures, in matplotlib's notation."""

    color: str
    marker: str
    line: str | tuple[int, tuple[int, ...]]


@dataclass(frozen=True)
class Composition:
    """The features that a strategy can be combined with, besides policies for activations."""

    offload: tuple[str, ...] = ()
    """Model states that may leave the device: optimizer, gradients, parameters."""
    groups: bool = False
    """Collectives in groups of ranks: node_size and shard_group."""
    zeropp: bool = False
    fused_buffers: bool = False
    arena: bool = False
    clip: bool = True
    compiles: bool = True
    """Blocks compiled to graphs by torch.compile."""
    gradient_dtypes: bool = False
    """Gradients in another dtype than the model's, on a rank or in communication."""
    tensor_parallel: bool = False
    """Its own process group, next to ranks that share the model's matrices."""
    owned: bool = False
    """Optimizers that need whole matrices, each owned by one rank: Muon."""
    saves: bool = False
    """Its engine has `save(path, asynchronous=...)`, which returns a handle if a thread writes."""
    simulated: bool = False
    """A single rank in a process group that sends nothing."""


ALONE = Composition()
"""The composition of a strategy that supports only the defaults."""


@dataclass(frozen=True)
class StrategySpec:
    """All facts about a strategy. `options`: a dataclass whose fields are the keys `strategy.FIELD`."""

    name: str
    build: Build
    options: type
    label: str
    look: Look
    theory: StrategyTheory | None = None
    """None: it is only measured, and predicted columns are empty."""
    partitions_as: str | None = None
    """For a peer, whose schedule theory does not cover: our stage that partitions the same states."""
    fullest_rank: Callable[[Sequence[ParameterShape], int, OptimizerShape], int] = lambda shapes, ranks, optimizer: 0
    """Used without theory: returns the rank with the most bytes, given the parameters, the number of ranks and the
    optimizer. By default the first rank: all are alike, or the last ones are padded.
    """
    composes: Composition = ALONE
    refused_optimizers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """torch's optimizer -> its implementations that cannot update the strategy's parameters."""
    half: Half = None
    precision_defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of null keys of `precision`, if they differ from other strategies'."""
    tuning: Tuning = field(default_factory=dict)
    requires: str | None = None
    """A module besides torch that must be installed."""
    install: str = ""
    """How it is installed, appended to an error message that it is not."""
    reference: Mapping[str, Any] | None = None
    """Options of the reference strategy in a run that other runs are compared with."""
    rounds_as_reference: bool = False
    """True if on one and two ranks it sums the same values as the reference, in the same order."""
    settles_after: int = 2
    """Steps after which all later ones are alike in memory and traffic: two if an engine rearranges its buffers after
    the first.
    """
    read_by_harness: tuple[str, ...] = ("accumulate",)
    """Options for the harness: the builder gets them only if its parameters name them."""

    @property
    def of_user(self) -> bool:
        """True for a row that a user's script or an installed package has registered."""
        return not self.build.__module__.startswith(f"{__package__}.")

    @property
    def installed(self) -> bool:
        """True if the module that it requires is installed."""
        return self.requires is None or find_spec(self.requires) is not None

    @property
    def description(self) -> str:
        """The docstring of a user's builder, or of a built-in strategy's options, as one line."""
        text = " ".join((inspect.getdoc(self.build if self.of_user else self.options) or "").split())
        text = text or "registered by the script or the package of a user"
        return f"{self.label}: {text}" if self.of_user and self.label != self.name else text

    def filled(self, section: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a config section with every null that follows `tuned` filled in."""
        tuned = bool(section.get("tuned"))
        chosen = {key: pair[tuned] for key, pair in self.tuning.items() if section[key] is None}
        return {**section, **chosen}

    def takes(self, parameter: str, by_name_alone: bool = False) -> bool:
        """Returns True if the builder accepts a keyword `parameter`; `by_name_alone`: not through **options."""
        parameters = inspect.signature(self.build).parameters
        rest = any(p.kind is p.VAR_KEYWORD for p in parameters.values()) and not by_name_alone
        return rest or parameter in parameters

    def engine_options(self, section: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the builder's keyword arguments from a resolved section."""
        kept = {"name", *(key for key in self.read_by_harness if not self.takes(key, by_name_alone=True))}
        return {key: value for key, value in section.items() if key not in kept}


def fullest_rank(shapes: Sequence[ParameterShape], ranks: int, optimizer: OptimizerShape) -> int:
    """Returns the rank whose optimizer keeps the most bytes for its trainable parameters; the lowest in a tie."""
    given, kept = [0] * ranks, [0] * ranks
    for shape in sorted(shapes, key=lambda shape: -shape.numel):
        rank = given.index(min(given))
        given[rank] += shape.numel
        kept[rank] += optimizer.bytes_of(shape.numel, shape.updated_bytes) * shape.trainable
    return kept.index(max(kept))
