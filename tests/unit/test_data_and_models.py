"""Batches depend on seed and step alone; models have the sizes that their names say."""

from unittest import mock

import pytest
import torch
from torch import nn

from zerobench import models
from zerobench.config.compose import compose_cells
from zerobench.data import Batches, Batching, default_text, read_text, text_hash
from zerobench.predict import build as construction
from zerobench.simulation.execute import execute

CPU = torch.device("cpu")


def batches(text: bool, rank: int, world_size: int, batch: int = 12, seed: int = 3, accumulation: int = 1) -> Batches:
    content, vocabulary = (read_text(None, 16), 256) if text else (None, 50)
    micro_batch = batch // world_size // accumulation
    sizes = vocabulary, world_size, micro_batch, accumulation
    return Batches(Batching("text", {}, None, *sizes, 16, seed, torch.float32), content, rank, CPU)


@pytest.mark.parametrize("text", [True, False])
def test_micro_batches_together_are_the_batch(text: bool) -> None:
    whole = batches(text, 1, 2).batch(5)[0]
    parts = [batches(text, 1, 2, accumulation=3).batch(5, micro)[0] for micro in range(3)]
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("text", [True, False])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ranks_together_see_what_one_rank_would(text: bool, world_size: int) -> None:
    for step in (0, 7):
        whole = batches(text, 0, 1).batch(step)
        parts = [batches(text, rank, world_size).batch(step) for rank in range(world_size)]
        for place in (0, 1):
            assert torch.equal(torch.cat([part[place] for part in parts]), whole[place])


def test_steps_and_seeds_differ_and_targets_follow() -> None:
    tokens, targets = batches(True, 0, 1).batch(0)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert not torch.equal(tokens, batches(True, 0, 1).batch(1)[0])
    assert not torch.equal(tokens, batches(True, 0, 1, seed=4).batch(0)[0])


def test_the_default_text_is_english_and_hashed(tmp_path) -> None:
    assert default_text().stat().st_size > 300_000
    assert b"the " in default_text().read_bytes()
    mine = tmp_path / "my text.txt"
    mine.write_text("abcdef" * 10)
    assert text_hash(str(mine)) != text_hash(None)
    with pytest.raises(ValueError, match="too few for sequence=60"):
        read_text(str(mine), 60)
    with pytest.raises(ValueError, match="no such file"):
        read_text(str(tmp_path / "none"), 5)


def test_presets_of_shapes_have_as_many_positions_as_the_sequence() -> None:
    """ZeRO's tables give layers, width and heads; GPT-2 has 1,024 positions."""
    cells = compose_cells(["-m", "model=zero_8b,gpt_7b,gpt2_124m", "sequence=4096"])
    positions = [None if one.problems else one.config.model.positions for one in cells]  # type: ignore[attr-defined]
    assert positions == [4096, 4096, None]
    (hugging,) = compose_cells(["model=llama_7b", "sequence=4096", "huggingface.layers=1"])
    assert hugging.config.huggingface.positions == 4096
    assert compose_cells(["model=gpt_7b", "sequence=1024"])[0].config.model.options["positions"] == 1024


@pytest.mark.parametrize(
    ("name", "numel"),
    [
        ("gpt2_124m", 124_439_808),
        ("llama_7b", 6_738_415_616),
        ("llama_8b", 8_030_261_248),
        ("mixtral_8x7b", 46_702_792_704),
        ("qwen3_30b_a3b", 30_532_122_624),
    ],
)
def test_presets_have_the_published_sizes(name: str, numel: int) -> None:
    pytest.importorskip("transformers")
    (one,) = compose_cells([f"model={name}", "sequence=1024"])
    assert not one.problems
    assert construction.facts_of(one.config).psi == numel


def test_gpt_is_causal_and_checkpointing_changes_nothing() -> None:
    shape = {"layers": 2, "hidden": 32, "heads": 4, "vocabulary": 11, "positions": 9, "tied": True}
    tokens = torch.randint(0, 11, (3, 9), generator=torch.Generator().manual_seed(0))
    losses, gradients = [], []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        model = models.build("gpt", {**shape, "checkpointing": checkpointing})
        loss = model(tokens, tokens.roll(-1, 1))
        loss.backward()
        losses.append(loss.item())
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert losses[0] == losses[1]
    assert torch.equal(*gradients)
    changed = tokens.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 11
    seen: list[torch.Tensor] = []
    model.norm.register_forward_hook(lambda _m, _i, out: seen.append(out))
    model(tokens, tokens)
    model(changed, tokens)
    assert torch.equal(seen[0][:, :-1], seen[1][:, :-1])
    assert not torch.equal(seen[0][:, -1], seen[1][:, -1])


@pytest.mark.slow
def test_a_fused_loss_is_the_plain_one_and_a_kept_one_keeps_its_logits() -> None:
    from zerobench.models import chunks

    tokens, losses, gradients = torch.randint(0, 61, (24,)), [], []
    with mock.patch.object(chunks, "BLOCK_NUMEL", 61 * 7):  # several blocks, the last one smaller
        for compute in (nn.functional.cross_entropy, chunks.fused_cross_entropy):
            logits = torch.randn(24, 61, generator=torch.Generator().manual_seed(0)).requires_grad_()
            loss = compute(logits, tokens)
            (2 * loss).backward()
            losses.append(loss.detach())
            gradients.append(logits.grad)
    assert torch.allclose(*losses, rtol=1e-6)
    assert torch.allclose(*gradients, rtol=1e-5, atol=1e-8)
    pytest.importorskip("transformers")
    sizes = {}
    for loss in ("plain", "kept", "fused"):
        arguments = ["model=huggingface", f"huggingface.loss={loss}", "data=synthetic", "huggingface.vocabulary=8192"]
        (one,) = compose_cells([*arguments, "huggingface.layers=1", "backend=simulated", "world_size=2"])
        sizes[loss] = execute(one.config).peak_bytes
    logits_bytes = 4 * 4 * 128 * 8192
    assert sizes["kept"] - sizes["plain"] == logits_bytes
    assert sizes["fused"] < sizes["plain"] - 0.9 * logits_bytes
    (wrong,) = compose_cells(["model=huggingface", "huggingface.loss=none"])
    assert wrong.problems == ("huggingface.loss=none: use one of plain, kept, fused",)
