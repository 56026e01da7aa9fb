"""Arithmetic of a step, compared with the device's peak: MFU and HFU (PaLM, arXiv 2204.02311, appendix B).

    model FLOPs      matrix products of forward and backward, counted by torch on the meta device
    hardware FLOPs   the same plus recomputed activations
    MFU, HFU         model, hardware FLOPs over the time of a step times the device's dense peak in the model's dtype

A product of (m, k) and (k, n) is 2mkn. Causal attention counts in full, as in the paper, and so does a sliding window:
torch's kernels get a mask of S × S elements for it, and skip nothing.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace

import torch
from torch.utils.flop_counter import FlopCounterMode

from .. import strategies
from ..config.cell import CellConfig
from ..config.schema import Transformer
from ..config.schema_memory import Activation, CheckpointActivations
from ..config.schema_training import Fp32
from ..data import arguments_of, build_batches
from ..fake import as_with_values, grouped_products_of_any_dtype
from ..fake.world import Undrawn
from ..probes.operator_stream import FORMULAS
from ..registry import DATA
from .build import build_model


@dataclass(frozen=True)
class Peak:
    """Dense FLOP/s of devices whose names contain `name` as a word; `fp32` is without TF32, torch's default."""

    name: str
    fp32: float
    half: float
    source: str


PEAKS = (
    Peak("B300", 75e12, 2250e12, "NVIDIA HGX B300 datasheet, half of the sparse figure"),
    Peak("GH200", 67e12, 990e12, "NVIDIA GH200 datasheet, half of the sparse figure"),
    Peak("H800", 67e12, 989.4e12, "as H100 SXM, which has the same cores"),
    Peak("H20", 44e12, 148e12, "NVIDIA H20 datasheet"),
    Peak("MI355X", 157.3e12, 2517e12, "AMD Instinct MI355X datasheet"),
    Peak("L40", 90.5e12, 181e12, "NVIDIA L40 datasheet, half of the sparse figure"),
    Peak("RTX 3090", 35.6e12, 71e12, "NVIDIA GA102 whitepaper, accumulating in fp32"),
    Peak("RTX 4090", 82.6e12, 165.2e12, "NVIDIA Ada whitepaper, accumulating in fp32"),
    Peak("RTX 5090", 104.8e12, 209.5e12, "NVIDIA RTX Blackwell whitepaper, accumulating in fp32"),
    Peak("B200", 75e12, 2250e12, "NVIDIA Blackwell datasheet, HGX B200, half of the sparse figure"),
    Peak("H200 NVL", 60e12, 835.5e12, "NVIDIA H200 datasheet, NVL, half of the sparse figure"),
    Peak("H200", 67e12, 989.4e12, "NVIDIA H200 datasheet, SXM"),
    Peak("H100 PCIe", 51e12, 756e12, "NVIDIA H100 datasheet, PCIe"),
    Peak("H100 NVL", 60e12, 835e12, "NVIDIA H100 datasheet, NVL"),
    Peak("H100", 67e12, 989.4e12, "NVIDIA H100 datasheet, SXM"),
    Peak("A100", 19.5e12, 312e12, "NVIDIA A100 datasheet"),
    Peak("A10G", 31.5e12, 70e12, "AWS G5 instances, NVIDIA A10G"),
    Peak("A10", 31.2e12, 125e12, "NVIDIA A10 datasheet"),
    Peak("L40S", 91.6e12, 362e12, "NVIDIA L40S datasheet"),
    Peak("L4", 30.3e12, 121e12, "NVIDIA L4 datasheet, half of the sparse figure"),
    Peak("V100", 15.7e12, 125e12, "NVIDIA V100 datasheet, SXM2; half is fp16"),
    Peak("T4", 8.1e12, 65e12, "NVIDIA T4 datasheet; half is fp16"),
)
"""The first entry whose name occurs in the device's name is used."""


@dataclass(frozen=True)
class StepFlops:
    """FLOPs of one rank per step, as defined in this module."""

    model: int
    hardware: int


_COUNTED: dict[str, int | None] = {}
"""A micro-batch's computation as JSON -> its FLOPs: each model is counted once per process."""


RECOMPUTING = {"checkpointing": False, "loss_chunks": 1, "mlp_chunks": 1}
"""Model option that recomputes something in backward -> its value without recomputation."""


def step_flops(config: CellConfig) -> StepFlops | None:
    """Counts a cell's FLOPs; ranks that share a model have equal parts. None for a model that cannot run on the meta
    device because its code reads values.
    """
    ranks, config = config.tensor_parallel, replace(config, tensor_parallel=1)
    if config.activation.policy().partition:
        config = replace(config, activation=CheckpointActivations())
    plain = replace(config, activation=Activation())
    again = {name: usual for name, usual in RECOMPUTING.items() if hasattr(config.model, name)}
    plain = replace(plain, model=replace(config.model, **again))  # type: ignore[arg-type]
    model = _count(plain)
    if model is None:
        return None
    hardware = model if plain == config else _count(config)
    micro_batches = config.accumulation
    return StepFlops(model * micro_batches // ranks, (hardware or model) * micro_batches // ranks)


def _count(config: CellConfig) -> int | None:
    """Counts the FLOPs of a micro-batch, which are the same for every dtype and strategy. The blocks of our GPTs
    are equal: two models show what each adds.
    """
    if isinstance(config.model, Transformer) and config.model.layers > 2 and config.activation == Activation():
        first, both = (_count(replace(config, model=replace(config.model, layers=few))) for few in (1, 2))
        return None if first is None or both is None else first + (config.model.layers - 1) * (both - first)
    what = [config.model.kind, config.model_options, config.activation.values(), config.micro_batch, config.sequence]
    if config.data.name not in DATA.own:
        what += [config.data.values(), config.world_size, config.accumulation, config.seed]
    key = json.dumps(what, sort_keys=True)
    if key in _COUNTED:
        return _COUNTED[key]
    config = replace(config, precision=Fp32(), strategy=strategies.reference().options(), arena=False)
    counter, meta = FlopCounterMode(display=False, custom_mapping=FORMULAS), torch.device("meta")
    tokens = torch.zeros((config.micro_batch, config.sequence), dtype=torch.int64, device=meta)
    try:
        with meta, Undrawn():
            model = build_model(config)
        own = config.data.name in DATA.own
        inputs, named = arguments_of((tokens, tokens) if own else build_batches(config.batching, 0, meta).batch(0))
        with counter, grouped_products_of_any_dtype(), as_with_values():
            model(*inputs, **named).backward()
        _COUNTED[key] = int(counter.get_total_flops())
    except Exception:  # a user's model may raise anything without values: its run is unaffected
        _COUNTED[key] = None
    return _COUNTED[key]


def peak_of(device_class: str) -> Peak | None:
    """Returns a device's entry by the name that torch reports. None for a device that is not in the table, for a slice
    of one (MIG), and for a CPU.
    """
    if re.search(r"\bMIG\b", device_class):
        return None
    return next((peak for peak in PEAKS if re.search(rf"\b{re.escape(peak.name)}\b", device_class)), None)


def utilization(flops: int, seconds: float, device_class: str, dtype: str) -> float | None:
    """Returns the fraction of the device's dense peak in `dtype` (fp32, bf16, fp16); None if the peak is unknown."""
    peak = peak_of(device_class)
    if peak is None:
        return None
    return flops / (seconds * (peak.fp32 if dtype == "fp32" else peak.half))
