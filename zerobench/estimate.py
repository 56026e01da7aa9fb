"""What a cell will need, before it runs: its model is built without memory (torch's meta device), and theory replays
the schedule that a model of modules in a row has. The run itself is judged by the schedule that it really had.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from . import grouping, offloading, optimizers, policies, precision
from .theory.memory import predict_states, predicts
from .theory.shapes import OptimizerShape, PrecisionShape, Schedule
from .theory.traffic import predict_volume
from .worker import build_model, shapes_of
from .zero import STAGES


@dataclass(frozen=True)
class Estimate:
    """`psi` trainable parameters; bytes of the states on the fullest rank; elements moved a step over psi.

    The last two are None for a strategy that theory has no schedule for.
    """

    psi: int
    states_bytes: int | None = None
    volume_psi: float | None = None


def training_shapes(config: dict[str, Any]) -> tuple[OptimizerShape, PrecisionShape]:
    """What theory needs to know of how a resolved cell is trained."""
    travels = config["world_size"] > 1 or config["strategy"]["name"] not in STAGES
    return optimizers.shape_of(config["optimizer"]), precision.shape_of(config["precision"], travels)


def estimate(config: dict[str, Any]) -> Estimate:
    """The prediction for a resolved cell. What the model's own builder raises comes through."""
    with torch.device("meta"):
        shapes = shapes_of(build_model(config))
    schedule = replace(Schedule.sequential(shapes, config["accumulation"]), **policies.of_schedule(config))
    ranks = config["world_size"]
    psi = sum(shape.numel for shape in shapes if shape.trainable)
    if not predicts(config["strategy"]):
        return Estimate(psi)
    groups = grouping.shape_of(config)
    states = predict_states(
        config["strategy"], schedule, ranks, *training_shapes(config), groups, offloading.shape_of(config)
    )
    volume = predict_volume(config["strategy"], schedule, ranks, groups)
    return Estimate(psi, states.states_bytes, volume / psi if psi else 0.0)
