"""Shortcuts of fake worlds: views, modes, and what DTensor asks about shapes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from tests.cells import cell
from tests.unit.test_estimate import LLAMA
from zerobench.commands.estimate.command import ask
from zerobench.fake.host_values import HostValues
from zerobench.fake.observers import Growth, IntervalMark, listening
from zerobench.fake.shortcuts import MISSED, VIEWS, Shortcuts, modes_called_directly
from zerobench.fake_execution import execute
from zerobench.predict.build import build_model
from zerobench.probes.fake_ledger import ShapesOnly
from zerobench.probes.ledger import Ledger

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


def test_outputs_of_known_layout_are_those_of_torchs_own_mode() -> None:
    """Twice each, since the second output is made from the layout of the first; never in another tensor's storage."""
    with FakeTensorMode() as fake:
        shortcuts = Shortcuts(fake)
        a, b, part = torch.zeros(4, 6), torch.zeros(4, 6).t(), torch.zeros(8, 6)[2:6]
        calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
            *((ATEN.add.Tensor, (x, y), {}) for x, y in ((a, part), (b, b), (a, a.to(torch.bfloat16)))),
            *((ATEN.add.Scalar, (a.int(), one), {}) for one in (1, 1.0, True)),
            (ATEN.mm.default, (a, b), {}),
            (ATEN.empty_like.default, (b,), {"dtype": torch.bool}),
            (ATEN.cat.default, ([a, part],), {}),
            (ATEN.zeros.default, ([3, 0],), {"device": torch.device("cpu")}),
            (ATEN._to_copy.default, (a,), {"dtype": torch.float16}),
            (ATEN._unsafe_view.default, (a, [24]), {}),
        ]
        for operator, args, named in calls:
            for _ in range(2):
                made, expected = shortcuts.run(operator, args, named), operator(*args, **named)
                new, other = (facts_of(x)[0] for x in (made, expected))
                assert (new[:4], new[5:], vars(made)) == (other[:4], other[5:], vars(expected)), operator
                assert made.untyped_storage().nbytes() == expected.untyped_storage().nbytes()
                aliases = any(
                    made.untyped_storage()._cdata == one.untyped_storage()._cdata
                    for one in args
                    if isinstance(one, torch.Tensor)
                )
                assert aliases == (operator is ATEN._unsafe_view.default)
        part = torch.zeros(48).view(8, 6)[2:6]
        for out in (part, part, torch.empty(0), torch.empty(0)):
            assert shortcuts.run(ATEN.mul.out, (a, a), {"out": out}) is out
            assert out.shape == a.shape


def test_modes_are_called_directly_inside_the_block_alone() -> None:
    """The guard goes and comes back; a tensor's device is the one that it stands for, in every mode."""
    before = {kind: vars(kind)["__torch_dispatch__"] for kind in (Ledger, HostValues, FakeTensorMode)}
    with modes_called_directly(), FakeTensorMode() as fake, HostValues(fake), Ledger():
        assert all(vars(kind)["__torch_dispatch__"] is not guarded for kind, guarded in before.items())
        tensor = torch.empty(3, device="cpu")
        assert isinstance(tensor, FakeTensor)
        assert torch.ops.prim.device(tensor) == torch.device("cpu")
    assert {kind: vars(kind)["__torch_dispatch__"] for kind in before} == before


def _rows_of(words: list[str]) -> list[Any]:
    question = ask(words, defaults={"strategy": ",".join(STRATEGIES), "world_size": "4", "data": "synthetic"})
    found = [execute(one.config, target=question.target) for one in question.cells if not one.problems]
    assert [one.problem for one in found] == [""] * len(found)
    records = [one.known for one in found]
    bytes_of = [(one.memory, one.allocated_bytes, one.reserved_bytes, one.host_bytes, one.file_bytes) for one in found]
    # without the number of allocations: the first cell of a process allocates a scalar more
    memory = [
        [(row.phase, row.category, row.tier, row.at_peak_bytes, row.max_bytes) for row in one.memory] for one in records
    ]
    rows = [
        (sizes, one.tensors, one.lines, one.traffic, one.schedule) for sizes, one in zip(memory, records, strict=True)
    ]
    return [*zip(bytes_of, rows, strict=True)]


@pytest.mark.parametrize(
    "words",
    [
        "model=gpt_tiny precision=bf16 activation=checkpoint",
        pytest.param("model=gpt_tiny precision=fp16 clip=1.0 activation=selective,offload", marks=pytest.mark.thorough),
        pytest.param("model=gpt_tiny precision=fp32 accumulation=3 activation=checkpoint_offload",
                     marks=pytest.mark.thorough),
        pytest.param("model=gpt_tiny precision=bf16 offload=cpu,cpu_delayed,nvme strategy=zero1,zero2,zero3",
                     marks=pytest.mark.thorough),
        pytest.param("model=gpt_tiny optimizer=muon,adagrad strategy=ddp,zero2,fsdp2", marks=pytest.mark.thorough),
        pytest.param("model=gpt_small model.layers=5 precision=bf16", marks=pytest.mark.thorough),
        pytest.param("model=huggingface huggingface.config=config.json precision=bf16 sequence=64 "
                     "strategy=ddp,zero2,zero3,fsdp2 activation=none,checkpoint", marks=pytest.mark.thorough),
        "model=gpt_tiny strategy=ddp,zero2,fsdp2 device=cpu",
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


class _Updates:
    """Storages that appear while an optimizer updates."""

    def __init__(self) -> None:
        self.phase = ""
        self.largest_bytes = 0

    def hear(self, heard: Growth | IntervalMark) -> None:
        if isinstance(heard, Growth):
            if self.phase == "update":
                self.largest_bytes = max(self.largest_bytes, heard.grown)
        elif heard.what == "phase":
            self.phase = heard.name


@pytest.mark.slow
def test_whole_tensors_that_dtensor_asks_about_are_not_counted() -> None:
    """In the first update as in later ones nothing is larger than a shard's state."""
    updates, n = _Updates(), 8
    with listening(updates.hear):
        found = execute(cell("fsdp2", n, backend="simulated", tensors="fake").config)
    assert not found.problem
    largest_numel = max(parameter.numel() for parameter in build_model(found.config).parameters())
    assert updates.largest_bytes == 4 * largest_numel // n
