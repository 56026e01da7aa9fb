"""Nodes, shard groups, ZeRO++ and ranks that share a model, as a user asks for them: refusals, and what is heard."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.cells import cell
from zerobench.config.cell import Cell, CellConfig
from zerobench.config.schema_memory import AllOfZeropp, Hpz, PartitionActivations
from zerobench.predict.estimate import tensor_axis_bytes
from zerobench.probes.traffic import TrafficMeter
from zerobench.records import TENSOR_AXIS
from zerobench.simulation.execute import execute
from zerobench.sweep.parity import training_key
from zerobench.theory.groups import GroupShape, payload_bytes
from zerobench.zero.comm.quantize import Codec

HARMLESS: list[tuple[int, dict[str, Any]]] = [
    (1, {"zeropp": AllOfZeropp()}),  # the baseline of a sweep over world sizes: nothing travels
    (1, {"zeropp": Hpz()}),
    (1, {"zeropp": Hpz(), "node_size": 1}),
    (4, {"zeropp": AllOfZeropp()}),  # one node: codes, and in the backward exact parameters
    # every rank keeps whole units: the end of a sweep over node sizes
    (4, {"zeropp": Hpz(), "node_size": 1}),
]


@pytest.mark.parametrize(("ranks", "more"), HARMLESS)
def test_what_has_an_effect_or_is_a_baseline_is_not_refused(ranks: int, more: dict[str, Any]) -> None:
    assert not cell("zero3", ranks, **more).problems


def test_theory_knows_payloads_as_the_codec_does() -> None:
    for bits in (8, 4):
        for numel in (1, 16, 255, 256, 257, 4096, 99_999):
            for block in (8, 100, 256):
                assert payload_bytes(bits, numel, block) == Codec(bits, block).payload_bytes(numel)


def test_formulas_of_a_large_world() -> None:
    """64 ranks in nodes of 8: a node sends 7/8 of 6 and of 1.5 bytes a parameter, scales apart; groups 2/k ψ more."""
    numel = 64 * 2**20
    plain, codes = (
        GroupShape(64, node_size=8, **more)
        for more in ({}, {"weight_block": 2**20, "gradient_block": 2**20, "secondary": True})
    )
    sent = plain.gather(numel, 2) + plain.gather(numel, 2) + plain.reduction(numel, 2)
    assert 8 * sent.between == 7 / 8 * 6 * numel
    less = codes.gather(numel, 2) + codes.secondary_gather(numel, 2) + codes.reduction(numel, 2)
    assert 8 * less.between == pytest.approx(7 / 8 * 1.5 * numel, rel=1e-3)
    groups = GroupShape(64, shard_group=8)
    assert groups.reduction(numel, 2).volume == numel + 2 * numel // 8
    assert groups.gather(numel, 2).volume == numel


def test_the_meter_tells_nodes_apart() -> None:
    """On the fake backend, rank 1 of 4 in nodes of 2: sends by their peer, collectives by the ring's links."""
    dist.init_process_group("fake", rank=1, world_size=4)
    try:
        inside, across = dist.new_group([0, 1]), dist.new_group([1, 3])
        meter, tensor = TrafficMeter(), torch.ones(8)
        meter.node_size, meter.phase = 2, "forward"
        with meter:
            for peer in (0, 2):
                dist.send(tensor, peer)
            for group in (None, inside, across):
                dist.all_reduce(tensor, group=group)
        found = [(o.within_bytes, o.between_bytes) for o, _ in meter.operations]
    finally:
        dist.destroy_process_group()
    assert found == [(32, 0), (0, 32), (24, 24), (32, 0), (0, 32)]


def in_parts(name: str = "zero2", n: int = 4, ranks: int = 2, **more) -> Cell:
    return cell(name, n, tensor_parallel=ranks, **more)


def test_a_batch_is_over_models() -> None:
    config = in_parts(batch=8).config
    assert (config.micro_batch, config.data_ranks, config.batching.world_size) == (4, 2, 2)
    assert config.groups.world_size == 2


def test_a_cell_of_whole_models_keeps_its_identity() -> None:
    whole, parts = cell("zero2", 4).config, in_parts().config
    assert "tensor_parallel" not in whole.as_dict()
    assert CellConfig.from_dict(parts.as_dict()) == parts
    assert training_key(whole) != training_key(parts)
    assert parts.systems_label == "tensor_parallel=2"


def test_a_fake_world_has_both_axes() -> None:
    config = in_parts("zero2", 16, 4, activation=PartitionActivations(least_bytes=1024)).config
    found = execute(config)
    assert not found.problem
    rows = [row for row in found.result.traffic if row.axis == TENSOR_AXIS]
    moved = {kind: sum(row.wire_bytes for row in rows if row.kind == kind) for kind in ("all_reduce", "all_gather")}
    assert moved == tensor_axis_bytes(config)
