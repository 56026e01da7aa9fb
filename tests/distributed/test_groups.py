"""Nodes and shard groups: what their collectives put where, every stage in them against DDP, checkpoints, refusals."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import zoo
from tests.distributed import training
from tests.distributed.test_comm import NUMEL, random_full
from tests.ranks import run_ranks
from zerobench.zero.comm import gloo
from zerobench.zero.comm.hierarchical import connect_groups

CPU = torch.device("cpu")
OURS = ("zero1", "zero2", "zero3")


def total(n: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.stack([random_full(rank, n, dtype).double() for rank in range(n)]).sum(0)


def hops(rank: int, n: int, node_size: int) -> int:
    """Two-hop collectives by value, several in flight at once and waited for in another order on each rank."""
    gloo.GATHER_PIECE_BYTES = gloo.REDUCE_PIECE_BYTES = 512
    comm = connect_groups(None, CPU, node_size, None)
    assert (comm.size, comm.ranks, comm.replica) == (n, n, 0)
    own = slice(comm.rank * NUMEL, (comm.rank + 1) * NUMEL)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 0.1)):
        whole = total(n, dtype)
        fulls, intos = [random_full(rank, n, dtype) for _ in range(3)], [None, torch.empty(NUMEL, dtype=dtype), None]
        mine = [torch.full((n * NUMEL,), -1.0, dtype=dtype) for _ in range(3)]
        for full in mine:
            full[own] = rank
        handles = []
        for full, into, other in zip(fulls, intos, mine, strict=True):
            handles += [comm.reduce_scatter(full, "u", into), comm.all_gather(other, "u")]
        for handle in handles[::-1] if rank % 2 else handles:
            handle.wait()
            handle.wait()
        for full, into in zip(fulls, intos, strict=True):
            found = full[own] if into is None else into
            torch.testing.assert_close(found.double(), whole[own], rtol=0, atol=tolerance)
        owners = gathered(comm.rank, n)
        for full in mine:
            wanted = torch.tensor(owners, dtype=dtype).repeat_interleave(NUMEL)
            assert torch.equal(full, wanted)
    return comm.rank


def gathered(mine: int, n: int) -> list[int]:
    """The global rank that owns each slice."""
    places: list[Any] = [None] * n
    dist.all_gather_object(places, mine)
    return [places.index(number) for number in range(n)]


def replicas(rank: int, n: int, k: int) -> tuple[int, int, torch.Tensor]:
    """(slice, replica, its sum over everybody)."""
    comm = connect_groups(None, CPU, None, k)
    assert (comm.size, comm.ranks, comm.rank, comm.replica) == (k, n, rank % k, rank // k)
    full = random_full(rank, n, torch.float32)
    handles = [comm.reduce_scatter(full, "u"), comm.all_gather(torch.zeros(16 * k), "u")]
    for handle in handles[::-1] if rank % 2 else handles:
        handle.wait()
    numel = full.numel() // k
    mine = full.narrow(0, comm.rank * numel, numel).clone()
    once = torch.ones(1, dtype=torch.float64)
    comm.sum(once)
    assert once.item() == k  # every replica has the same
    flags = torch.tensor([rank])
    comm.maximum(flags)
    assert flags.item() == n - 1
    return comm.rank, comm.replica, mine


def collectives(rank: int, n: int) -> Any:
    sizes = (2, 3, 1) if n == 6 else (2,)
    places = [hops(rank, n, size) for size in sizes if size > 1]
    return places, [replicas(rank, n, k) for k in sizes if k > 1]


@pytest.mark.parametrize("n", [4, pytest.param(6, marks=pytest.mark.thorough)])
def test_collectives_in_nodes_and_in_replicas(n: int) -> None:
    found = run_ranks(n, collectives)
    for number, size in enumerate((2, 3) if n == 6 else (2,)):
        assert [mine[0][number] for mine in found] == [(rank % size) * (n // size) + rank // size for rank in range(n)]
        first: dict[int, torch.Tensor] = {}
        for place, _, mine in (rank[1][number] for rank in found):
            assert torch.equal(mine, first.setdefault(place, mine))  # replicas agree to the bit
        whole = torch.cat([first[place] for place in range(size)]).double()
        torch.testing.assert_close(whole, total(n, torch.float32), rtol=0, atol=1e-5)


CHOICES: dict[str, dict[str, Any]] = {"nodes": {"node_size": 2}, "replicas": {"shard_group": 2}}
RUNS = [
    ("tied", "sgd", {}),
    ("unused", "adamw", {"overlap_gather": True}),
    ("rich", "sgd", {"reduce_with": "all_reduce"}),
    ("adapted", "sgd", {"prefetch": 0, "persistence_numel": 30}),
]


def train_in_groups(rank: int, n: int) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for model, optimizer, options in RUNS:
        found[model, "ddp"] = training.train(rank, n, "ddp", model, optimizer, 4)
        for stage in OURS:
            for name, groups in CHOICES.items():
                found[model, stage, name] = training.train(rank, n, stage, model, optimizer, 4, **groups, **options)
    return found


@pytest.mark.thorough
def test_every_stage_trains_in_groups_as_under_ddp() -> None:
    found = run_ranks(4, train_in_groups)
    for mine in found:
        for (model, *rest), (losses, state) in mine.items():
            if rest == ["ddp"]:
                continue
            wanted_losses, wanted = mine[model, "ddp"]
            torch.testing.assert_close(torch.tensor(losses), torch.tensor(wanted_losses), rtol=1e-6, atol=1e-6)
            tolerance = 2e-4 if model == "unused" else 1e-6
            for key in wanted:
                assert (state[key] - wanted[key]).abs().max() <= tolerance, (model, rest, key)
            for key in wanted:  # all replicas end with the same bits
                assert torch.equal(state[key], found[0][model, *rest][1][key])


def save_and_load(rank: int, n: int, folder: str) -> dict[str, Any]:
    """From replicas to nodes and back, with accumulation and clipping on the way."""

    def fresh(**groups: Any) -> Any:
        model = zoo.build("unused")
        return training.engine_of("zero3", model, zoo.OPTIMIZERS["adamw"](model.parameters()), **groups)

    def step(engine: Any, number: int) -> None:
        with engine.no_sync():
            engine.backward(engine(*zoo.tokens(rank, n, 2 * number)))
        engine.backward(engine(*zoo.tokens(rank, n, 2 * number + 1)))
        engine.clip_grad_norm_(0.5)
        engine.step()

    states = {}
    source = fresh(shard_group=2)
    for number in range(3):
        step(source, number)
    source.save(f"{folder}/replicas")
    kept = source.state_dict()
    source.export_safetensors(f"{folder}/whole.safetensors")
    for name, groups in (("nodes", {"node_size": 2}), ("replicas", {"shard_group": 2}), ("plain", {})):
        engine = fresh(**groups)
        engine.load(f"{folder}/replicas")
        states[name, "loaded"] = engine.full_state_dict()
        engine.save(f"{folder}/{name}-again")
        back = fresh()
        back.load(f"{folder}/{name}-again")
        states[name, "again"] = back.full_state_dict()
        step(engine, 3)
        states[name, "trained"] = engine.full_state_dict()
    again = fresh(shard_group=2)
    again.load_state_dict(kept)
    step(again, 3)
    states["dict", "trained"] = again.full_state_dict()
    states["source", "loaded"] = source.full_state_dict(rank0_only=True)
    step(source, 3)
    states["source", "trained"] = source.full_state_dict()
    return states


def test_checkpoints_go_from_groups_to_groups(tmp_path: Path) -> None:
    first, *others = run_ranks(4, save_and_load, str(tmp_path))
    assert all(not mine["source", "loaded"] for mine in others)
    assert (tmp_path / "whole.safetensors").is_file()
    for (name, when), state in first.items():
        wanted = first["source", "trained" if when == "trained" else "loaded"]
        for key in wanted:
            if when != "trained" or name in ("replicas", "dict"):
                assert torch.equal(state[key], wanted[key]), (name, when, key)
            else:
                assert (state[key] - wanted[key]).abs().max() <= 2e-4, (name, when, key)
