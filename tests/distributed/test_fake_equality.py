"""Fake execution equals real ranks, to the byte: memory phase by phase, and traffic operation by operation."""

from pathlib import Path

import pytest

from validation.equality import hold
from validation.variants import VARIANTS

FEW = ("fsdp2, tuned", "zero2 offload, delayed", "zero3 nvme")
"""Each needs something else of a fake world: a peer on gloo, another tier, a thread, files."""


@pytest.mark.thorough
@pytest.mark.parametrize(
    "n", [2, pytest.param(3, marks=pytest.mark.thorough), pytest.param(4, marks=pytest.mark.thorough)]
)
def test_a_fake_rank_is_one_of_a_real_world(tmp_path: Path, n: int, thorough: bool) -> None:
    """All variants in `make test-all`, the few above in every run."""
    chosen = {name: one.config(n) for name, one in VARIANTS.items() if n in one.sizes and (thorough or name in FEW)}
    different = [row for row in hold(chosen, tmp_path) if not row.is_none]
    assert different == []


def test_there_are_forty_variants_and_every_strategy_that_a_cpu_has() -> None:
    assert len(VARIANTS) >= 40
    of = {one.strategy for one in VARIANTS.values()}
    peers = {"fsdp2", "fsdp2_no_reshard", "zero_redundancy"}
    assert of == {"ddp", "zero1", "zero2", "zero3", "megatron"} | peers
    tuned = {one.strategy for one in VARIANTS.values() if one.more.get("tuned")}
    assert tuned == peers
    assert {size for one in VARIANTS.values() for size in one.sizes} == {2, 3, 4}
