"""Checkpoints on real ranks: resharded, asynchronous, agreed upon."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests import zoo
from tests.distributed import checkpoints
from tests.ranks import run_ranks
from zerobench.zero import STAGES


@pytest.mark.parametrize(
    ("kinds", "least"), [(checkpoints.SOME, 12), pytest.param(checkpoints.ALL, 40, marks=pytest.mark.thorough)]
)
def test_any_stage_and_n_loads_what_any_other_saved(tmp_path: Path, kinds: list[tuple[str, int]], least: int) -> None:
    assert sum(run_ranks(3, checkpoints.reshard, str(tmp_path), kinds, {"tied": "adamw"})) > least


@pytest.mark.thorough
def test_models_of_every_kind(tmp_path: Path) -> None:
    models = {
        "unused": "sgd_momentum", "rich": "adagrad", "convolutions": "nadam", "adapted": "asgd", "lists": "adam_amsgrad"
    }  # fmt: skip
    assert sum(run_ranks(3, checkpoints.reshard, str(tmp_path), checkpoints.SOME, models)) > 40


def test_masters_and_loss_scale(tmp_path: Path) -> None:
    run_ranks(2, checkpoints.halves, str(tmp_path))


def test_training_goes_on_while_a_save_is_written(tmp_path: Path, thorough: bool) -> None:
    run_ranks(2, checkpoints.asynchronous, str(tmp_path), list(STAGES) if thorough else ["megatron", "zero3"])


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


def test_a_save_deletes_what_saves_have_left_and_nothing_of_the_users(tmp_path: Path) -> None:
    engine = checkpoints.fresh("tied", "adamw", "zero2")
    path = tmp_path / "ck"
    users = [tmp_path / "ck.partial-mine", tmp_path / "ck.partial-0badcafe", path / "rank0-best.safetensors"]
    left = tmp_path / "ck.partial-1f2e3d4c/rank0-1f2e3d4c.safetensors"
    engine.save(path)
    users[0].mkdir()
    for kept in (users[1] / "notes", users[2], left):
        kept.parent.mkdir(exist_ok=True)
        kept.touch()
    engine.save(path)
    assert all(one.exists() for one in users)
    assert not left.parent.exists()
    assert len(list(path.glob("rank0-*"))) == 2, "the new one, and the user's"
