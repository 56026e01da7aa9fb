"""Checks that a run trains like DDP: compares losses and gradient norms with a DDP run of the same training.

The *reference* of a run is a DDP run of the same code on equally many ranks, with the same model, data, seed, optimizer
and precision, whatever else differs (`training_key`). Steps that both runs have are compared, rank by rank. Required
agreement:

    equal    bit for bit, if every sum has DDP's order: on a CPU, N <= 2, our stages, one micro-batch, no clipping
    close    within a tolerance in the first COMPARED steps: other orders round differently, and Adam amplifies that
    lossy    within a wide tolerance, for strategies that lose precision by design (ZeRO++)

Norms are fp64 sums in the strategy's order, so equal norms agree only to NORM_ORDER. A strategy that saves bytes by
training differently fails with `differs`; the message names the first deviation, which is where to look.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from typing import Any

import pandas as pd

from ..config.cell import CellConfig
from ..strategies import spec_of

REFERENCE, EQUAL, CLOSE, DIFFERS, UNCHECKED = "reference", "equal", "close", "differs", "unchecked"
"""Kinds of a verdict."""

COMPARED = 20
"""Number of first steps to which a tolerance applies; later, rounding errors grow without bound."""

NORM_ORDER = 1e-9

TOLERANCES = {"fp32": (1e-5, 1e-4), "bf16": (1e-2, 3e-2), "fp16": (1e-2, 3e-2)}
"""Precision -> largest permitted relative deviations from DDP of a loss and of a norm."""

LOSSY = (5e-2, 2e-1)

SAME = ("model", "huggingface", "data", "seed", "deterministic", "draw_on", "device", "world_size",
        "tensor_parallel", "optimizer", "micro_batch", "accumulation", "sequence", "clip", "clip_norm",
        "compile")  # fmt: skip
"""Sections and keys of a resolved config that determine the training."""

LEAVE_ROUNDING = (
    "model.checkpointing",
    "model.loss_chunks",
    "model.mlp_chunks",
    "model.separate_experts",
    "optimizer.implementation",
    "data.path",
)
"""Keys below SAME that change only rounding, or are compared elsewhere."""

SCALING = ("name", "initial_scale", "growth", "backoff", "interval", "minimum_scale")
"""Precision keys that must agree."""


@dataclass(frozen=True)
class Verdict:
    """The verdict on one run. `kind`: reference, equal, close, differs, or unchecked. `loss`, `norm`: the largest
    relative deviations from DDP; None if nothing was compared.
    """

    kind: str
    message: str
    loss: float | None = None
    norm: float | None = None


def training_key(config: CellConfig) -> str:
    """Returns a hash of the config keys that determine the training: equal for a run and its reference."""
    written = config.as_dict()
    kept = {key: value for key, value in written.items() if key in SAME}
    for key in LEAVE_ROUNDING:
        section, last = key.split(".")
        kept.get(section, {}).pop(last, None)
    kept["precision"] = {key: getattr(config.precision, key, None) for key in SCALING}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:12]


def compare(config: CellConfig, steps: pd.DataFrame, reference: CellConfig, theirs: pd.DataFrame) -> Verdict:
    """Compares a run's steps with a reference's. `config`, `reference`: their resolved configs."""
    exact = rounds_alike(config, reference)
    pairs = _pairs(steps, theirs)
    on_time = config.offload.exact_steps
    if on_time is not None:  # by intent parameters are an update older from then on
        pairs = pairs[pairs["step"] <= on_time]
    if not exact:
        pairs = pairs[pairs["step"] < COMPARED]
    if pairs.empty:
        return Verdict(UNCHECKED, "the run and DDP's have no step in common")
    lossy = bool(config.zeropp.label)
    limits = (0.0, NORM_ORDER) if exact else LOSSY if lossy else TOLERANCES[config.precision.name]
    loss, norm = float(pairs["loss_off"].max()), float(pairs["norm_off"].max())
    count = 1 + int(pairs["step"].max())
    of = f"{count} step{'s' * (count > 1)}" + ", after which updates are late by intent" * (on_time is not None)
    has_norms = pairs[["norm", "norm_ddp"]].notna().all(axis=1).any()
    what = "losses and gradient norms" if has_norms else "losses alone: no norm was taken"
    wrong = pairs[(pairs["loss_off"] > limits[0]) | (pairs["norm_off"] > limits[1])]
    if len(wrong):
        of_step = list(pairs[pairs["step"] == wrong["step"].iloc[0]].itertuples())
        return Verdict(DIFFERS, _blame(next(wrong.itertuples()), of_step, limits, config.world_size), loss, norm)
    if loss == 0 and norm <= NORM_ORDER:
        return Verdict(EQUAL, f"equal to DDP's to the bit over {of}: {what}", loss, norm)
    return Verdict(CLOSE, f"within {loss:.1e} and {norm:.1e} of DDP's over {of}: {what}", loss, norm)


def rounds_alike(config: CellConfig, reference: CellConfig) -> bool:
    """Whether bit equality can be expected: the same sums in the same order by the same kernels."""
    return (
        spec_of(config.strategy.name).rounds_as_reference
        and config.device == "cpu"
        and config.data_ranks <= 2
        and len(config.precision.numbers) == 1
        and config.accumulation == 1  # else a tied parameter's gradients are summed in another order
        and config.clip is None  # torch takes a norm in fp32, and so another coefficient
        and config.optimizer == reference.optimizer
        and config.launch.threads == reference.launch.threads
        and (config.zeropp.label, config.node_size, config.shard_group, config.nodes) == ("", None, None, 1)
    )


def _deviation(ours: float, theirs: float) -> float:
    """Returns |ours − theirs| over |theirs|; two values that are non-finite in the same way are equal."""
    if ours == theirs or (math.isnan(ours) and math.isnan(theirs)):
        return 0.0
    off = abs(ours - theirs) / abs(theirs) if theirs else math.inf
    return off if math.isfinite(off) else math.inf


def _pairs(steps: pd.DataFrame, theirs: pd.DataFrame) -> pd.DataFrame:
    """Returns the steps that both runs have, in order, lowest rank first: loss and norm, those of DDP, and how far they
    deviate. Norms are from any pass that measures them.
    """
    sides = []
    for side in (steps, theirs):
        rows, keys = side[side["mode"] != "traced"], ["step", "rank"]
        losses = rows.drop_duplicates(keys, keep="last").set_index(keys)["loss"]
        norms = rows.groupby(keys)["grad_norm"].first()
        sides.append(pd.DataFrame({"loss": losses, "norm": norms}).astype("float64"))
    pairs = sides[0].join(sides[1].add_suffix("_ddp"), how="inner").sort_index().reset_index()
    for name in ("loss", "norm"):
        both = zip(pairs[name], pairs[f"{name}_ddp"], strict=True)
        pairs[f"{name}_off"] = [_deviation(ours, theirs) for ours, theirs in both]
    pairs.loc[pairs[["norm", "norm_ddp"]].isna().any(axis=1), "norm_off"] = 0.0
    return pairs


def _blame(wrong: Any, of_step: list[Any], limits: tuple[float, float], ranks: int) -> str:
    """Returns a message about the first deviation: in the forward, the gradients, or the previous update. `of_step`:
    the pairs of the same step.
    """
    step, off = wrong.step, next((pair for pair in of_step if pair.loss_off > limits[0]), None)
    if off is None:
        said = f"gradients: their norm at step {step} is {wrong.norm:.6g}, {_factor(wrong.norm, wrong.norm_ddp, ranks)}"
        return f"{said}, and the losses before agree: check the backward and the reduction"
    said = f"the loss of rank {off.rank} at step {step} is {off.loss:.9g} and DDP's {off.loss_ddp:.9g}"
    if step == 0:
        return f"{said}: there was no update yet: check the forward, the data and the initial values"
    return f"{said}, after gradient norms that agree: check the update of step {step - 1}, and parts of gradients"


def _factor(ours: float, theirs: float, ranks: int) -> str:
    """Formats "2.000 times DDP's ...", with the usual cause of that factor if known."""
    if not (math.isfinite(ours) and math.isfinite(theirs) and theirs):
        return f"DDP's {theirs:.6g}"
    factor = ours / theirs
    ratio = f"{factor:.6g} times DDP's"
    if math.isclose(factor, ranks, rel_tol=1e-3) and ranks > 1:
        return f"{ratio}, as a sum over the {ranks} ranks would be in place of the mean"
    if math.isclose(factor, 1 / ranks, rel_tol=1e-3) and ranks > 1:
        return f"{ratio}, as after a second division by the {ranks} ranks"
    if factor < 0.999:
        return f"{ratio}: the gradients of a rank or of a bucket are missing"
    return ratio
