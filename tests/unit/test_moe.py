"""The mixture of experts of our GPT: one sum in every layout, and the work of the active experts alone."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.cells import MODELS, cell
from zerobench.config.schema import GptMoe, Huggingface, HuggingfaceModel
from zerobench.models import gpt_moe, huggingface
from zerobench.models.gpt_moe import GPTMoe
from zerobench.predict.flops import step_flops

SHAPE = {"layers": 2, "hidden": 16, "heads": 2, "experts": 4, "top_k": 2, "expert_hidden": 24}


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


@pytest.mark.parametrize("more", [{}, {"separate_experts": True}, {"separate_experts": True, "routing": "skewed"}])
def test_only_the_chosen_experts_work(monkeypatch: pytest.MonkeyPatch, more: dict[str, object]) -> None:
    """16 of 16 experts work 8 times as much as 2, and 2 of 64 as much as 2 of 16; a router works for all."""
    inner, tokens, found = 24, 4 * 32, {}
    for experts, top_k in ((16, 2), (16, 16), (64, 2)):
        monkeypatch.setitem(MODELS, "moe", GptMoe(**SHAPE | more | {"experts": experts, "top_k": top_k}))
        counted = step_flops(cell("zero3", 2, "moe").config)
        assert counted is not None
        found[experts, top_k] = counted.model - 2 * (3 * 2 * tokens * 16 * experts)
    assert found[16, 2] == found[64, 2]
    assert found[16, 16] - found[16, 2] == 2 * (3 * 2 * 14 * tokens * 2 * 16 * inner)


@pytest.mark.slow
def test_experts_of_transformers_are_counted_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setitem(MODELS, "hf", HuggingfaceModel())
    assert step_flops(cell("zero3", 2, "hf", huggingface=Huggingface(architecture="mixtral", layers=1)).config)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"top_k": 5}, "model.top_k=5: a token passes through 1 to model.experts=4 experts"),
        ({"routing": "even"}, "model.routing=even: use learned, balanced, skewed"),
        ({"expert_hidden": 20}, "model.expert_hidden=20: a grouped product takes multiples of 8"),
    ],
)
def test_impossible_experts_have_one_error_message(monkeypatch: pytest.MonkeyPatch, more: dict, message: str) -> None:
    monkeypatch.setitem(MODELS, "bad", GptMoe(**SHAPE | more))
    (problem,) = cell("zero3", 2, "bad").problems
    assert problem.startswith(message)
