"""Values of theory/'s closed forms per parameter, for the rows."""

from __future__ import annotations

from zerobench.theory.closed_forms import between_nodes_formula, floor_bytes, volume_formula
from zerobench.theory.groups import GroupShape
from zerobench.theory.shapes import NOWHERE, OptimizerShape, ParameterShape, PrecisionShape, Schedule, TierShape
from zerobench.theory.strategy import DDP, MEGATRON, ZERO1, ZERO2, ZERO3, StrategyShape

from ..activation_formula import GptShape, layer_bytes

PSI = 10**9
ADAM = OptimizerShape(2, 1)
MIXED = PrecisionShape(2, 2)
"""Half-precision gradients, cast to fp32 tile by tile."""
AT_ONCE = PrecisionShape(2, 2, None)
"""Half-precision gradients, cast to fp32 all at once."""
WIDE = PrecisionShape(4, 4)
"""fp32 gradients."""

THEORIES = {"ddp": DDP, "zero1": ZERO1, "zero2": ZERO2, "zero3": ZERO3, "megatron": MEGATRON}


def _model(element_bytes: int) -> list[ParameterShape]:
    return [ParameterShape(PSI, element_bytes, True, "blocks.0")]


def states_per_parameter(
    strategy: str, ranks: int, precision: PrecisionShape = MIXED, element_bytes: int = 2, tiers: TierShape = NOWHERE
) -> float:
    """Returns the bytes of model states on a rank's device per parameter, under Adam."""
    shape = StrategyShape(THEORIES[strategy])
    return floor_bytes(shape, _model(element_bytes), GroupShape(ranks), ADAM, precision, tiers) / PSI


def volume_per_parameter(strategy: str) -> float:
    """Returns the elements that a rank moves in a step per parameter."""
    return volume_formula(StrategyShape(THEORIES[strategy]), Schedule.sequential(_model(2)), 64).value / PSI


def crossing_per_element(ranks: int, node_size: int, **zeropp: int | bool | None) -> float:
    """Returns the bytes between nodes in a step of ZeRO-3, as quantities.between_nodes counts them; without scales."""
    groups = GroupShape(ranks, node_size, **zeropp)  # type: ignore[arg-type]
    schedule = Schedule.sequential(_model(2))
    value = between_nodes_formula(StrategyShape(ZERO3), schedule, groups, MIXED).value
    return value / PSI * ranks / (ranks // node_size - 1) / 2


def layer_of_gpt(heads: int, hidden: int, recomputed: bool = False) -> float:
    """Returns the bytes of a layer of our GPT in half precision that forward keeps, over sbh."""
    shape = GptShape(1, hidden, heads, 1, 128, 1, 2, recomputed)
    return 2.0 if recomputed else layer_bytes(shape) / (shape.tokens * hidden)
