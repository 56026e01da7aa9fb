"""Adapters beside frozen Linears, and their error messages."""

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn

from tests.cells import MODELS, cell
from tests.zoo import gpt
from zerobench import models
from zerobench.config.schema import Gpt, HuggingfaceModel
from zerobench.models import lora
from zerobench.predict.estimate import estimate
from zerobench.predict.flops import step_flops


@pytest.mark.parametrize("tiles", [1, 2])
def test_it_starts_as_the_frozen_model_and_adapters_alone_are_trained(tiles: int) -> None:
    """B = 0 adds exact zeros; each Linear of a block has one pair, of rank · (in + out) elements."""
    plain, adapted = gpt(tiles=tiles), gpt(tiles=tiles, lora=4)
    tokens = torch.randint(0, 50, (2, 16))
    assert torch.equal(plain(tokens, tokens), adapted(tokens, tokens))
    trained = {name: p for name, p in adapted.named_parameters() if p.requires_grad}
    assert all(name.startswith("blocks.") and name.endswith(("lora_a", "lora_b")) for name in trained)
    assert sum(p.numel() for p in trained.values()) == 2 * 4 * 20 * (1 + 3 + 1 + 1 + 1 + 4 + 4 + 1)
    adapted(tokens, tokens).backward()
    assert all((p.grad is not None) == (name in trained) for name, p in adapted.named_parameters())
    assert all(trained[name].grad.any() == name.endswith("lora_b") for name in trained)


def test_the_product_is_that_of_the_merged_weight() -> None:
    torch.manual_seed(0)
    adapted = lora.LoRALinear(nn.Linear(7, 5), 3)
    lora.initialize(adapted)
    nn.init.normal_(adapted.lora_b)
    x = torch.randn(4, 7)
    weight = adapted.base.weight + adapted.lora_b @ adapted.lora_a
    torch.testing.assert_close(adapted(x), nn.functional.linear(x, weight, adapted.base.bias))


def test_arithmetic_has_no_gradients_of_frozen_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and gradients of inputs: two thirds of training all, and a little for the adapters."""
    monkeypatch.setitem(MODELS, "whole", Gpt(layers=8, hidden=96, heads=4))
    monkeypatch.setitem(MODELS, "adapted", Gpt(layers=8, hidden=96, heads=4, lora=1))
    whole, adapted = (step_flops(cell("zero3", 2, name).config) for name in ("whole", "adapted"))
    assert 0.66 < adapted.model / whole.model < 0.72


def test_a_frozen_base_is_whole_below_stage_3_and_partitioned_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenTau#446: 2φ under ZeRO-2, 2φ/N under ZeRO-3, beside states of what is trained."""
    monkeypatch.setitem(MODELS, "adapted", Gpt(layers=4, hidden=256, heads=4, lora=2))
    found = {
        n: {name: estimate(cell(name, n, "adapted").config) for name in ("zero1", "zero2", "zero3")} for n in (2, 8)
    }
    psi = found[2]["zero2"].psi
    phi = 12 * 4 * 256**2 + 4 * 13 * 256 + (256 + 32) * 256 + 2 * 256
    for n, mine in found.items():
        assert mine["zero2"].floor_bytes == 4 * phi + 4 * psi + -(-4 * psi // n) + -(-8 * psi // n)
        assert mine["zero3"].floor_bytes == pytest.approx((4 * phi + 16 * psi) / n, abs=8)
        assert mine["zero2"].volume_psi == pytest.approx(2, rel=0.01)
        assert mine["zero3"].volume_psi == pytest.approx((2 * (phi + psi) - (256 + 32) * 256 + psi) / psi, rel=0.01)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Gpt(layers=1, hidden=12, heads=2, lora=13), "model.lora=13: an adapter's rank is at most the width"),
        (Gpt(layers=1, hidden=12, heads=2, lora=-1), "model.lora=-1: must be at least 0"),
        (HuggingfaceModel(lora=129), "model.lora=129: an adapter's rank is at most the width, huggingface.hidden=128"),
    ],
)
def test_bad_ranks_have_one_error_message(monkeypatch: pytest.MonkeyPatch, model: Any, message: str) -> None:
    monkeypatch.setitem(MODELS, "bad", model)
    problems = cell("zero3", 2, "bad").problems
    assert len(problems) == 1
    assert message in problems[0]


def test_peft_is_asked_for_by_name_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora, "installed_version", lambda _: None)
    assert "pip install peft" in lora.problems_of(4, 128, "huggingface", by_peft=True)[0]
    assert lora.problems_of(4, 128, "model", by_peft=False) == []


@pytest.mark.skipif(find_spec("peft") is None, reason="needs peft")
def test_pefts_adapters_stand_where_ours_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "hf", HuggingfaceModel(lora=4))
    config = cell("zero3", 2, "hf").config
    torch.manual_seed(0)
    model = models.build("huggingface", config.model_options)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained
    assert all("lora_" in name and ".h." in name for name in trained)
    assert estimate(config).psi == 4 * 128 * 4 * (1 + 3 + 1 + 1 + 1 + 4 + 4 + 1)
