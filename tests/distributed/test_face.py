"""Uses of an engine beside training: scripts print it, count its parameters, copy it, hand it to others; and all of it
inside torch.inference_mode(): no tensor that outlives the call may be of inference mode, which nobody may train with.
"""

import copy
import gc
import os
import pickle
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

from tests import zoo
from tests.distributed.training import loss_of, take_steps
from tests.ranks import on_ranks
from zerobench.zero import STAGES, LossScaling, NvmeOffload, Offload, Zeropp, initialize


def built() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def engine_of(strategy: str = "zero2", **options: Any) -> Any:
    model = built()
    return initialize(model, optim.AdamW(model.parameters(), foreach=True), strategy, **options)


def train(engine: Any, width: int = 4) -> None:
    engine.backward(engine(torch.ones(3, width)).square().mean())
    engine.step()


@pytest.mark.parametrize("strategy", STAGES)
def test_an_engine_says_what_it_is(strategy: str) -> None:
    engine = engine_of(strategy)
    psi = sum(p.numel() for p in engine.parameters())
    train(engine)
    said = repr(engine)
    assert said.startswith(f"{strategy} of Sequential: ψ = {psi}, N = 1, rank 0 holds ")
    assert f"optimizer states {8 * psi + 4 * len(engine.segments):,}" in said.replace("+", "")


@on_ranks(2)
def test_its_bytes_are_those_of_this_rank(rank: int, n: int) -> None:
    """Against a sum by hand, with one bucket."""
    whole, half, said = 4 * 64 * 64, 2 * 64 * 64, []
    for strategy in ("zero1", "zero3"):
        model = nn.Linear(64, 64, bias=False)
        engine = initialize(model, optim.SGD(model.parameters(), lr=0.1, momentum=0.9), strategy)
        train(engine, width=64)
        said.append(repr(engine))
    assert f"N = 2, rank {rank} holds {whole + half:,} bytes now" in said[0]
    assert f"parameters {whole:,}, gradients 0, masters 0, optimizer states {half:,}" in said[0]
    found = re.fullmatch(r"zero3 of .*\(parameters (.*), gradients 0, masters 0, optimizer states (.*)\)", said[1])
    assert found
    assert all(abs(int(size.replace(",", "")) - half) <= 128 for size in found.groups()), "a little is padding"


@pytest.mark.parametrize("strategy", STAGES)
def test_it_is_asked_as_a_module_is(strategy: str) -> None:
    engine = engine_of(strategy)
    assert list(engine.parameters()) == list(engine.module.parameters())
    assert [name for name, _ in engine.named_parameters()] == [name for name, _ in engine.module.named_parameters()]
    assert list(engine.buffers()) == []
    assert engine.training
    assert not engine.eval().training
    assert not engine.module.training
    assert engine.train().training


@pytest.mark.parametrize("strategy", [name for name in STAGES if name != "zero3"])
def test_a_graph_that_is_kept_is_gone_through_again(strategy: str) -> None:
    model, engine = built(), engine_of(strategy)
    optimizer = optim.AdamW(model.parameters(), foreach=True)
    plain, ours = (one(torch.ones(3, 4)).square().mean() for one in (model, engine))
    for _ in range(2):
        plain.backward(retain_graph=True)
        engine.backward(ours, retain_graph=True)
    optimizer.step()
    engine.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), engine.parameters(), strict=True))


def test_zero3_says_that_its_graph_is_gone() -> None:
    engine = engine_of("zero3")
    loss = engine(torch.ones(3, 4)).square().mean()
    engine.backward(loss, retain_graph=True)
    with pytest.raises(RuntimeError, match="go through each forward once, and before the step"):
        engine.backward(loss)


def test_it_is_not_copied() -> None:
    engine = engine_of()
    for copies in (copy.deepcopy, copy.copy, pickle.dumps):
        with pytest.raises(TypeError, match=r"cannot be (pickled or )?copied"):
            copies(engine)
    with engine.full_parameters():
        assert copy.deepcopy(engine.module)(torch.ones(1, 4)).shape == (1, 2)


def test_states_of_a_plain_run_and_of_other_ranks_are_refused() -> None:
    model = built()
    optimizer = optim.AdamW(model.parameters())
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    engine = engine_of()
    with pytest.raises(ValueError, match=r"'exp_avg' of parameter 0 is \(6, 4\), and here \(24,\).*engine\.load"):
        engine.optimizer.load_state_dict(optimizer.state_dict())
    with pytest.raises(ValueError, match="group 0 has 1 parameters and this optimizer's 4 segments"):
        engine.optimizer.load_state_dict(optim.AdamW(nn.Linear(1, 1, bias=False).parameters()).state_dict())
    train(engine)
    saved = copy.deepcopy(engine.optimizer.state_dict())
    with pytest.raises(ValueError, match=r"those of rank 0 of 2, and this is rank 0 of 1; .*every rank saves its own"):
        engine.optimizer.load_state_dict(saved | {"part_of_rank": [0, 2]})
    engine.optimizer.load_state_dict(saved)
    train(engine)


@pytest.mark.parametrize("kind", [{"foreach": True}, {"fused": True}])
def test_a_grad_scaler_is_answered(kind: dict[str, bool]) -> None:
    model = built()
    engine = initialize(model, optim.AdamW(model.parameters(), **kind), "zero2")
    scaler = torch.amp.GradScaler("cpu")
    engine.backward(scaler.scale(engine(torch.ones(3, 4)).square().mean()))
    with pytest.raises(RuntimeError, match=r"a GradScaler finds no gradients here; give initialize\(\) loss_scaling="):
        scaler.step(engine.optimizer)
    with pytest.raises(AttributeError, match="the engine scales losses itself"):
        scaler.step(engine)


def test_options_of_optimizers_that_shards_cannot_have() -> None:
    model = built()
    refused = {"capturable": "updates on a GPU, and here the CPU", "differentiable": "keeps the graph"}
    for option, sentence in refused.items():
        with pytest.raises(ValueError, match=sentence):
            initialize(model, optim.AdamW(model.parameters(), **{option: True}), "zero2")
    initialize(model, optim.AdamW(model.parameters()), "zero2")  # nothing was changed by the refusals


def test_options_are_words_as_on_the_command_line() -> None:
    options = engine_of("zero3", offload="cpu", zeropp="qwz", wire_dtype="bf16", device="cpu").options
    assert options.offload == Offload()
    assert options.zeropp == Zeropp(quantize_weights=True)
    assert options.wire_dtype == torch.bfloat16
    assert options.device == torch.device("cpu")
    assert engine_of(offload="none", zeropp="none").options.offload is None
    refused: list[tuple[dict[str, Any], str]] = [
        ({"offload": "nvme"}, r"pass zerobench\.zero\.NvmeOffload\(path="),
        ({"offload": "gpu"}, "offload: 'gpu' is unknown; use one of none, cpu"),
        ({"offload": True}, "offload: True is invalid; use 'none', 'cpu' or a zerobench.zero.Offload"),
        ({"zeropp": "qwx"}, "zeropp: 'qwx' is unknown; use one of none, qwz, hpz, qgz, all"),
        ({"wire_dtype": "int8"}, "wire_dtype: 'int8' is unknown; use one of fp32, bf16, fp16"),
    ]
    for given, sentence in refused:
        with pytest.raises(ValueError, match=sentence):
            engine_of("zero3", **given)


def test_a_forked_child_leaves_its_parents_files(tmp_path: Path) -> None:
    engine = engine_of(offload=NvmeOffload(path=str(tmp_path), block_bytes=4096, buffers=12))
    train(engine)
    before = sorted(path.name for path in tmp_path.rglob("*"))
    child = os.fork()
    if child == 0:  # what ends here, or at the end of the interpreter, is a copy
        del engine
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert sorted(path.name for path in tmp_path.rglob("*")) == before != []
    train(engine)


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


@on_ranks(1, 2)
def test_calls_inside_inference_mode_train_as_those_outside(rank: int, n: int, tmp_path: Path) -> None:
    for kind in ["zero2", "zero3", "zero3 in bf16, nvme"] if n == 1 else KINDS:
        modes = (nullcontext, torch.inference_mode)
        plain, inside = (there_and_back(kind, rank, n, str(tmp_path), mode) for mode in modes)
        assert inside == plain, kind


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
