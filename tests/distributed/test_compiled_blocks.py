"""Blocks compiled by torch.compile: every strategy trains alike, and the ledger sees all that graphs allocate."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.cells import cell
from zerobench.config.cell import CellConfig
from zerobench.launch.start_ranks import launch
from zerobench.models.compiled import compile_blocks
from zerobench.rank_record import RankRecord
from zerobench.worker import RankJob, run_rank

STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "megatron", "fsdp2", "zero_redundancy")
SCALAR = 8
"""Bytes of the run before that go only in the next, beneath the ledger."""


def config_of(strategy: str, **more: Any) -> CellConfig:
    one = cell(strategy, 2, **more)
    assert not one.problems, one.problems
    return one.config


def run_all(job: tuple[list[CellConfig], int, str], tell: Any) -> tuple[list[RankRecord], int]:
    """Runs the accounted pass of each config on a rank; returns also how many graphs were compiled."""
    configs, rank, folder = job
    records = []
    for number, config in enumerate(configs):
        records.append(run_rank(RankJob(config, "accounted", rank, f"{folder}/rendezvous-{number}", folder), tell))
        gc.collect()  # else the allocator sees in the next run how the tensors of this one go
    from torch._dynamo.utils import counters

    return records, counters["stats"]["unique_graphs"]


def of_step(record: RankRecord, category: str) -> int:
    return next(m.max_bytes for m in record.memory if (m.phase, m.category, m.tier) == ("step", category, "device"))


@pytest.mark.thorough
def test_every_strategy_trains_the_same_graphs_and_all_their_memory_is_seen(tmp_path: Path) -> None:
    """By the allocator beneath; activations are those of the model's graphs alone, run on fake tensors; one graph per
    strategy, so that no step after the first compiles.
    """
    configs = [config_of(name, compile="blocks") for name in STRATEGIES] + [config_of("ddp")]
    outcome = launch(run_all, [(configs, rank, str(tmp_path)) for rank in range(2)], tmp_path / "logs", 400)
    assert outcome.status == "ok", outcome.reason
    for records, graphs in outcome.results:
        *compiled, eager = records
        losses = {name: [step.loss for step in one.steps] for name, one in zip(STRATEGIES, compiled, strict=True)}
        assert all(one == losses["ddp"] for one in losses.values()), losses
        assert losses["ddp"] == pytest.approx([step.loss for step in eager.steps], abs=1e-5)
        assert graphs <= len(STRATEGIES) + 1  # the prediction's, on fake tensors, is one more
        for name, one in zip(STRATEGIES, compiled, strict=True):
            assert one.own_activation_bytes in (None, of_step(one, "activations")), name
            beyond = of_step(one, "allocated") - of_step(one, "total")
            assert abs(beyond) <= SCALAR, name
    assert of_step(compiled[0], "activations") <= of_step(eager, "activations")


class Breaks(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum().item() > 0 else -x


def test_a_block_that_is_no_single_graph_ends_in_an_error_message() -> None:
    model = nn.Sequential(Breaks())
    compile_blocks(model)
    with pytest.raises(RuntimeError, match=r"^compile=blocks: 0: torch\.compile cannot make one graph of this block"):
        model(torch.ones(2))
