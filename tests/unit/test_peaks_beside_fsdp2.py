"""ZeRO-3's peak on a GPU, as estimated, is at or under FSDP2's, and every tensor above FSDP2's has a reason."""

import json
from pathlib import Path
from typing import Any

import pytest

from zerobench.commands.estimate.command import estimate

KEYS = ("precision=bf16", "sequence=1024", "micro_batch=8", "strategy=zero3,fsdp2")
MODELS = ("gpt2_124m", *(pytest.param(one, marks=pytest.mark.thorough) for one in ("gpt2_1_5b", "gpt_7b")))


def estimated(folder: Path, *keys: str) -> list[dict[str, Any]]:
    """The estimates of a command, in the order of its cells."""
    out = folder / "estimates.json"
    assert estimate([*KEYS, *keys, "--format", "json", "--out", str(out), "--jobs", "1"]) == 0
    return json.loads(out.read_text())["estimates"]  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_the_peak_is_at_most_that_of_fsdp2(tmp_path: Path, model: str) -> None:
    """On 1, 8 and 64 ranks, with and without recomputation, under the ledger and under the allocator."""
    found = estimated(tmp_path, f"model={model}", "world_size=1,8,64", "activation=none,checkpoint")
    half = len(found) // 2
    pairs = zip(found[:half], found[half:], strict=True)  # one strategy's cells after the other's
    assert half == 6
    for ours, theirs in pairs:
        assert (ours["strategy"], theirs["strategy"]) == ("zero3", "fsdp2")
        for figure in ("peak_bytes", "allocated_bytes", "reserved_low_bytes"):
            assert ours[figure] <= theirs[figure], (ours["name"], figure)


@pytest.mark.slow
def test_what_masters_alone_save_is_a_shard_of_the_parameters(tmp_path: Path) -> None:
    """Gradients are in neither peak: shards have memory from the first gradient to the update."""
    keys = ("model=gpt2_124m", "world_size=8", "strategy=zero3", "activation=checkpoint")
    (alone,), (beside,) = (estimated(tmp_path, *keys, *more) for more in ((), ("strategy.shards=parameters",)))
    psi = alone["psi"]
    assert beside["peak_bytes"] - alone["peak_bytes"] == pytest.approx(2 * psi / 8, rel=1e-3)
    assert beside["formula_bytes"] - alone["formula_bytes"] == pytest.approx(2 * psi / 8, abs=1)
    for one in (alone, beside):
        assert one["parts_bytes"]["gradients"] == one["parts_bytes"]["communication"] == 0
    names = [tensor["name"] for tensor in alone["tensors"] if tensor["part"] == "parameters"]
    assert names == ["head.weight"], "the root alone is whole while the loss's backward runs"
