"""Fake worlds: refusals, counts, shortcuts, the stand-in for torch's compiler, and the private parts of torch below."""

import inspect
import itertools
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import _sharding_prop
from torch.nn import functional as F
from torch.utils import _python_dispatch

import zerobench
from tests.cells import MODELS, cell
from tests.unit.test_estimate import LLAMA
from zerobench.commands.simulated import ask
from zerobench.config import schema_training
from zerobench.config.compose import compose_cells
from zerobench.config.schema import Model
from zerobench.config.schema_memory import NvmeOffloadConfig
from zerobench.fake import compiler, world_of_tensors
from zerobench.fake.operators import MISSED, VIEWS, Shortcuts
from zerobench.predict.estimate import simulated_ranks
from zerobench.probes.ledger import Ledger, ShapesOnly
from zerobench.ranks.start_ranks import launch_each
from zerobench.registry import MODELS as REGISTRY
from zerobench.simulation.execute import Target, execute
from zerobench.sweep.cell import ranks_to_run


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


@pytest.mark.thorough
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
    assert ranks_to_run(replace(config, backend="simulated")) == [peak]


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
    (one,) = compose_cells([*words, "backend=simulated", "world_size=2", "precision=bf16"], target="cuda")
    found = execute(one.config, target=Target("cuda", "flash"))
    assert not found.problem


ATEN = torch.ops.aten

ARGUMENTS: dict[Any, tuple[Any, ...]] = {
    ATEN.alias.default: (),
    ATEN.as_strided.default: ([2, 3], [1, 2], 5),
    ATEN.detach.default: (),
    ATEN.expand.default: ([7, 4, 6],),
    ATEN.permute.default: ([1, 0],),
    ATEN.select.int: (0, 2),
    ATEN.slice.Tensor: (1, 1, 5, 2),
    ATEN.split.Tensor: (3, 0),
    ATEN.split_with_sizes.default: ([1, 3], 0),
    ATEN.t.default: (),
    ATEN.transpose.int: (0, 1),
    ATEN.unbind.int: (0,),
    ATEN.unsqueeze.default: (1,),
    ATEN.view.default: ([2, 12],),
    ATEN._unsafe_view.default: ([2, 12],),
}
"""Operator -> its arguments behind a tensor of shape (4, 6)."""

STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "fsdp2", "megatron")


def facts_of(made: Any) -> list[tuple[Any, ...]]:
    """Shape, strides, offset, storage, dtype and device of each view."""
    some = [made] if isinstance(made, torch.Tensor) else list(made)
    return [
        (type(one), one.shape, one.stride(), one.storage_offset(), one.untyped_storage()._cdata, one.dtype, one.device)
        for one in some
    ]


def test_direct_views_are_those_of_torchs_own_mode() -> None:
    """Each operator of VIEWS, of a whole tensor and of one that begins inside its storage."""
    assert ARGUMENTS.keys() == VIEWS
    with FakeTensorMode() as fake:
        shortcuts = Shortcuts(fake)
        whole = torch.zeros(40, dtype=torch.bfloat16)
        for base in (whole[:24].view(4, 6), whole[16:].view(4, 6)):
            for operator, more in ARGUMENTS.items():
                named: dict[str, Any] = {}
                assert facts_of(shortcuts.view_of(operator, (base, *more), named)) == facts_of(operator(base, *more))


def _rows_of(words: list[str]) -> list[Any]:
    question = ask(words, defaults={"strategy": ",".join(STRATEGIES), "world_size": "4", "data": "synthetic"})
    found = [execute(one.config, target=question.target) for one in question.cells if not one.problems]
    assert [one.problem for one in found] == [""] * len(found)
    records = [one.result for one in found]
    bytes_of = [(one.memory, one.allocated_bytes, one.reserved_bytes, one.host_bytes, one.file_bytes) for one in found]
    # without the number of allocations: the first cell of a process allocates a scalar more
    rows = []
    for one in records:
        memory = [(row.phase, row.category, row.tier, row.at_peak_bytes, row.max_bytes) for row in one.memory]
        rows.append((memory, one.tensors, one.lines, one.traffic, one.schedule))
    return [*zip(bytes_of, rows, strict=True)]


@pytest.mark.parametrize(
    "words",
    [
        "model=gpt_tiny model.layers=2 precision=bf16 activation=checkpoint strategy=ddp,zero3,fsdp2",
        pytest.param("model=gpt_tiny precision=bf16 activation=checkpoint", marks=pytest.mark.thorough),
        pytest.param("model=gpt_tiny precision=fp16 clip=1.0 activation=selective,offload", marks=pytest.mark.thorough),
        pytest.param("model=gpt_tiny precision=fp32 accumulation=3 activation=checkpoint_offload",
                     marks=pytest.mark.thorough),
        pytest.param("model=gpt_tiny precision=bf16 offload=cpu,cpu_delayed,nvme strategy=zero1,zero2,zero3",
                     marks=pytest.mark.thorough),
        pytest.param("model=gpt_tiny optimizer=muon,adagrad strategy=ddp,zero2,fsdp2", marks=pytest.mark.thorough),
        pytest.param("model=gpt_small model.layers=5 precision=bf16", marks=pytest.mark.thorough),
        pytest.param("model=huggingface huggingface.config=config.json precision=bf16 sequence=64 "
                     "strategy=ddp,zero2,zero3,fsdp2 activation=none,checkpoint", marks=pytest.mark.thorough),
        pytest.param("model=gpt_tiny strategy=ddp,zero2,fsdp2 device=cpu", marks=pytest.mark.thorough),
    ],
)  # fmt: skip
def test_bytes_are_equal_with_and_without_shortcuts(words: str, tmp_path: Path, monkeypatch) -> None:
    """Every strategy: each phase's extremes, each line, tensor and collective, and the allocator's figures."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    quick = _rows_of(words.split())
    assert len(quick) >= 3
    monkeypatch.setattr(ShapesOnly, "__enter__", Ledger.__enter__)  # every operator passes every mode
    monkeypatch.setattr(Shortcuts, "_output_of", lambda *_: MISSED)
    assert _rows_of(words.split()) == quick


def assert_runs(words: str) -> None:
    """Asserts that code ends well in a process in which the compiler has a stand-in."""
    begin = "from zerobench.fake.compiler import is_loaded, stand_in\nstand_in()\n"
    done = subprocess.run([sys.executable, "-c", begin + words], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.thorough
def test_the_names_that_are_stood_in_for_are_where_they_were() -> None:
    assert_runs(
        "import torch\nstand_in = vars(torch._dynamo)['_names']\nmode = torch._dynamo.utils.get_optimize_ddp_mode()\n"
        "torch._dynamo.reset()\nassert all(hasattr(torch._dynamo, name) for name in stand_in), stand_in\n"
        "assert torch._dynamo.source.ConstantSource('a').name == 'a' and torch._dynamo.source.RandomValueSource\n"
        "assert torch._dynamo.utils.get_optimize_ddp_mode() == mode\nassert torch._dynamo.trace_rules.clear_lru_cache\n"
    )


@pytest.mark.slow
def test_simulations_load_no_compiler(tmp_path: Path) -> None:
    strategies = ("ddp", "zero3", "fsdp2")
    outcomes = launch_each(simulated, strategies, tmp_path, 300.0, 2)
    assert outcomes == [("", False)] * len(strategies)


def simulated(strategy: str, _tell: object) -> tuple[str, bool]:
    """The problem of a simulated cell, and whether its process has loaded the compiler."""
    found = execute(cell(strategy, 2, "checkpointed").config)
    return found.problem, compiler.is_loaded()
