"""A step never makes the host wait for the GPU: nothing in it asks for a value. Without a GPU, on a modeled one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests import zoo
from tests.distributed.test_streams import cuda  # noqa: F401  # a fixture
from tests.plain_kernels import PlainKernels
from zerobench.strategies import wrap
from zerobench.zero import initialize
from zerobench.zero.optim import one_pass
from zerobench.zero.optim.step_by_tiles import ONE_PASS
from zerobench.zero.precision import LossScaling

ASKING = (
    "aten._local_scalar_dense", "aten.nonzero", "aten.masked_select", "aten.equal", "aten.is_nonzero", "aten.unique"
)  # fmt: skip
"""Operators whose result is a value or a shape that depends on values: on a GPU the host waits for it."""

VARIANTS: list[tuple[str, dict[str, Any], torch.dtype]] = [
    ("zero1", {}, torch.float32),
    ("zero2", {}, torch.bfloat16),
    ("zero3", {"prefetch": 2}, torch.bfloat16),
    ("megatron", {}, torch.bfloat16),
    *((f"zero{stage}", {"loss_scaling": LossScaling(initial=1024.0)}, torch.float16) for stage in (1, 2, 3)),
    ("zero2", {"loss_scaling": LossScaling(initial=1024.0), "tile_bytes": 1024}, torch.float16),
    *((f"zero{stage}", {"tile_bytes": ONE_PASS}, torch.bfloat16) for stage in (1, 2, 3)),
    ("zero2", {"loss_scaling": LossScaling(initial=1024.0), "tile_bytes": ONE_PASS}, torch.float16),
]


class NoKernels(PlainKernels):
    """Updates nothing: a kernel does not wait."""

    def update(self, *_: Any) -> None:
        pass


METHODS = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__")
"""Methods of a tensor that, on a CPU, read memory and dispatch nothing."""


class Questions(TorchDispatchMode):
    """Counts reads of tensors' values, by operator. `flags`: a tensor in host memory, which may be read."""

    def __init__(self, flags: torch.Tensor | None = None) -> None:
        super().__init__()
        self.asked: list[str] = []
        self._flags = flags
        self._patches = [mock.patch.object(torch.Tensor, name, self._noting(name)) for name in METHODS]

    def _noting(self, name: str) -> Callable[..., Any]:
        method = getattr(torch.Tensor, name)

        def note(tensor: torch.Tensor, *arguments: Any) -> Any:
            if tensor is not self._flags:
                self.asked.append(name)
            return method(tensor, *arguments)

        return note

    def __enter__(self) -> Questions:
        for patch in self._patches:
            patch.start()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for patch in self._patches:
            patch.stop()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        if str(function).startswith(ASKING):
            self.asked.append(str(function))
        return function(*arguments, **(named or {}))


def step(engine: Any, number: int) -> torch.Tensor:
    loss: torch.Tensor = engine(*zoo.tokens(1, 2, number))
    engine.backward(loss)
    engine.clip_grad_norm_(1.0)
    engine.step()
    return loss.detach()


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize(("strategy", "options", "dtype"), VARIANTS)
def test_a_step_asks_for_nothing(strategy: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    module = zoo.build("tied").to(dtype)
    with mock.patch.dict(one_pass.KERNELS, {"cpu": NoKernels}):
        engine = initialize(
            module, zoo.OPTIMIZERS["adamw"](module.parameters()), strategy, bucket_bytes=4096, **options
        )
    assert (engine.update.one_pass is not None) == (options.get("tile_bytes") == ONE_PASS)
    step(engine, 0)
    with Questions(engine.update._used_flags) as questions:
        for number in range(1, 3):
            step(engine, number)
    assert questions.asked == []


@pytest.mark.usefixtures("cuda")
def test_the_baseline_asks_for_nothing_either() -> None:
    module = zoo.build("tied").to(torch.float16)
    section = {"name": "ddp", "bucket_bytes": 2**20, "broadcast_buffers": True}
    scaling = {"tile_bytes": 2**20, "loss_scaling": LossScaling(initial=1024.0)}
    engine = wrap(section, module, zoo.OPTIMIZERS["adamw"](module.parameters()), **scaling)
    step(engine, 0)
    with Questions() as questions:
        step(engine, 1)
    assert questions.asked == []


@pytest.mark.usefixtures("cuda")
def test_a_question_is_seen() -> None:
    for question in (float, bool, int, lambda t: t.tolist(), lambda t: t.cpu(), lambda t: t.nonzero()):
        with Questions() as questions:
            question(torch.ones(1) * 2)
        assert questions.asked
