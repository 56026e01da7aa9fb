"""Activations of a cell's model by themselves: what they need at most, and what of them waits in host memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..config.activations import activation_policy
from ..theory.activations import GptShape, host_bytes
from ..zero.precision import DTYPES

KINDS = ("gpt", "mlp")
"""Models that look at no values: their activations can be foretold."""

DATA = ("text", "synthetic")
"""Batches of tokens."""


def of(config: dict[str, Any], batches: Any, build: Callable[[dict[str, Any]], nn.Module]) -> int | None:
    """Bytes on the device at most, of the model that `build` makes of a resolved cell; None where nothing is foretold:
    for GPUs, whose kernels keep other things, for models and data of others, and where a policy moves activations.
    """
    moved = config.get("activation", {}).get("name", "none") != "none" or config.get("arena")
    if config["device"] != "cpu" or moved:
        return None
    if config["model"]["kind"] not in KINDS or config["data"]["name"] not in DATA:
        return None
    from ..probes.fake_run import activation_bytes  # not for ranks that do without

    with torch.device("meta"):
        model = build(config)
    return activation_bytes(model, batches.batch(0, 0))


def shape_of(config: dict[str, Any]) -> GptShape:
    """Theory's view of a resolved cell with a GPT."""
    model, policy = config["model"], activation_policy(config)
    return GptShape(
        model["layers"], model["hidden"], model["heads"], model["vocabulary"], config["sequence"],
        config["micro_batch"], DTYPES[config["precision"]["name"]].itemsize,
        model["checkpointing"] or policy.recompute, policy.keep == "host", policy.least_bytes,
    )  # fmt: skip


def moved_bytes(config: dict[str, Any]) -> int | None:
    """Bytes of activations that a rank sends to host memory in a step, and takes back; None where nothing is foretold:
    for models other than our GPT.
    """
    if activation_policy(config).keep != "host":
        return 0
    if config["model"]["kind"] != "gpt":
        return None
    return int(config["accumulation"]) * host_bytes(shape_of(config))
