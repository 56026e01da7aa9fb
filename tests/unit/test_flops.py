"""Arithmetic of a step against the formula of PaLM, appendix B, and shares of a device's peak."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import zerobench
from tests.cells import MODELS, cell
from zerobench.config.schema import Gpt, Model
from zerobench.config.schema_training import Bf16, Fp32
from zerobench.predict import flops
from zerobench.predict.flops import step_flops, utilization
from zerobench.registry import MODELS as REGISTRY


def formula(layers: int, hidden: int, vocabulary: int, sequence: int, tokens: int) -> float:
    """6 FLOPs a weight of a product and token, 12 · layers · hidden · sequence a token for attention."""
    weights = 12 * layers * hidden**2 + vocabulary * hidden
    return tokens * (6 * weights + 12 * layers * hidden * sequence)


def test_a_gpt_has_the_flops_of_the_formula() -> None:
    config = cell("zero2", 2, "million", micro_batch=3).config
    counted = step_flops(config)
    assert counted.model == counted.hardware == pytest.approx(formula(5, 128, 256, 32, 3 * 32), rel=1e-3)


def test_what_is_recomputed_counts_for_the_hardware_only() -> None:
    plain, again = (step_flops(cell("zero2", 2, model).config) for model in ("tiny", "checkpointed"))
    assert again.model == plain.model == plain.hardware
    tokens, head, last = 4 * 32, 2 * 48 * 256, 2 * 4 * 48**2  # a block's last product need not be computed again
    assert again.hardware - plain.model == pytest.approx(plain.model / 3 - tokens * (head + 3 * last), rel=1e-3)


class Experts(nn.Module):
    """Two experts, each a matrix for half of the tokens."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embedding, self.experts = nn.Embedding(vocabulary, 16), nn.Parameter(torch.zeros(2, 16, 8))

    def forward(self, tokens, targets):
        x = self.embedding(tokens).flatten(0, 1).bfloat16()
        ends = torch.empty(2, dtype=torch.int32, device=x.device)
        return F.grouped_mm(x, self.experts.bfloat16(), offs=ends).float().sum()


def experts(vocabulary: int = 256) -> nn.Module:
    return Experts(vocabulary)


def test_grouped_products_count_though_torch_has_no_formula_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    zerobench.register_model("experts", experts)
    monkeypatch.setitem(MODELS, "experts", REGISTRY.schema_of("experts", experts, Model)())
    counted = step_flops(cell("ddp", 2, "experts").config)
    del REGISTRY.builders["experts"]
    assert counted.model == 3 * 2 * (4 * 32) * 16 * 8


def test_micro_batches_add_up() -> None:
    once, thrice = (step_flops(cell("zero1", 2, "mlp", accumulation=count).config) for count in (1, 3))
    assert thrice.model == 3 * once.model


@pytest.mark.slow
def test_the_dtype_and_the_strategy_change_nothing() -> None:
    """So a model is counted once for all launches, with one block and with two; another batch is another count."""
    flops._COUNTED.clear()
    counted = [
        step_flops(cell(strategy, 2, "million", precision=precision).config)
        for strategy in ("ddp", "zero3", "fsdp2")
        for precision in (Fp32(), Bf16())
    ]
    assert (len(set(counted)), len(flops._COUNTED)) == (1, 2)
    assert step_flops(cell("ddp", 2, "million", micro_batch=3).config) != counted[0]


def test_shares_of_the_peak_of_a_whole_gpu_and_none_of_a_slice() -> None:
    assert utilization(int(989.4e12), 2.0, "NVIDIA H200", "bf16") == pytest.approx(0.5)
    assert utilization(int(67e12), 1.0, "NVIDIA H100 80GB HBM3", "fp32") == pytest.approx(1.0)
    assert utilization(10**12, 1.0, "NVIDIA A10G", "fp16") == pytest.approx(1 / 70)
    assert utilization(10**12, 1.0, "cpu", "fp32") is None
    assert utilization(10**12, 1.0, "a GPU of tomorrow", "bf16") is None
    assert utilization(10**12, 1.0, "NVIDIA H200 MIG 1g.18gb", "bf16") is None


@pytest.mark.parametrize("options", [{}, {"tiles": 2, "tied": False}, {"lora": 4, "loss_chunks": 2, "mlp_chunks": 2}])
def test_a_deep_model_takes_what_its_blocks_add(monkeypatch, options: dict[str, Any]) -> None:
    """Blocks of our GPT are equal, so two shallow models are counted; the whole model gives the same."""
    flops._COUNTED.clear()
    base = cell("zero2", 2).config
    assert isinstance(base.model, Gpt)
    deep = replace(base, model=replace(base.model, layers=5, **options))
    short = step_flops(deep)
    monkeypatch.setattr(flops, "Transformer", ())
    flops._COUNTED.clear()
    assert short is not None
    assert short == step_flops(deep)
