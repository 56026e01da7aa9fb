"""Engines made, loaded, stepped and saved inside torch.inference_mode(), as by an evaluation that rolls back: no tensor
that outlives the call may be one of inference mode, which torch lets nobody change or train with afterwards.
"""

import copy
import gc
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests import zoo
from tests.distributed.training import loss_of, take_steps
from tests.ranks import run_ranks
from zerobench.zero import STAGES, LossScaling, NvmeOffload, Offload, initialize

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    **{stage: (stage, {}) for stage in STAGES},
    "zero1 in bf16": ("zero1", {}),
    "zero2 in slots, scaled": ("zero2", {"loss_scaling": LossScaling(initial=4.0), "arena": True}),
    "zero2, cpu": ("zero2", {"offload": Offload()}),
    "zero2, late": ("zero2", {"offload": Offload(delayed_after=1)}),
    "zero3 in bf16, nvme": ("zero3", {"offload": "files"}),
    "zero3, hpz": ("zero3", {"zeropp": "hpz", "node_size": 1}),
    "zero3 in bf16, quantized": ("zero3", {"zeropp": "all", "node_size": 1}),
}
"""Engines that keep something of every sort: masters, states and gradients in each tier, slots, copies, scales."""


class Made(zoo.Tied):
    """A model with a buffer that inference mode made, such as a table of positions."""

    def __init__(self) -> None:
        super().__init__()
        with torch.inference_mode():
            table = torch.ones(3)
        self.register_buffer("table", table)


def rollbacks(engine: Any, folder: Path) -> dict[str, Callable[[], Any]]:
    """Saves the state in every way; returns the ways back."""
    engine.save(folder / "checkpoint")
    engine.save(folder / "later", asynchronous=True).wait()
    engine.export_safetensors(folder / "weights.safetensors")
    own, whole = engine.state_dict(), engine.full_state_dict()
    with torch.inference_mode(False):
        states = copy.deepcopy(engine.optimizer.state_dict())
    for value in (*own["tensors"].values(), *whole.values()):
        assert not value.is_inference()
    parameters = {name: whole[name] for name, _ in engine.module.named_parameters()}

    def write() -> None:
        with engine.full_parameters() as module, torch.no_grad():
            for name, parameter in module.named_parameters():
                parameter.data = whole[name] + 0

    return {
        "load": lambda: engine.load(folder / "checkpoint"),
        "load of a late one": lambda: engine.load(folder / "later"),
        "load_state_dict": lambda: engine.load_state_dict(copy.deepcopy(own)),
        "weights_only": lambda: engine.load(folder / "checkpoint", weights_only=True),
        "load_weights": lambda: engine.load_weights(folder / "weights.safetensors"),
        "module.load_state_dict": lambda: engine.module.load_state_dict(parameters, strict=False),
        "optimizer.load_state_dict": lambda: engine.optimizer.load_state_dict(copy.deepcopy(states)),
        "full_parameters": write,
    }


def there_and_back(kind: str, rank: int, n: int, folder: str, mode: Callable[[], Any]) -> list[float]:
    """Losses of a training that is made, stepped, evaluated, saved and rolled back within `mode`."""
    strategy, given = KINDS[kind]
    offload = {"offload": NvmeOffload(path=folder)} if given.get("offload") == "files" else {}
    torch.manual_seed(0)
    model = Made().to(torch.bfloat16 if "bf16" in kind else torch.float32)
    with mode():
        optimizer = zoo.OPTIMIZERS["adagrad" if kind == "zero2" else "adamw_foreach"](model.parameters())
        engine = initialize(model, optimizer, strategy, **{**given, **offload})
        engine(*zoo.tokens(rank, n, 100))
    loss, later = (loss_of(engine(*zoo.tokens(rank, n, step))) for step in range(2))
    engine.backward(loss)
    with mode() if "scaled" not in kind else nullcontext():  # torch has no graph for the scaled loss in there
        engine.backward(later)
    with mode():
        kept = [engine.full_gradient("head.weight"), *engine.gradient_norms().values(), engine.clip_grad_norm_(1.0)]
        engine.step()
        ways = rollbacks(engine, Path(folder) / kind / mode.__name__)
    losses = [loss.item()]
    for back in ways.values():
        losses += take_steps(engine, rank, n, range(1, 3))
        with mode(), torch.no_grad():
            back()
            losses.append(float(engine(*zoo.tokens(rank, n, 100))))
    if mode is torch.inference_mode:
        gc.collect()
        left = [one for one in gc.get_objects() if isinstance(one, torch.Tensor) and one.is_inference()]
        assert all(one is model.table for one in left), [one.shape for one in left]
    assert not any(one.is_inference() for one in kept)
    return losses


def both_ways(rank: int, n: int, folder: str, kinds: list[str]) -> None:
    for kind in kinds:
        plain, inside = (there_and_back(kind, rank, n, folder, mode) for mode in (nullcontext, torch.inference_mode))
        assert inside == plain, kind


@pytest.mark.parametrize(("n", "kinds"), [(1, list(STAGES)), (2, list(KINDS))], ids=["alone", "two ranks"])
def test_calls_inside_inference_mode_train_as_those_outside(n: int, kinds: list[str], tmp_path: Path) -> None:
    run_ranks(n, both_ways, str(tmp_path), kinds)


@pytest.mark.parametrize("strategy", STAGES)
def test_a_parameter_of_inference_mode_is_refused_before_anything_changes(strategy: str) -> None:
    model = Made()
    with torch.inference_mode():
        model.blocks[1].to(torch.bfloat16)  # torch leaves the parameters, with memory of inference mode
        made = nn.Linear(2, 2).requires_grad_(False)
    for name, broken in (("blocks.1.norm.weight", model), ("0.weight", nn.Sequential(made, nn.Linear(2, 2)))):
        before = {key: value.data_ptr() for key, value in broken.state_dict().items()}
        optimizer = torch.optim.AdamW(broken.parameters())
        with pytest.raises(ValueError, match=rf"^{re.escape(name)}: .*torch\.inference_mode\(\)"):
            initialize(broken, optimizer, strategy)
        assert {key: value.data_ptr() for key, value in broken.state_dict().items()} == before
        assert {p for group in optimizer.param_groups for p in group["params"]} == set(broken.parameters())
        assert not any(module._forward_pre_hooks for module in broken.modules())
