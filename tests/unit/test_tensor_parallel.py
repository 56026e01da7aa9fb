"""Ranks that share a model: what cannot be is one error message; what is cut; the bytes that follow."""

import pytest
import torch

from tests.cells import cell
from zerobench.config.cell import Cell, CellConfig
from zerobench.config.schema_memory import CpuOffload, PartitionActivations, SelectiveActivations
from zerobench.config.schema_training import Fp16, Muon
from zerobench.fake_execution import execute
from zerobench.predict.build import build_model, facts_of
from zerobench.predict.estimate import tensor_axis_bytes
from zerobench.records import TENSOR_AXIS
from zerobench.sweep.parity import training_key
from zerobench.theory.tensor_parallel import TensorParallelShape


def in_parts(name: str = "zero2", n: int = 4, ranks: int = 2, **more) -> Cell:
    return cell(name, n, tensor_parallel=ranks, **more)


@pytest.mark.parametrize(
    ("words", "made"),
    [
        ("tensor_parallel=8: a rank has whole heads, so it must be a divisor of model.heads=4", {"n": 8, "ranks": 8}),
        ("tensor_parallel=2: must be a divisor of world_size=3", {"n": 3}),
        ("tensor_parallel=4: must be a divisor of world_size=2", {"n": 2, "ranks": 4}),
        ("tensor_parallel=0: must be at least 1", {"ranks": 0}),
        (
            "tensor_parallel=2: model=mlp has no plan by which its matrices are cut; use a model of gpt",
            {"model": "mlp"},
        ),
        ("tensor_parallel=2: strategy=fsdp2 takes all ranks for itself; use one of", {"name": "fsdp2"}),
        ("tensor_parallel=2: clip=1.0 does not know of a model in parts", {"clip": 1.0}),
        ("tensor_parallel=2: node_size=2 does not", {"node_size": 2}),
        ("tensor_parallel=2: shard_group=2 does not", {"shard_group": 2}),
        ("tensor_parallel=2: offload=cpu does not", {"offload": CpuOffload()}),
        ("tensor_parallel=2: precision=fp16 does not", {"precision": Fp16()}),
        ("tensor_parallel=2: optimizer=muon does not", {"optimizer": Muon()}),
        ("tensor_parallel=2: compile=blocks does not", {"compile": "blocks"}),
        ("tensor_parallel=2: arena=True does not", {"arena": True}),
        ("tensor_parallel=2: model.tiles=2 does not", {"model": "tiles"}),
        ("tensor_parallel=2: strategy.construct=meta does not", {"strategy": {"construct": "meta"}}),
        ("tensor_parallel=2: activation=selective does not", {"activation": SelectiveActivations()}),
        (
            "activation=partition: it is for ranks that share a model",
            {"ranks": 1, "activation": PartitionActivations()},
        ),
        ("batch=5: world_size=4 over tensor_parallel=2 must divide it", {"batch": 5}),
    ],
)
def test_what_cannot_be_is_an_error_message(words: str, made: dict) -> None:
    assert [one for one in in_parts(**made).problems if one.startswith(words)], in_parts(**made).problems


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


def test_ranks_of_a_model_have_its_matrices_together() -> None:
    torch.manual_seed(0)
    whole = dict(build_model(cell("ddp", 2).config).named_parameters())
    part = dict(build_model(in_parts("ddp", 2).config).named_parameters())
    assert part.keys() == whole.keys()
    cut = [name for name in whole if part[name].shape != whole[name].shape]
    assert {name.split(".", 2)[2] for name in cut} == {
        "attention_in.weight", "attention_in.bias", "attention_out.weight", "mlp_in.weight", "mlp_in.bias",
        "mlp_out.weight",
    }  # fmt: skip
    assert all(2 * part[name].numel() == whole[name].numel() for name in cut)
    assert facts_of(in_parts().config).psi == sum(one.numel() for one in part.values())


def test_closed_form() -> None:
    plain = TensorParallelShape(4, 3, 1000, 2)
    assert plain.predict(2) == {"all_reduce": 2 * 3 * 4 * 2 * 3 * 1000 * 2 // 4, "all_gather": 0}
    again = TensorParallelShape(4, 3, 1000, 2, recomputes=True, partitions=True).predict(2)
    assert again["all_reduce"] == 10 * again["all_gather"]


def test_a_fake_world_has_both_axes() -> None:
    config = in_parts("zero2", 16, 4, activation=PartitionActivations(least_bytes=1024)).config
    found = execute(config)
    assert not found.problem
    rows = [row for row in found.known.traffic if row.axis == TENSOR_AXIS]
    moved = {kind: sum(row.wire_bytes for row in rows if row.kind == kind) for kind in ("all_reduce", "all_gather")}
    assert moved == tensor_axis_bytes(config)
