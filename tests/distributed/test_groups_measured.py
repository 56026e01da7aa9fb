"""Bytes that groups and quantization hold and send, against theory: real ranks, N = 4."""

from typing import Any

import pytest

from tests.cells import cell
from tests.distributed.variants import BUCKET_BYTES, account
from zerobench.config import schema_memory as memory
from zerobench.config.cell import CellConfig
from zerobench.config.schema import Measure
from zerobench.config.schema_training import Bf16
from zerobench.predict.estimate import training_shapes
from zerobench.predict.quantized_share import coded_share, units_of
from zerobench.strategies import shape_of as strategy_shape
from zerobench.theory.groups import GroupShape
from zerobench.theory.replay.states import predict_states
from zerobench.theory.replay.traffic import predict_traffic

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
    one = cell(name.split()[0], N, **options)
    assert not one.problems, one.problems
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
    schedule, shapes, groups = records[0].schedule, training_shapes(config), config.groups
    prediction = predict_states(strategy_shape(config.strategy.values()), schedule, N, *shapes, groups)
    memory = [m for record in records for m in record.memory if m.phase == "step" and m.tier == "device"]
    for category, size in (("states", prediction.states_bytes), *prediction.highest.items()):
        assert max(m.max_bytes for m in memory if m.category == category) == size, category
    expected = predict_traffic(strategy_shape(config.strategy.values()), schedule, N, groups, shapes[1])
    assert moved(records, "volume_elements") == pytest.approx(expected.volume, rel=1e-12)
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


@pytest.mark.thorough
def test_what_is_called_quantized_traveled_as_bytes(measured) -> None:
    shares = {}
    for name, records in measured.items():
        units = units_of(records[0].schedule.shapes, CELLS[name].get("strategy", {}).get("persistence_numel", 0))
        assert sum(units.values()) == sum(s.numel for s in records[0].schedule.shapes if s.trainable)
        traffic = records[0].traffic
        shares[name] = coded_share(traffic, "all_gather", units), coded_share(traffic, "reduce_scatter", units)
    assert shares["zero3 nodes"] == shares["zero3 hpz"] == (0, 0)
    assert (shares["zero3 qwz"], shares["zero3 qgz"], shares["zero3 all"]) == ((1, 0), (0, 1), (1, 1))
    kept, reduced = shares["zero3 all, one node"]
    assert 0.98 < kept < 1  # small parameters stay, and are gathered in full
    assert reduced == 1


def test_groups_that_are_everybody_change_nothing() -> None:
    for groups in (GroupShape(8, node_size=8), GroupShape(8, shard_group=8), GroupShape(8, node_size=1)):
        flat = GroupShape(8)
        assert groups.gather(4096, 2).volume == flat.gather(4096, 2).volume == 4096
        assert groups.reduction_bytes(4096, 2) == flat.reduction_bytes(4096, 2)
