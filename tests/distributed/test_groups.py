"""Nodes and shard groups: what collectives put where, bytes against theory. Training: test_composition; checkpoints:
test_checkpoint.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.cells import sound
from tests.distributed.test_comm import NUMEL, random_full
from tests.distributed.variants import BUCKET_BYTES, account, assert_as_predicted
from tests.ranks import run_ranks
from zerobench.config import schema_memory as memory
from zerobench.config.cell import CellConfig
from zerobench.config.schema import Measure
from zerobench.config.schema_training import Bf16
from zerobench.predict.estimate import training_shapes
from zerobench.strategies import shape_of as strategy_shape
from zerobench.theory.replay.traffic import predict_traffic
from zerobench.zero.comm import gloo
from zerobench.zero.comm.hierarchical import connect_groups

CPU = torch.device("cpu")


def total(n: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.stack([random_full(rank, n, dtype).double() for rank in range(n)]).sum(0)


def hops(rank: int, n: int, node_size: int) -> int:
    """Two-hop collectives by value, several in flight at once and waited for in another order on each rank."""
    gloo.GATHER_PIECE_BYTES = gloo.REDUCE_PIECE_BYTES = 512
    comm = connect_groups(None, CPU, node_size, None)
    assert (comm.size, comm.averaged_ranks, comm.replica) == (n, n, 0)
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
    assert (comm.size, comm.averaged_ranks, comm.rank, comm.replica) == (k, n, rank % k, rank // k)
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


N = 4
NODES, PAPER, LATE = {"node_size": 2}, {"mode": "paper"}, {"accumulate": "last"}
ALL = memory.AllOfZeropp()
SDP4BIT = memory.Hpz(quantize_gradients=True, bits_within=8, differences=True)
WIDE = Bf16(wire_dtype="fp32")

CELLS: dict[str, dict[str, Any]] = {
    "zero1 nodes": {"precision": Bf16(), **NODES},
    "zero2 nodes": {**NODES, "accumulation": 2},
    "zero3 nodes": {"precision": Bf16(), "strategy": PAPER, "model": "million", **NODES},
    "zero3 nodes, kept": {"strategy": {"persistence_numel": 600, "prefetch": 2}, **NODES},
    "zero1 vendor nodes": {"strategy": {"mode": "vendor"}, **NODES},
    "zero1 groups": {"shard_group": 2},
    "zero2 groups": {"shard_group": 2, "precision": Bf16(gradient_dtype="fp32", wire_dtype="bf16"), "accumulation": 2},
    "zero3 groups": {"shard_group": 2, "precision": Bf16(), **NODES},
    "zero3 qwz": {"precision": Bf16(), "zeropp": memory.Qwz(), **NODES},
    "zero3 hpz": {"precision": Bf16(), "zeropp": memory.Hpz(), "accumulation": 2, **NODES},
    "zero3 qgz": {"precision": Bf16(), "zeropp": memory.Qgz(gradient_block=100), "strategy": PAPER, **NODES},
    "zero3 all": {"precision": Bf16(), "zeropp": ALL, "strategy": PAPER, "model": "million", **NODES},
    "zero3 all fp32": {"zeropp": memory.AllOfZeropp(weight_block=2048, gradient_block=64), "model": "odd", **NODES},
    "zero3 all, frozen": {"zeropp": ALL, "model": "half_frozen", "accumulation": 2, **NODES},
    "zero3 all, late": {"zeropp": ALL, "precision": WIDE, "accumulation": 2, "strategy": LATE, **NODES},
    "zero3 kept differences": {"zeropp": SDP4BIT, "precision": Bf16(), "model": "million", **NODES},
    "zero3 kept differences, frozen": {"zeropp": SDP4BIT, "model": "half_frozen", "accumulation": 2, **NODES},
    "zero3 all, one node": {"zeropp": ALL, "strategy": {"persistence_numel": 600}},
    "zero3 all, a rank a node": {"zeropp": ALL, "node_size": 1},
}  # fmt: skip


def config_of(name: str) -> CellConfig:
    options = {"model": "tiny", "bucket_bytes": BUCKET_BYTES // 4, "micro_batch": 1, **CELLS[name]}
    one = sound(name.split()[0], N, **options)
    return one.changed(measure=Measure(1, 2)).config


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> dict[str, Any]:
    configs = [config_of(name) for name in CELLS]
    return dict(zip(CELLS, account(configs, tmp_path_factory.mktemp("ranks")), strict=True))


def moved(records: Any, value: str) -> float:
    return max(sum(getattr(t, value) for t in record.traffic if not t.control) for record in records)


@pytest.mark.thorough
@pytest.mark.parametrize("name", CELLS)
def test_memory_and_traffic_are_those_of_the_theory(measured, name: str) -> None:
    config, records = config_of(name), measured[name]
    assert_as_predicted(config, records)
    strategy = strategy_shape(config.strategy.values())
    expected = predict_traffic(strategy, records[0].schedule, config.groups, training_shapes(config)[1])
    if config.node_size is not None:
        assert moved(records, "within_bytes") == pytest.approx(expected.within, rel=1e-12)
        assert moved(records, "between_bytes") == pytest.approx(expected.between, rel=1e-12)
    else:
        assert moved(records, "between_bytes") == 0
    assert moved(records, "wire_bytes") == pytest.approx(expected.within + expected.between, rel=1e-12)


@pytest.mark.thorough
def test_bytes_between_nodes_are_those_of_the_paper(measured) -> None:
    """A node sends (Z-1)/Z times 6 bytes per parameter in bf16, under ZeRO++ 1 + 0 + 1/2 and 4/256 twice for scales."""
    share, ranks_a_node = 1 / 2, 2
    for name, each in (("zero3 nodes", 6), ("zero3 all", 1 + 4 / 256 + 1 / 2 + 4 / 256)):
        psi = sum(s.numel for s in measured[name][0].schedule.shapes)
        sent = ranks_a_node * moved(measured[name], "between_bytes")
        assert sent == pytest.approx(share * each * psi, rel=0.01), name  # 64-byte padding of parameters and payloads
