"""Activations of a cell's model alone: their peak, and the bytes of them that move to host memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..config.cell import CellConfig
from ..config.schema import Gpt
from ..config.zero_r import activation_policy
from ..host.environment import FAKE
from ..sections import known
from ..theory.activations import GptShape, host_bytes

KINDS = ("gpt", "mlp")
"""Models whose control flow does not depend on values, so that their activations can be predicted."""

DATA = ("text", "synthetic")
"""Data that are batches of tokens."""


def of(config: CellConfig, batches: Any, build: Callable[[CellConfig], nn.Module]) -> int | None:
    """Returns the peak bytes on the device, for the model that `build` makes of a resolved cell; None where nothing is
    predicted: for GPUs, whose kernels keep other tensors, for a user's models and data, where a policy moves
    activations, and for fake tensors, whose run is such a prediction itself.
    """
    moved = config.activation.name != "none" or config.arena
    if config.device != "cpu" or config.tensors == FAKE or moved:
        return None
    if config.model.kind not in KINDS or config.data.name not in DATA:
        return None
    from ..probes.fake_run import activation_bytes  # not needed by ranks, which import this module too

    with torch.device("meta"):
        model = build(config)
    return activation_bytes(model, batches.batch(0, 0))


def shape_of(config: CellConfig) -> GptShape:
    """Returns theory's view of a resolved cell with a GPT."""
    model, policy = config.model, activation_policy(config)
    assert isinstance(model, Gpt)
    return GptShape(
        model.layers, model.hidden, model.heads, known(model.vocabulary), config.sequence, config.micro_batch,
        config.precision.dtype.itemsize, model.checkpointing or policy.recompute, policy.keep == "host",
        policy.least_bytes,
    )  # fmt: skip


def moved_bytes(config: CellConfig) -> int | None:
    """Returns the bytes of activations that a rank sends to host memory in a step, and fetches back; None where nothing
    is predicted: for models other than our GPT.
    """
    if activation_policy(config).keep != "host":
        return 0
    if not isinstance(config.model, Gpt):
        return None
    return config.accumulation * host_bytes(shape_of(config))
