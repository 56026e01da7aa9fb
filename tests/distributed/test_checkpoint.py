"""Checkpoints on real ranks: resharded, asynchronous, agreed upon."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests import zoo
from tests.distributed import checkpoints
from tests.ranks import run_ranks
from zerobench.zero import STAGES


@pytest.mark.parametrize(
    ("model", "optimizer", "every"),
    [("tied", "adamw", 1), ("unused", "sgd_momentum", 3), ("rich", "adagrad", 4), ("convolutions", "nadam", 4),
     ("adapted", "asgd", 4), ("lists", "adam_amsgrad", 4)],
)  # fmt: skip
def test_any_stage_and_n_loads_what_any_other_saved(tmp_path: Path, model: str, optimizer: str, every: int) -> None:
    loaded = run_ranks(3, checkpoints.reshard, str(tmp_path), model, optimizer, every)
    assert sum(loaded) > 9


def test_every_optimizer_goes_on(tmp_path: Path) -> None:
    run_ranks(2, checkpoints.every_optimizer, str(tmp_path))


def test_training_goes_on_while_a_save_is_written(tmp_path: Path) -> None:
    run_ranks(2, checkpoints.asynchronous, str(tmp_path))


def test_what_one_rank_sees_all_refuse(tmp_path: Path) -> None:
    run_ranks(2, checkpoints.refuse_together, str(tmp_path))


def test_exported_weights_are_the_plain_modules(tmp_path: Path) -> None:
    run_ranks(2, checkpoints.export, str(tmp_path))
    for model in ("tied", "unused", "rich", "convolutions", "lists"):
        for stage in STAGES:
            exported = load_file(tmp_path / f"{model}-{stage}.safetensors")
            expected = torch.load(tmp_path / f"{model}-{stage}.pt", weights_only=True)
            assert exported.keys() == expected.keys()
            assert all(torch.equal(exported[name], value) for name, value in expected.items())
            zoo.build(model).load_state_dict(exported, strict=True)
    assert not list(tmp_path.glob("*partial*"))
