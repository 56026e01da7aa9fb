"""Options of models: losses and MLPs in parts, adapters beside frozen Linears, experts; values, memory, messages."""

from collections.abc import Callable
from importlib.util import find_spec
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from tests.cells import MODELS, cell
from tests.zoo import gpt
from zerobench import models
from zerobench.config.schema import Gpt, HuggingfaceModel
from zerobench.fake import world_of_tensors
from zerobench.models import gpt_moe, huggingface, linears
from zerobench.models.chunks import LossHead
from zerobench.models.gpt_moe import GPTMoe
from zerobench.predict.estimate import estimate
from zerobench.probes.ledger import ShapesOnly

PARTS = [{"loss_chunks": 3}, {"mlp_chunks": 5}, {"loss_chunks": 16, "mlp_chunks": 2, "checkpointing": True}]


@pytest.mark.parametrize(("parts", "tied"), [*product(PARTS, [True, False])])
def test_loss_and_gradients_are_those_of_the_whole(parts: dict[str, Any], tied: bool) -> None:
    """To rounding: sums over parts have another order."""
    tokens, targets = torch.randint(0, 50, (2, 3, 16))
    whole, in_parts = gpt(tied=tied), gpt(tied=tied, **parts)
    expected, found = whole(tokens, targets), in_parts(tokens, targets)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    expected.backward()
    found.backward()
    for one, other in zip(whole.parameters(), in_parts.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_near_to_fp32_as_the_whole(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, targets = torch.randn(30, 16), torch.randint(0, 40, (30,))
    exact = LossHead(1, 16, 40)

    def gradients(chunks: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        head = LossHead(chunks, 16, 40).to(dtype)
        head.load_state_dict(exact.state_dict())
        inputs = x.to(dtype).requires_grad_()
        loss = head(inputs, targets) if chunks else nn.functional.cross_entropy(
            nn.functional.linear(inputs, head.weight, head.bias).float(), targets
        )  # fmt: skip
        return loss.detach(), *(one.float() for one in torch.autograd.grad(loss, [inputs, head.weight, head.bias]))

    truth, whole, parts = gradients(0, torch.float32), gradients(0, dtype), gradients(4, dtype)
    for true, one, other in zip(truth, whole, parts, strict=True):
        assert (other - true).norm() <= 2 * (one - true).norm() + 1e-7


def peak_bytes(**options: Any) -> int:
    """The peak of one forward and backward of a GPT, all categories, as if on a CPU."""
    with world_of_tensors(fake=True) as world:
        with world.building():
            model = gpt(**{"layers": 1, "positions": 1024, **options})
        tokens = torch.zeros(2, 1024, dtype=torch.int64)
        with ShapesOnly("cpu") as ledger:
            ledger.begin()
            ledger.enter_phase("forward")
            loss = model(tokens, tokens)
            ledger.enter_phase("backward")
            loss.backward()
            ledger.end("step")
    return ledger.sums.extremes["step"].peak


def test_the_loss_needs_an_nth_of_a_third() -> None:
    """12·s·b·V in fp32, of logits, log-probabilities and gradient, become 4·s·b·V/n."""
    unit = 2 * 1024 * 16384
    size = {"hidden": 8, "heads": 1, "vocabulary": 16384}
    whole, found = peak_bytes(**size), {n: peak_bytes(**size, loss_chunks=n) for n in (2, 4, 8)}
    assert whole == pytest.approx(12 * unit, rel=0.05)
    assert found[2] - found[4] == pytest.approx(unit, rel=0.01)
    assert found[4] - found[8] == pytest.approx(unit / 2, rel=0.01)


def test_the_mlp_keeps_its_input_alone_and_works_on_a_part() -> None:
    """A block keeps 8·s·b·h elements fewer, both inner layers; while a part runs, 1/n of them come back."""
    size, unit = {"hidden": 64, "vocabulary": 2, "heads": 1, "layers": 6}, 4 * 2 * 1024 * 64
    whole, parts = peak_bytes(**size), peak_bytes(**size, mlp_chunks=8)
    assert whole - parts >= 8 * unit * 5


@pytest.mark.parametrize(
    "architecture",
    [
        name if name in ("gpt2", "llama") else pytest.param(name, marks=pytest.mark.thorough)
        for name in huggingface.HEAD_ALONE
    ],
)
def test_transformers_losses_in_parts_are_those_of_the_whole(architecture: str) -> None:
    pytest.importorskip("transformers")
    shape = {"architecture": architecture, "layers": 1, "hidden": 32, "heads": 4, "vocabulary": 60, "positions": 16}
    tokens, targets = torch.randint(0, 60, (2, 3, 16))
    losses, gradients = [], []
    for chunks in (1, 4):
        torch.manual_seed(0)
        of_mlp = chunks if architecture in huggingface.MLP_ALONE else 1
        options = {**shape, "options": {}, "loss_chunks": chunks, "mlp_chunks": of_mlp}
        model = models.build("huggingface", options).eval()
        loss = model(tokens, targets)
        loss.backward()
        losses.append(loss)
        gradients.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=0)
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-6)


SHAPE = {"layers": 2, "hidden": 16, "heads": 2, "experts": 4, "top_k": 2, "expert_hidden": 24}


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
    adapted = linears.LoRALinear(nn.Linear(7, 5), 3)
    linears.initialize_adapter(adapted)
    nn.init.normal_(adapted.lora_b)
    x = torch.randn(4, 7)
    weight = adapted.base.weight + adapted.lora_b @ adapted.lora_a
    torch.testing.assert_close(adapted(x), nn.functional.linear(x, weight, adapted.base.bias))


def test_a_frozen_base_is_whole_below_stage_3_and_partitioned_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenTau#446: 2φ under ZeRO-2, 2φ/N under ZeRO-3, beside states of what is trained."""
    monkeypatch.setitem(MODELS, "adapted", Gpt(layers=4, hidden=256, heads=4, lora=2))
    stages = ("zero1", "zero2", "zero3")
    found = {n: {name: estimate(cell(name, n, "adapted").config) for name in stages} for n in (2, 8)}
    psi = found[2]["zero2"].psi
    phi = 12 * 4 * 256**2 + 4 * 13 * 256 + (256 + 32) * 256 + 2 * 256
    for n, mine in found.items():
        assert mine["zero2"].floor_bytes == 4 * phi + 4 * psi + -(-4 * psi // n) + -(-8 * psi // n)
        assert mine["zero3"].floor_bytes == pytest.approx((4 * phi + 16 * psi) / n, abs=8)
        assert mine["zero2"].volume_psi == pytest.approx(2, rel=0.01)
        assert mine["zero3"].volume_psi == pytest.approx((2 * (phi + psi) - (256 + 32) * 256 + psi) / psi, rel=0.01)


def test_peft_is_asked_for_by_name_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linears, "installed_version", lambda _: None)
    assert "pip install peft" in linears.lora_problems(4, 128, "huggingface", by_peft=True)[0]
    assert linears.lora_problems(4, 128, "model", by_peft=False) == []


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


def built(**more: object) -> GPTMoe:
    torch.manual_seed(0)
    rest = {"vocabulary": 40, "positions": 8, "tied": True, "checkpointing": False, "separate_experts": False}
    return GPTMoe(**SHAPE | rest | {"balance": 0.1, "routing": "learned"} | more)


def trained(model: GPTMoe) -> list[torch.Tensor]:
    """The loss, and the gradients of experts, as they are if together, and routers."""
    tokens = torch.randint(0, 40, (2, 8), generator=torch.Generator().manual_seed(0))
    loss = model(tokens, tokens)
    loss.backward()
    found = [loss.detach()]
    for block in model.blocks:
        for name in ("weight_in", "weight_out"):
            found.append(torch.cat([getattr(one, name).grad.flatten() for one in block.experts]))
    return [*found, *(block.router.weight.grad for block in model.blocks)]


def test_together_separate_and_in_a_loop_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    together, separate = trained(built()), trained(built(separate_experts=True))
    monkeypatch.setattr(gpt_moe, "has_grouped_product", lambda device: False)
    for other in (separate, trained(built())):
        torch.testing.assert_close(other, together, rtol=1e-5, atol=1e-7)


def test_a_token_is_the_weighted_sum_of_its_experts() -> None:
    block, x = built().blocks[0], torch.randn(5, 16)
    out, balance = block.mix(x)
    probabilities = block.router(x).softmax(1)
    weights, chosen = probabilities.topk(2)
    (experts,) = block.experts
    for token in range(5):
        expected = torch.zeros(16)
        for weight, expert in zip(weights[token] / weights[token].sum(), chosen[token], strict=True):
            inner = nn.functional.gelu(x[token] @ experts.weight_in[expert], approximate="tanh")
            expected += weight * (inner @ experts.weight_out[expert])
        torch.testing.assert_close(out[token], expected)
    share = torch.stack([(chosen == expert).sum() / 5 for expert in range(4)])
    torch.testing.assert_close(balance, 4 * (share * probabilities.mean(0)).sum())


def transformers_experts(balance: float) -> nn.Module:
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    shape = {"layers": 2, "hidden": 16, "heads": 2, "vocabulary": 40, "positions": 8}
    more = {"intermediate_size": 24, "output_router_logits": True, "router_aux_loss_coef": balance}
    return huggingface.build("mixtral", **shape, options=more)


@pytest.mark.parametrize("build", [lambda balance: built(balance=balance), transformers_experts])
def test_the_balance_is_part_of_the_loss(build: Callable[[float], nn.Module]) -> None:
    """It is near 2, the number of experts of a token, since new routers favor no expert."""
    tokens = torch.randint(0, 40, (2, 8), generator=torch.Generator().manual_seed(0))
    without, balanced = (build(balance)(tokens, tokens).item() for balance in (0.0, 0.1))
    assert balanced - without == pytest.approx(0.1 * 2, rel=0.05)


@pytest.mark.parametrize(("routing", "counts"), [("balanced", [4, 4, 4, 4]), ("skewed", [8, 8, 0, 0])])
def test_fixed_routings(routing: str, counts: list[int]) -> None:
    block = built(routing=routing, separate_experts=True).blocks[0]
    chosen = block.choose(torch.rand(8, 4).softmax(1))
    assert torch.bincount(chosen.flatten(), minlength=4).tolist() == counts
    assert block.counts_on_host(torch.empty(4, device="meta"), 16) == counts
