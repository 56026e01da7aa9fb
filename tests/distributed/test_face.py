"""Uses of an engine in scripts beside training: they print it, count its parameters, copy it, hand it to others."""

import copy
import gc
import os
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

from tests.ranks import run_ranks
from zerobench.zero import STAGES, NvmeOffload, Offload, Zeropp, initialize


def built() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def engine_of(strategy: str = "zero2", **options: Any) -> Any:
    model = built()
    return initialize(model, optim.AdamW(model.parameters(), foreach=True), strategy, **options)


def train(engine: Any, steps: int = 1) -> None:
    for _ in range(steps):
        engine.backward(engine(torch.ones(3, 4)).square().mean())
        engine.step()


@pytest.mark.parametrize("strategy", STAGES)
def test_an_engine_says_what_it_is(strategy: str) -> None:
    engine = engine_of(strategy)
    psi = sum(p.numel() for p in engine.parameters())
    train(engine)
    said = repr(engine)
    assert said.startswith(f"{strategy} of Sequential: ψ = {psi}, N = 1, rank 0 holds ")
    assert f"optimizer states {8 * psi + 4 * len(engine.segments):,}" in said.replace("+", "")


def bytes_by_hand(rank: int, n: int) -> list[str]:
    """Compares the bytes between steps of zero1 and zero3, with one bucket, with a sum by hand."""
    said = []
    for strategy in ("zero1", "zero3"):
        model = nn.Linear(64, 64, bias=False)
        engine = initialize(model, optim.SGD(model.parameters(), lr=0.1, momentum=0.9), strategy)
        train_square(engine)
        said.append(repr(engine))
    return said


def train_square(engine: Any) -> None:
    engine.backward(engine(torch.ones(3, 64)).square().mean())
    engine.step()


def test_its_bytes_are_those_of_this_rank() -> None:
    whole, half = 4 * 64 * 64, 2 * 64 * 64
    for rank, (first, third) in enumerate(run_ranks(2, bytes_by_hand)):
        assert f"N = 2, rank {rank} holds {whole + half:,} bytes now" in first
        assert f"parameters {whole:,}, gradients 0, masters 0, optimizer states {half:,}" in first
        found = re.fullmatch(
            r"zero3 of Linear.*\(parameters (.*), gradients 0, masters 0, optimizer states (.*)\)", third
        )
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


def test_states_of_a_plain_run_are_refused() -> None:
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
    engine.optimizer.load_state_dict(copy.deepcopy(engine.optimizer.state_dict()))
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
    for option, sentence in (
        ("capturable", "updates on a GPU, and here the CPU"),
        ("differentiable", "keeps the graph"),
    ):
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
        ({"offload": True}, "offload: True cannot be; use 'none', 'cpu' or a zerobench.zero.Offload"),
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
