"""Checkpoints on real ranks: resharded, asynchronous, agreed upon."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
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


@pytest.mark.thorough
def test_strides_may_differ_from_those_that_were_saved(tmp_path: Path) -> None:
    run_ranks(2, checkpoints.reordered, str(tmp_path))


def test_masters_and_loss_scale(tmp_path: Path) -> None:
    run_ranks(2, checkpoints.halves, str(tmp_path))


@pytest.mark.thorough
def test_every_optimizer_goes_on(tmp_path: Path) -> None:
    run_ranks(2, checkpoints.every_optimizer, str(tmp_path))


@pytest.mark.thorough
def test_half_precision_with_masters(tmp_path: Path) -> None:
    run_ranks(2, checkpoints.half_precision, str(tmp_path))


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


KILLED_PEER = """
import os, signal, sys
import torch, torch.distributed as dist
from tests.distributed.checkpoints import fresh, steps
from zerobench.zero.checkpoint import storage

folder, rank = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
engine = fresh("tied", "adamw", "zero3")
steps(engine, range(1))
engine.save(f"{folder}/good")
steps(engine, range(1, 2))
if rank == 1:
    storage.bytes_of = lambda tensor: os.kill(os.getpid(), signal.SIGKILL)
handle = engine.save(f"{folder}/good", asynchronous=True)
try:
    handle.wait()
except RuntimeError as error:
    print(error)
    os._exit(7)
"""


@pytest.mark.thorough
def test_a_rank_that_is_killed_while_it_writes(tmp_path: Path) -> None:
    """`kill -9` on one of two ranks in the middle of its file: the other hears of it, the last good one loads."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", KILLED_PEER, str(tmp_path), str(rank)],
            env=environment, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [one.communicate(timeout=300)[0] for one in ranks]
    assert [one.returncode for one in ranks] == [7, -signal.SIGKILL]
    assert "good was not written: " in said[0]
    engine = checkpoints.fresh("tied", "adamw", "zero2", shift=1.0)
    engine.load(tmp_path / "good")
    expected = checkpoints.fresh("tied", "adamw", "zero2")
    checkpoints.steps(expected, range(1))
    state, other = engine.full_state_dict(), expected.full_state_dict()
    assert all(torch.allclose(state[name], other[name], rtol=0, atol=1e-4) for name in state)
    engine.save(tmp_path / "good")
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("good")) == ["good"]
