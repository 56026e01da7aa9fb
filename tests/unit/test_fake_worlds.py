"""Refusals of a fake world, what it counts and leaves alone; and torch's private parts that it stands on."""

import inspect
import itertools
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses import fake_tensor
from torch.distributed.tensor import _sharding_prop
from torch.nn import functional as F
from torch.utils import _python_dispatch

import zerobench
from tests.cells import MODELS, cell
from zerobench.config import schema_training
from zerobench.config.compose import compose_cells
from zerobench.config.schema import Model
from zerobench.config.schema_memory import CpuOffload, NvmeOffloadConfig
from zerobench.fake import world_of_tensors
from zerobench.fake_execution import Target, execute
from zerobench.predict.estimate import simulated_ranks
from zerobench.registry import MODELS as REGISTRY
from zerobench.sweep.cell import ranks_of


class ReadsValues(nn.Module):
    """A model whose forward depends on its data in one of three `ways`."""

    def __init__(self, vocabulary: int, way: str) -> None:
        super().__init__()
        self.embedding, self.head, self.way = nn.Embedding(vocabulary, 8), nn.Linear(8, vocabulary), way

    def forward(self, tokens, targets):
        x = self.head(self.embedding(tokens))
        if self.way == "item" and x.mean().item() > 0:
            x = x * 2
        if self.way == "branch" and (x > 0).any():
            x = x * 2
        if self.way == "nonzero":
            x = x + x[x > 0].sum()
        return F.cross_entropy(x.flatten(0, 1), targets.flatten())


def reads_values(vocabulary: int = 256, way: str = "item") -> nn.Module:
    return ReadsValues(vocabulary, way)


@pytest.mark.parametrize(
    ("way", "operator"), [("item", "Tensor.item"), ("branch", "Tensor.item"), ("nonzero", "aten.index.Tensor")]
)
def test_a_model_that_reads_values_is_told_so_in_a_sentence(monkeypatch, way: str, operator: str) -> None:
    zerobench.register_model("reads_values", reads_values)
    schema = REGISTRY.schema_of("reads_values", reads_values, Model)
    monkeypatch.setitem(MODELS, "reads_values", schema(way=way))
    found = execute(cell("zero1", 2, "reads_values").config)
    words = f"the model reads values in its forward or backward ({operator}), and fake tensors have none"
    assert found.problem == f"tensors=fake: {words}: its allocations depend on the data; use tensors=real"
    assert not dist.is_initialized(), "what went wrong leaves nothing behind"


def test_fake_tensors_of_a_real_world_are_refused() -> None:
    words = "tensors=fake: ranks of a real world send values; use backend=simulated"
    assert cell("zero1", 2, tensors="fake").problems == (words,)


@pytest.mark.slow
def test_a_fake_world_counts_the_bytes_of_files_and_makes_none(tmp_path: Path) -> None:
    one = cell("zero2", 2, "mlp", offload=NvmeOffloadConfig(path=str(tmp_path), block_bytes=2**30))
    found = execute(one.config)
    assert not found.problem
    in_files = {row.category: row.max_bytes for row in found.record.memory if (row.tier, row.phase) == ("nvme", "step")}
    assert in_files["optimizer"] > 0
    assert any(row.kind == "write" for row in found.record.traffic)
    assert list(tmp_path.iterdir()) == []


def test_addresses_tell_storages_apart_and_views_of_one_apart_by_their_offset() -> None:
    with world_of_tensors(True):
        tensors = [
            torch.empty(size, dtype=dtype) for size in (1, 7, 2**40) for dtype in (torch.float32, torch.bfloat16)
        ]
        ranges = sorted((one.data_ptr(), one.data_ptr() + one.nbytes) for one in tensors)
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(ranges)), "no two overlap"
        for one in tensors:
            assert one.data_ptr() == one.untyped_storage().data_ptr() > 0
            assert one[-1:].data_ptr() == one.data_ptr() + one.nbytes - one.itemsize
            assert one.view(-1).detach().data_ptr() == one.data_ptr()
        assert torch.empty(0).data_ptr() == 0, "as of a real tensor without memory"


RMSPROP = {"optimizer": schema_training.RMSprop()}
RADAM = {"optimizer": schema_training.RAdam(), "precision": schema_training.Bf16()}


@pytest.mark.shown(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "n", "model", "more"),
    [
        pytest.param("zero_redundancy", 3, "odd", {}, marks=pytest.mark.thorough),
        pytest.param("zero2", 3, "tiny", RMSPROP, marks=pytest.mark.thorough),
        ("zero1", 4, "words", {"node_size": 2, **RADAM}),
        ("zero3", 3, "odd", {"offload": CpuOffload(fraction=0.5)}),
    ],
)
def test_the_rank_that_is_executed_has_the_largest_states_and_tells_of_the_fullest_host(
    strategy: str, n: int, model: str, more: dict[str, Any]
) -> None:
    config = cell(strategy, n, model, **more).config
    ranks = [execute(replace(config, rank=rank)) for rank in range(n)]
    states = [one.states_bytes for one in ranks]
    assert len(set(states)) > 1
    assert states[simulated_ranks(config)[0]] == max(states)
    assert execute(config).host_bytes == max(one.host_bytes for one in ranks), "another rank may be fullest there"


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "differ"), [("zero2", True), ("zero3", False)])
def test_of_ranks_that_own_matrices_the_one_with_the_peak_is_executed(strategy: str, differ: bool) -> None:
    """The largest states may be on another rank, and theirs are the figures of the states."""
    more = {"optimizer": schema_training.Muon(), "precision": schema_training.Bf16(), "clip": 1.0}
    config = cell(strategy, 3, "tiny", accumulation=2, **more).config
    ranks = [execute(replace(config, rank=rank)) for rank in range(3)]
    peaks, states = ([getattr(one, name) for one in ranks] for name in ("peak_bytes", "states_bytes"))
    peak, fullest = peaks.index(max(peaks)), states.index(max(states))
    assert (peak != fullest) == differ
    assert simulated_ranks(config)[0] == fullest
    found = execute(config)
    assert (found.rank, found.peak_bytes, found.states_bytes) == (peak, max(peaks), max(states))
    assert sum(found.at_most_states.values()) == max(states)
    assert ranks_of(replace(config, backend="simulated")) == [peak]


PRIVATE: list[tuple[ModuleType | type, str]] = [
    *((fake_tensor, name) for name in ("FakeTensor", "FakeTensorMode", "in_kernel_invocation_manager")),
    *((fake_tensor, name) for name in ("DataDependentOutputException", "DynamicOutputShapeException")),
    *((fake_tensor.FakeTensor, name) for name in ("constant", "fake_device")),
    (_python_dispatch, "_disable_current_modes"),
    (_python_dispatch, "_get_current_dispatch_mode_stack"),
    (_sharding_prop, "_propagate_use_strided_shard_flag"),
    (torch.utils, "weakref"),
    (nn.Module, "_apply"),
    (torch.distributed, "_verify_params_across_processes"),
    (torch.UntypedStorage, "_cdata"),
    *((torch._C._dynamo.guards, name) for name in ("_empty_strided_cpu", "_empty_strided_cuda")),
    (torch._C._dynamo.guards, "_reinterpret_tensor"),
    (_python_dispatch.TorchDispatchMode, "ignore_compile_internals"),
]
"""What fake worlds use of torch, or put something in the place of, and torch may move."""


@pytest.mark.parametrize(("owner", "name"), PRIVATE, ids=lambda one: getattr(one, "__name__", one))
def test_torchs_private_parts_are_where_they_were(owner: ModuleType | type, name: str) -> None:
    annotated = getattr(owner, "__annotations__", {})
    assert hasattr(owner, name) or name in annotated, f"{owner.__name__}.{name} has moved: zerobench/fake stands on it"


def test_torchs_swap_asks_weakref_for_who_watches_and_nothing_else_there_does() -> None:
    swap = inspect.getsource(torch.utils.swap_tensors)
    assert "weakref.getweakrefs(t1)" in swap
    assert inspect.getsource(torch.utils).count("weakref.") == swap.count("weakref.")


@pytest.mark.slow
def test_a_sequence_per_row_needs_no_mask() -> None:
    """Flash attention, which takes none, says so where one is made."""
    pytest.importorskip("transformers")
    words = ["model=huggingface", "huggingface.architecture=llama", "huggingface.layers=1", "data=synthetic"]
    (one,) = compose_cells([*words, "backend=simulated", "world_size=2", "precision=bf16"])
    found = execute(one.config, target=Target("cuda", "flash"))
    assert not found.problem
