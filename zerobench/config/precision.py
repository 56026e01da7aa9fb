"""A resolved `precision` section: what of it makes no sense, and what it is to the model, the engine and the theory."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..strategies import spec_of
from ..theory.shapes import PrecisionShape
from ..zero.options import TILE_BYTES
from ..zero.precision import DTYPES, LossScaling

Section = dict[str, Any]


def fill_in(section: Section, strategy: str, device: str) -> None:
    """Makes explicit, in place, what was left open: as the strategy has it."""
    usual = {"gradient_dtype": section["name"], "tile_bytes": TILE_BYTES[device]}
    defaults = {**usual, **spec_of(strategy).precision_defaults}
    section["gradient_dtype"] = section["gradient_dtype"] or defaults["gradient_dtype"]
    section["wire_dtype"] = section["wire_dtype"] or section["gradient_dtype"]
    section["tile_bytes"] = section["tile_bytes"] or defaults["tile_bytes"]


def problems_of(section: Section, strategy: str) -> list[str]:
    """Sentences on what of a filled-in section makes no sense, or is not to be had under `strategy`."""
    name, known, spec = section["name"], ", ".join(DTYPES), spec_of(strategy)
    keys = ("gradient_dtype", "wire_dtype")
    unknown = [f"precision.{key}={section[key]}: use one of {known}" for key in keys if section[key] not in DTYPES]
    if unknown:
        return unknown
    problems = []
    if section["gradient_dtype"] not in (name, "fp32"):
        words = f"the gradients of a {name} model are accumulated in {name}" + " or fp32" * (name != "fp32")
        problems.append(f"precision.gradient_dtype={section['gradient_dtype']}: {words}")
    if spec.half == "casts":
        problems += _casting_problems(section, strategy)
    elif not spec.composes.gradient_dtypes:
        words = f"strategy={strategy} keeps and sends gradients in the model's dtype, {name}; leave it out"
        problems += [f"precision.{key}={section[key]}: {words}" for key in keys if section[key] != name]
    if name != "fp32" and spec.half is None:
        problems.append(f"precision={name}: strategy={strategy} has no fp32 master weights here; use precision=fp32")
    elif name == "fp16" and spec.half == "masters" and not spec.takes("loss_scaling"):
        problems.append(f"precision=fp16: strategy={strategy} scales no losses here; use bf16 or fp32")
    return problems + (_scaling_problems(section) if name == "fp16" else [])


def _casting_problems(section: Section, strategy: str) -> list[str]:
    name, problems = section["name"], []
    if name == "fp16":
        problems.append(f"precision=fp16: strategy={strategy} scales no losses here; use bf16 or fp32")
    if section["gradient_dtype"] != name:
        words = f"strategy={strategy} has whole gradients in {name} and their shards in fp32; leave it out"
        problems.append(f"precision.gradient_dtype={section['gradient_dtype']}: {words}")
    if section["wire_dtype"] not in (name, "fp32"):
        words = f"strategy={strategy} reduces in {' or '.join(dict.fromkeys((name, 'fp32')))}"
        problems.append(f"precision.wire_dtype={section['wire_dtype']}: {words}")
    return problems


def _scaling_problems(section: Section) -> list[str]:
    if section["initial_scale"] is None:
        words = "fp16 needs loss scaling, for gradients below 6e-8 would be lost; name a scale, as 65536"
        return [f"precision.initial_scale=null: {words}"]
    if section["initial_scale"] < section["minimum_scale"]:
        least = f"it must be at least precision.minimum_scale={section['minimum_scale']:g}"
        return [f"precision.initial_scale={section['initial_scale']:g}: {least}"]
    return []


def cast(model: nn.Module, section: Section, strategy: str) -> nn.Module:
    """The model, built in fp32 whatever the precision, in the dtype that `strategy` wants it in: buffers too.

    Raises ValueError for a model in another dtype.
    """
    for name, parameter in model.named_parameters():
        if parameter.dtype != torch.float32:
            raise ValueError(f"{name} is {parameter.dtype}: build the model in float32; precision casts it")
    return (
        model if section["name"] == "fp32" or spec_of(strategy).half == "casts" else model.to(DTYPES[section["name"]])
    )


def options_of(section: Section, strategy: str) -> dict[str, Any]:
    """Keyword arguments for the engine of `strategy`: what differs from its defaults."""
    name, spec = section["name"], spec_of(strategy)
    if spec.half == "casts" and name != "fp32":
        return {"param_dtype": DTYPES[name], "reduce_dtype": DTYPES[section["wire_dtype"]]}
    if spec.half != "masters":
        return {}
    options: dict[str, Any] = {"tile_bytes": section["tile_bytes"]}
    if section["gradient_dtype"] != spec.precision_defaults.get("gradient_dtype", name):
        options["gradient_dtype"] = DTYPES[section["gradient_dtype"]]
    if section["wire_dtype"] != section["gradient_dtype"]:
        options["wire_dtype"] = DTYPES[section["wire_dtype"]]
    if name == "fp16":
        options["loss_scaling"] = LossScaling(
            section["initial_scale"], section["growth"], section["backoff"], section["interval"],
            section["minimum_scale"],
        )  # fmt: skip
    return options


def shape_of(section: Section, travels: bool = True) -> PrecisionShape:
    """Returns theory's view of it. Without communication (`travels` false) there is no wire dtype."""
    sent = section["wire_dtype" if travels else "gradient_dtype"]
    gradient, wire = (DTYPES[one].itemsize for one in (section["gradient_dtype"], sent))
    casts = section["gradient_dtype"] != sent
    return PrecisionShape(gradient, wire, section["tile_bytes"], casts)


def words_of(section: Section) -> str:
    """ "bf16", with what differs from that: "bf16, gradient_dtype=fp32"."""
    parts, before = [section["name"]], section["name"]
    for key in ("gradient_dtype", "wire_dtype"):
        parts += [f"{key}={section[key]}"] if section.get(key) not in (before, None) else []
        before = section.get(key) or before
    return ", ".join(parts)
