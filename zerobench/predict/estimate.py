"""Predicts a cell's needs before it runs: its model is built on torch's meta device, and theory replays the schedule of
a sequential model. The run itself is compared with predictions for its real schedule.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..config.cell import CellConfig
from ..config.combinations import activation_policy
from ..config.schema import Gpt
from ..strategies import predicts, shape_of, spec_of
from ..theory.closed_forms import Formula, between_nodes_formula, explained_volume, floor_bytes, state_formulas
from ..theory.groups import GroupShape, tensor_parallel_bytes
from ..theory.replay.states import Prediction, explained, fullest_ranks, predict_states
from ..theory.replay.traffic import Links, predict_links, predict_traffic
from ..theory.shapes import OptimizerShape, PrecisionShape, Schedule, TierShape
from ..theory.strategy import StrategyShape
from . import activations as own_activations
from .build import ModelFacts, facts_if_any, facts_of, schedule_options


@dataclass(frozen=True)
class Estimate:
    """The prediction for a cell. `psi`: trainable parameters, `frozen`: others; bytes of the states on the rank that
    uses most, on the device, in host memory, in files; elements moved per step over psi; bytes that a rank sends to
    other nodes; bytes between tiers per step, over all ranks.

    All except `psi` and `frozen` are None for a strategy that theory has no schedule for.
    """

    psi: int
    frozen: int = 0
    states_bytes: int | None = None
    volume_psi: float | None = None
    host_bytes: int | None = None
    file_bytes: int | None = None
    down_bytes: int | None = None
    up_bytes: int | None = None
    between_bytes: int | None = None
    floor_bytes: int | None = None
    """The paper's formula for the states, without terms in flight."""


def training_shapes(config: CellConfig) -> tuple[OptimizerShape, PrecisionShape]:
    """Returns theory's view of a resolved cell's training."""
    return config.optimizer.theory_shape(), config.precision.theory_shape(config.data_ranks > 1)


def theory_of(
    config: CellConfig,
) -> tuple[StrategyShape, tuple[GroupShape, OptimizerShape, PrecisionShape, TierShape]]:
    """Returns theory's view of a resolved cell whose strategy it predicts: the strategy, and the rest of the cell."""
    rest = (config.groups, *training_shapes(config), config.offload.theory_shape())
    return shape_of(config.strategy.values()), rest


def estimate(config: CellConfig) -> Estimate:
    """Returns the prediction for a resolved cell. Errors of the model's builder propagate."""
    schedule = _schedule_of(config)
    shapes = schedule.shapes
    psi = sum(shape.numel for shape in shapes if shape.trainable)
    frozen = sum(shape.numel for shape in shapes) - psi
    if not predicts(config.strategy.values()):
        return Estimate(psi, frozen)
    strategy, rest = theory_of(config)
    groups, _, precision, _ = rest
    states, links = predict_states(strategy, schedule, *rest), links_of(config, schedule)
    moved = predict_traffic(strategy, schedule, groups, precision)
    down, up = (links.down, links.up) if links is not None else (None, None)
    return Estimate(
        psi, frozen, states.states_bytes, moved.volume / psi if psi else 0.0, states.host_bytes, states.file_bytes,
        down, up, round(moved.between), floor_bytes(strategy, shapes, *rest),
    )  # fmt: skip


def formulas_of(config: CellConfig, schedule: Schedule, states: Prediction | None = None) -> dict[str, Formula]:
    """Returns the closed forms of a resolved cell whose strategy theory predicts, with the terms in flight beyond them:
    for each category of states and their sum, for the volume, and for the bytes that ZeRO-3 sends between nodes.
    `states`: the replay's prediction, if known.
    """
    strategy, rest = theory_of(config)
    groups, _, precision, _ = rest
    states = states or predict_states(strategy, schedule, *rest)
    formulas = explained(state_formulas(strategy, schedule.shapes, *rest), states)
    formulas["volume"] = explained_volume(strategy, schedule, groups)
    if strategy.theory.parameters and groups.nodes[1] > 1:
        formulas["between nodes"] = between_nodes_formula(strategy, schedule, groups, precision)
    return formulas


def held_bytes(config: CellConfig) -> tuple[int, int] | None:
    """Returns the bytes of a resolved cell's states on the rank that uses most, on the device and in host memory; for
    another library that partitions like a stage, the paper's formula; None if theory has neither. Errors of the model's
    builder propagate.
    """
    if not predicts(config.strategy.values()):
        formula = closed_form(config, facts_of(config))
        return None if formula is None else (formula, 0)
    strategy, rest = theory_of(config)
    states = predict_states(strategy, _schedule_of(config), *rest)
    return states.states_bytes, states.host_bytes


def _schedule_of(config: CellConfig, facts: ModelFacts | None = None) -> Schedule:
    shapes = (facts or facts_of(config)).shapes
    return replace(Schedule.sequential(shapes, config.accumulation), **schedule_options(config))


def closed_form(config: CellConfig, facts: ModelFacts) -> int | None:
    """Returns the paper's formula for the states of a resolved cell, in bytes, also for other libraries that partition
    like a stage; None if there is none.
    """
    section = config.strategy.values()
    own = spec_of(section["name"])
    theory = spec_of(own.partitions_as).theory if own.partitions_as else own.theory
    if theory is None:
        return None
    strategy, trained = StrategyShape.of(theory, section), training_shapes(config)
    return floor_bytes(strategy, facts.shapes, config.groups, *trained, config.offload.theory_shape())


def links_of(config: CellConfig, schedule: Schedule) -> Links | None:
    """Returns the bytes between tiers in a step of a resolved cell, over all ranks, for a strategy that theory
    predicts; None if activations that cannot be predicted move to host memory.
    """
    activations = own_activations.moved_bytes(config)
    if activations is None:
        return None
    states, moved = links_of_states(config, schedule), activations * config.world_size
    return replace(states, down=states.down + moved, up=states.up + moved)


def links_of_states(config: CellConfig, schedule: Schedule, rank: int | None = None) -> Links:
    """Returns the bytes of states between tiers in a step, over all ranks or for one."""
    strategy, rest = theory_of(config)
    return predict_links(strategy, schedule, *rest, norms_of(config), rank)


def simulated_ranks(config: CellConfig, facts: ModelFacts | None = None) -> list[int]:
    """Returns the ranks of a simulated world of which one has the peak, the one with the largest states first: `rank`,
    or those that theory leaves. `facts`: about the model, if known. An error of the model's builder is left to the
    rank, which raises and reports it.
    """
    if config.rank is not None:
        return [config.rank]
    facts = facts or facts_if_any(config)
    if facts is None:
        return [0]
    if not predicts(config.strategy.values()):
        optimizer = config.optimizer.theory_shape()
        return [spec_of(config.strategy.name).fullest_rank(facts.shapes, config.world_size, optimizer)]
    strategy, rest = theory_of(config)
    ranks = fullest_ranks(strategy, _schedule_of(config, facts), *rest)
    return [rank * config.tensor_parallel for rank in ranks]


def host_bytes_beyond(config: CellConfig, schedule: Schedule, rank: int) -> int:
    """Returns by how many bytes the rank that uses most host memory exceeds `rank`: the simulated rank is the one that
    uses most device memory, which may be another. 0 if the cell names a rank.
    """
    if config.rank is not None or not predicts(config.strategy.values()):
        return 0
    strategy, rest = theory_of(config)
    if rest[-1].medium is None:
        return 0
    fullest, own = (predict_states(strategy, schedule, *rest, number).host_bytes for number in (None, rank))
    return fullest - own


def norms_of(config: CellConfig) -> int:
    """Returns how often a step of a resolved cell computes the norm of gradients."""
    return int(config.clip is not None or config.precision.scales)


def tensor_axis_bytes(config: CellConfig) -> dict[str, int]:
    """Returns collective -> bytes that a rank of a resolved cell sends in a step to the ranks that share its model."""
    ranks, model, policy = config.tensor_parallel, config.model, activation_policy(config)
    if ranks == 1 or not isinstance(model, Gpt):
        return {}
    size = config.micro_batch * config.sequence * model.hidden * config.precision.dtype.itemsize
    partitions = policy.partition and size >= policy.least_bytes
    return tensor_parallel_bytes(ranks, model.layers, size, config.recomputes, partitions, config.accumulation)
