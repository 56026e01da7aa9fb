"""Activations of a cell's model without an engine: their peak, and the bytes that move to host memory.

The peak comes from the model's forward and backward on fake tensors, observed by the ledger, without engine or ranks;
the engine causes any excess in a run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ..config.cell import CellConfig
from ..config.combinations import activation_policy
from ..config.schema import Gpt, GptMoe
from ..fake import world_of_tensors
from ..host.environment import FAKE
from ..zero import labels

KINDS = ("gpt", "gpt_moe", "mlp")
"""Models whose activations do not depend on values, unless experts are separate and their routing is learned."""

DATA = ("text", "synthetic")
"""Data whose batches are tokens."""


def of(config: CellConfig, batches: Any, build: Callable[[CellConfig], nn.Module]) -> int | None:
    """Returns the peak bytes on the device, for the model that `build` makes from a resolved cell. None if there is no
    prediction: for GPUs, whose kernels keep other tensors, for users' models and data, for tensor parallelism, if a
    policy moves activations, and for fake tensors, whose run is itself such a prediction.
    """
    moved = config.activation.name != "none" or config.arena or config.tensor_parallel > 1  # no groups are there now
    if config.device != "cpu" or config.tensors == FAKE or moved:
        return None
    if config.model.kind not in KINDS or config.data.name not in DATA:
        return None
    if isinstance(config.model, GptMoe) and config.model.separate_experts and config.model.routing == "learned":
        return None
    return activation_bytes(lambda: build(config), batches.batch(0, 0))


def depends_on(config: CellConfig) -> str:
    """Returns as text everything that `of` depends on: cells with equal texts have the same prediction."""
    cast = None if config.precision.name == "fp32" else (config.precision, config.strategy.name)
    model = config.model_options, config.model.kind, config.data, config.micro_batch, config.sequence, config.compile
    return repr((model, cast, config.activation, config.arena, config.device, config.tensors, config.deterministic))


def activation_bytes(build: Callable[[], nn.Module], inputs: Sequence[torch.Tensor]) -> int:
    """Returns the peak bytes of activations in a forward and backward of the model, which returns a loss, on `inputs`,
    of which only shapes and dtypes are used. Propagates the error of a model that reads values.
    """
    from ..probes.ledger import ShapesOnly  # not needed by the timed pass, which imports this module, too

    with world_of_tensors(fake=True) as world:
        with world.building():
            model = build()
        batch = [torch.zeros(tensor.shape, dtype=tensor.dtype) for tensor in inputs]
        with ShapesOnly("cpu") as ledger:
            for name, parameter in model.named_parameters():
                ledger.on_tensor(parameter, labels.PARAMETERS, name)
                if parameter.requires_grad:
                    parameter.register_hook(lambda gradient: ledger.on_tensor(gradient, labels.GRADIENTS, ""))
            for tensor in batch:
                ledger.on_tensor(tensor, labels.INPUTS, "batch")
            ledger.begin()
            ledger.enter_phase("forward")
            loss = model(*batch)
            ledger.enter_phase("backward")
            loss.backward()
            ledger.end("step")
    return ledger.sums.extremes["step"].highest[labels.ACTIVATIONS]


def moved_bytes(config: CellConfig) -> int | None:
    """Returns the bytes of activations that a rank sends to host memory in a step, and fetches back. None if there is
    no prediction: for models other than our GPT, with adapters, with chunked MLPs, or with tensor parallelism unless
    blocks are recomputed. All layers except the last send the tensors that they keep: Korthikanti et al., Reducing
    Activation Recomputation, arXiv 2205.05198, section 4, without dropout and with fused attention.
    """
    model, policy = config.model, activation_policy(config)
    if policy.keep != "host":
        return 0
    recomputes = config.recomputes or policy.recompute
    is_cut = config.tensor_parallel > 1 and not recomputes
    if not isinstance(model, Gpt) or model.lora or model.mlp_chunks > 1 or is_cut:
        return None
    tokens = config.sequence * config.micro_batch
    stream = config.precision.dtype.itemsize * tokens * model.hidden
    norms_and_attention, mlp = [stream] * 5, [4 * stream] * 2
    kept = [*norms_and_attention, 3 * stream, 4 * model.heads * tokens, *mlp]  # queries, keys and values; log-sum-exp
    if recomputes:
        kept = [stream]
    parts = config.tensor_parallel if policy.partition else 1
    moved = sum(size for size in kept if size >= policy.least_bytes) // parts
    return config.accumulation * (model.layers - 1) * moved
