"""Builds a cell's model, places it on its device, and derives the facts that theory and estimates need."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .. import models
from ..config.cell import CellConfig
from ..config.combinations import activation_policy
from ..fake.world import Undrawn
from ..models.compiled import compile_blocks
from ..models.gpt import GPT
from ..models.linears import TensorAxis
from ..strategies import spec_of
from ..theory.shapes import ROOT, ParameterShape
from ..zero.activations import policies as residual
from ..zero.modules.wrapping import default_units, unit_of_parameters
from ..zero.parameters import meta_init
from ..zero.precision import TRAINED
from ..zero.units.root import is_read_anywhere, is_read_in_backward, owners


@dataclass(frozen=True)
class ModelFacts:
    """Facts about a cell's model, built once on the meta device. `shapes`: theory's view; `weighted`: names of the
    modules without children that have parameters; `units`: of stage 3, in order, each module's path and the name of its
    class.
    """

    shapes: tuple[ParameterShape, ...]
    weighted: frozenset[str]
    units: tuple[tuple[str, str], ...]

    @property
    def psi(self) -> int:
        """Trainable parameters."""
        return sum(shape.numel for shape in self.shapes if shape.trainable)

    @property
    def frozen(self) -> int:
        """Parameters that are not trained, φ."""
        return sum(shape.numel for shape in self.shapes if not shape.trainable)


def facts_of(config: CellConfig) -> ModelFacts:
    """Returns the facts about a resolved cell's model. Cells that differ elsewhere have those of a built-in model in
    common; a user's builder may give another model each time. Errors of the model's builder propagate.
    """
    made_from = repr((
        config.model.kind, config.model_options, activation_policy(config), config.tensor_parallel, config.precision,
        spec_of(config.strategy.name).half, getattr(config.strategy, "upcast_frozen", True), config.optimizer,
    ))  # fmt: skip
    if made_from in _facts:
        return _facts[made_from]
    with torch.device("meta"), Undrawn():
        model = build_model(config)
    leaves = {name: module for name, module in model.named_modules() if not [*module.children()]}
    weighted = frozenset(name for name, module in leaves.items() if [*module.parameters(recurse=False)])
    units = tuple((name, type(unit).__name__) for name, unit in default_units(model))
    optimizer = config.optimizer
    facts = ModelFacts(tuple(shapes_of(model, optimizer.owned(model), optimizer.block_numel)), weighted, units)
    if config.model.kind in (*models.OWN, "huggingface"):
        if len(_facts) == MOST_FACTS:
            _facts.clear()
        _facts[made_from] = facts
    return facts


_facts: dict[str, ModelFacts] = {}
"""Configuration of a built-in model -> its facts."""

MOST_FACTS = 100
"""Models whose facts are kept at a time."""


def facts_if_any(config: CellConfig) -> ModelFacts | None:
    """Returns the facts; None if a user's builder does something that the meta device does not support."""
    try:
        return facts_of(config)
    except Exception:  # its run raises the same error, and reports it
        return None


def place_model(config: CellConfig, device: torch.device, axis: TensorAxis | None = None) -> nn.Module:
    """Returns the model on its device, with `axis` this rank's part of it; with strategy.construct=meta, placeholders
    that the engine fills.
    """
    if not config.strategy.is_meta:
        with device if config.draw_on == "device" else nullcontext():
            return build_as_run(config, axis).to(device)
    with torch.device("meta"):
        model = build_as_run(config)
    meta_init.use_placeholders(model, device)
    return model


def build_as_run(config: CellConfig, axis: TensorAxis | None = None) -> nn.Module:
    """Builds the model, with its blocks compiled at their first call if the cell says so."""
    model = build_model(config, axis)
    if config.compile == "blocks":
        compile_blocks(model)
    return model


def connect_axis(config: CellConfig, device: torch.device) -> TensorAxis | None:
    """Creates the groups of ranks that share a model; None if each rank has its own model. Collective."""
    return None if config.tensor_parallel == 1 else TensorAxis.connect(config.tensor_parallel, device.type)


def initial_options(config: CellConfig, device: torch.device) -> dict[str, Any]:
    """Returns the options with which the engine fills a model of placeholders."""
    meta = config.strategy.is_meta
    return {"initial_device": device} if meta and config.draw_on == "device" else {}


def build_model(config: CellConfig, axis: TensorAxis | None = None) -> nn.Module:
    """Builds the model of a resolved cell in training mode, with the cell's activation policy for its blocks. It is
    built in fp32 and cast, so that a seed gives the same model. `axis`: of the ranks that share it, if the model will
    run.
    """
    model = models.build(config.model.kind, config.model_options)
    if config.tensor_parallel > 1:
        assert isinstance(model, GPT)
        model.cut(axis or TensorAxis(config.tensor_parallel))
    residual.apply(model, activation_policy(config), None if axis is None else axis.mesh)
    return config.precision.cast(model, config.strategy.name, getattr(config.strategy, "upcast_frozen", True))


def schedule_options(config: CellConfig) -> dict[str, Any]:
    """Returns the fields of theory's Schedule that depend only on the cell."""
    in_head = config.model_options.get("loss_chunks", 1) > 1
    by_block = config.compile == "blocks"
    return {"recomputes": config.recomputes, "arena": config.arena, "by_block": by_block, "head_is_loss": in_head}


def shapes_of(model: nn.Module, owned: Collection[nn.Parameter] = (), block_numel: int = 1) -> list[ParameterShape]:
    """Returns theory's view of a model: its unique parameters in order, and their stage 3 units. `owned`: matrices that
    the optimizer needs whole; `block_numel`: number of elements whose optimizer states cannot be cut.
    """
    units = unit_of_parameters(model, default_units(model))
    uses: dict[nn.Parameter, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        uses[parameter] = uses.get(parameter, 0) + 1
    numbers = {p: number for number, p in enumerate(model.parameters())}
    beside: dict[nn.Parameter, int] = {}
    for module in model.modules():
        weight, bias = (module._parameters.get(name) for name in ("weight", "bias"))
        if weight is not None and bias is not None:
            beside |= {weight: numbers[bias], bias: numbers[weight]}
    traits: dict[nn.Parameter, dict[str, Any]] = {
        p: {"reads": (), "pinned": False, "block_numel": block_numel} for p in numbers
    }
    for p in owned:
        traits[p]["matrix"] = tuple(p.shape)
    for owner, p in owners(model, {p for p, unit in units.items() if unit == ROOT}):
        traits[p]["reads"] += (is_read_in_backward(owner),)
        traits[p]["pinned"] |= is_read_anywhere(model, owner)
    sizes = {p: (p.numel(), p.element_size()) if p.dtype in TRAINED else (p.nbytes, 1) for p in numbers}  # as bytes
    return [ParameterShape(*sizes[p], p.requires_grad, units[p], uses[p], beside.get(p), **traits[p]) for p in numbers]
