"""Changes of parameters and gradients behind the engine's back: it counts, or one sentence says what would."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.optim.optimizer import _foreach_supported_types

import zerobench
from zerobench.zero import STAGES, Offload
from zerobench.zero.parameters.access import CHUNKS, Versions, fingerprint

X = torch.ones(2, 4)


def net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(dtype)


def engine_of(stage: str, dtype: torch.dtype = torch.float32, **options):
    model = net(dtype)
    return zerobench.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), stage, **options)


def backward(engine) -> None:
    engine.backward(engine(X.to(engine.module[0].weight.dtype)).float().square().mean())


def train(engine, steps: int = 2) -> dict[str, torch.Tensor]:
    for _ in range(steps):
        backward(engine)
        engine.step()
    return engine.full_state_dict()


def step_and_forward(engine) -> None:
    engine.step()
    engine(X)


def replace_data(engine) -> None:
    for p in engine.module.parameters():
        p.data = p.data.clone()


def vector(engine) -> None:
    nn.utils.vector_to_parameters(torch.linspace(-1, 1, 49), engine.module.parameters())


def new_parameter(engine) -> None:
    engine.module[0].weight = nn.Parameter(torch.zeros(8, 4))


def another_module(engine) -> None:
    engine.module[2] = nn.Linear(8, 1)


def weight_norm(engine) -> None:
    nn.utils.parametrizations.weight_norm(engine.module[0])


def added_parameter(engine) -> None:
    engine.module[0].adapter = nn.Linear(4, 2)


def drop_from_groups(engine) -> None:
    engine.optimizer.param_groups[0]["params"].pop()


def replace_in_groups(engine) -> None:
    engine.optimizer.param_groups[0]["params"] = list(engine.module.parameters())


PLACES = [
    (lambda e: e.module.double(), r"0\.weight: it was torch.float32 on cpu .* is torch.float64 on cpu now; convert"),
    (lambda e: e.module.half(), r"0\.weight: it was torch.float32 on cpu .* and is torch.float16"),
    (replace_data, r"0\.weight: its \.data was replaced .* write in place inside `with engine\.full_parameters\(\)`"),
    (vector, r"0\.weight: its \.data was replaced"),
    (new_parameter, r"0\.weight: the module does not have the parameter any more that initialize\(\) was given"),
    (another_module, r"2\.weight: the module does not have the parameter any more"),
    (weight_norm, r"0\.weight: the module does not have the parameter any more"),
    (added_parameter, r"0\.adapter\.weight: it was added to the module after initialize\(\)"),
    (drop_from_groups, r"optimizer: its param_groups hold other tensors"),
    (replace_in_groups, r"optimizer: its param_groups hold other tensors"),
]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("misuse", "words"), PLACES)
def test_what_would_not_be_trained_is_refused(stage: str, misuse, words: str) -> None:
    """At the next forward, or step for what the optimizer holds."""
    engine = engine_of(stage)
    train(engine, 1)
    misuse(engine)
    with pytest.raises(RuntimeError, match=words):
        train(engine, 1)


@pytest.mark.parametrize("stage", STAGES)
def test_the_same_between_backward_and_step(stage: str) -> None:
    for misuse, words in PLACES[2:]:
        engine = engine_of(stage)
        backward(engine)
        misuse(engine)
        with pytest.raises(RuntimeError, match=words):
            step_and_forward(engine)
    engine = engine_of(stage)
    backward(engine)
    with pytest.raises(RuntimeError, match=r"0\.weight: its gradient is in the engine's shards"):
        engine.module.double()


@pytest.mark.parametrize("stage", STAGES)
def test_parametrizations_and_frozen_additions_are_no_misuse(stage: str) -> None:
    engine = engine_of(stage)
    train(engine, 1)
    nn.utils.parametrize.register_parametrization(engine.module[0], "weight", nn.Identity())
    engine.module[0].extra = nn.Linear(1, 1).requires_grad_(False)
    before = engine.full_state_dict()["0.parametrizations.weight.original"]
    assert not torch.equal(train(engine)["0.parametrizations.weight.original"], before)


WHOLE = {"shards": "parameters"}
"""With masters alone, a single rank's half parameters are hidden outside of the forward, as with more ranks."""

KINDS: list[tuple[str, torch.dtype, dict[str, Any]]] = [(stage, torch.float32, {}) for stage in STAGES]
KINDS += [(stage, torch.bfloat16, WHOLE if stage == "zero3" else {}) for stage in STAGES]
KINDS += [("zero2", torch.float32, {"offload": Offload()}), ("zero3", torch.bfloat16, {"offload": Offload()})]


def in_place(parameters: list[nn.Parameter]) -> None:
    for p in parameters:
        p.fill_(0.125)
    torch._foreach_mul_(parameters, 2.0)


def by_data(parameters: list[nn.Parameter]) -> None:
    for p in parameters:
        p.data.fill_(0.25)


def by_numpy(parameters: list[nn.Parameter]) -> None:
    for p in parameters:
        bits = torch.int32 if p.dtype == torch.float32 else torch.int16
        p.detach().view(bits).numpy()[...] = torch.tensor(0.25, dtype=p.dtype).view(bits).item()


@pytest.mark.parametrize("write", [in_place, by_data, by_numpy])
@pytest.mark.parametrize(("stage", "dtype", "options"), KINDS)
def test_writes_count(stage: str, dtype: torch.dtype, options: dict, write) -> None:
    """As on an engine that started there: between steps, and between backward and step."""
    engine = engine_of(stage, dtype, **options)
    train(engine, 2)
    with torch.no_grad():
        write(list(engine.module.parameters()))
    model = net(dtype)
    model.load_state_dict({name: torch.full_like(value, 0.25) for name, value in model.state_dict().items()})
    oracle = zerobench.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), stage, **options)
    assert_same(train(engine), train(oracle))
    for one in (engine, oracle):
        backward(one)
        with torch.no_grad(), one.full_parameters() if one is oracle else torch.no_grad():
            (one.module[0].weight if write is in_place else one.module[0].weight.data).clamp_(-0.1, 0.1)
        one.step()
    assert_same(train(engine), train(oracle))


def assert_same(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert all(torch.equal(value, theirs[name]) for name, value in mine.items())


def test_step_that_a_hook_refused_clips_once_when_it_is_made() -> None:
    engine, oracle = engine_of("zero2"), engine_of("zero2")
    for one in (engine, oracle):
        backward(one)
        one.clip_grad_norm_(1e-3)
    hook = engine.optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.step()
    hook.remove()
    engine.step()
    oracle.step()
    assert_same(engine.full_state_dict(), oracle.full_state_dict())


@pytest.mark.parametrize("stage", ["zero2", "zero3"])
def test_part_that_is_loaded_leaves_what_was_written_before(stage: str, tmp_path: Path) -> None:
    engine = engine_of(stage, offload=Offload(delayed_after=0))
    train(engine, 1)  # whose update is pending
    engine.module.load_state_dict(expected := {name: value + 8 for name, value in net().state_dict().items()})
    save_file({"2.bias": torch.ones(1)}, tmp_path / "part.safetensors")
    engine.load_weights(tmp_path / "part.safetensors", strict=False)
    engine.sync_parameters()
    oracle = engine_of(stage)
    backward(oracle)
    updated = {name: value - 0.1 * oracle.full_gradient(name) for name, value in expected.items()}
    assert_same(engine.full_state_dict(), updated | {"2.bias": torch.ones(1)})


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("none", [True, False])
def test_zero_grad_of_the_module_drops_gradients(stage: str, none: bool) -> None:
    """The call drops gradients of the whole module, or of a part alone."""
    engine, oracle = engine_of(stage), engine_of(stage)
    backward(engine)
    engine.module.zero_grad(set_to_none=none)
    engine.step()
    assert_same(engine.full_state_dict(), oracle.full_state_dict())
    backward(engine)
    engine.module.zero_grad(set_to_none=none)
    assert_same(train(engine, 1), train(oracle, 1))
    before = engine.full_state_dict()
    backward(engine)
    engine.module[0].zero_grad(set_to_none=none)
    engine.module[2].bias.grad = None
    engine.step()
    after = engine.full_state_dict()
    assert [name for name in after if not torch.equal(after[name], before[name])] == ["2.weight"]
    backward(oracle)
    expected = oracle.full_gradient("0.weight")
    oracle.module[0].zero_grad(set_to_none=none)
    assert oracle.full_gradient("0.weight") is None
    backward(oracle)
    assert torch.equal(oracle.full_gradient("0.weight"), expected)


@pytest.mark.parametrize("stage", STAGES)
def test_what_looks_for_gradients_in_grad_is_told_where_they_are(stage: str) -> None:
    engine = engine_of(stage)
    parameters = list(engine.module.parameters())
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    where = r"0\.weight: its gradient is in the engine's shards, not in \.grad; .* engine\.full_gradient\(name\)"
    for misuse, words in [
        (lambda: nn.utils.clip_grad_norm_(parameters, 1.0), where),
        (lambda: nn.utils.clip_grad_value_(parameters, 1.0), where),
        (lambda: parameters[0].grad.norm(), where),
        (lambda: parameters[0].grad.mul_(2), where),
        (lambda: parameters[0].grad.clone(), where),
        (lambda: [p.grad.abs().max().item() for p in parameters], where),
        (lambda: scaler.unscale_(engine.optimizer), r"a GradScaler finds no gradients here; .*loss_scaling="),
    ]:
        engine.zero_grad()
        backward(engine)
        assert parameters[0].grad is not None
        with pytest.raises(RuntimeError, match=words):
            misuse()
    assert "engine.full_gradient('0.weight')" in repr(parameters[0].grad)
    engine.zero_grad()
    assert parameters[0].grad is None
    for steps in (False, True):
        backward(engine)
        parameters[1].grad = torch.ones(8)
        with pytest.raises(RuntimeError, match=r"0\.bias: something was assigned to its \.grad"):
            engine.step() if steps else backward(engine)
        parameters[1].grad = None
        engine.zero_grad()
    train(engine)


def test_writes_to_an_optimizers_tensors_are_counted() -> None:
    """By `.data`, too; and torch takes them for plain parameters where it chooses its foreach kernels."""
    engine = engine_of("zero2")
    segments = [p for group in engine.optimizer.param_groups for p in group["params"]]
    versions = Versions(segments)
    segments[0].data.mul_(2)
    assert versions.have_moved
    assert versions.written() == segments[:1]
    assert not versions.have_moved
    assert type(segments[0]) in _foreach_supported_types


def test_a_fingerprint_is_of_every_bit_and_its_place() -> None:
    values = torch.arange(1.0, 2 * CHUNKS["cpu"] + 33.0, dtype=torch.float64)
    before = fingerprint(values)
    assert torch.equal(before, fingerprint(values.clone()))
    one = values.clone()
    one[-1] += 1
    swapped = values.clone()
    swapped[[0, CHUNKS["cpu"]]] = values[[CHUNKS["cpu"], 0]]
    for other in (one, swapped, -values, values.flip(0), values * 2, values.roll(2048)):
        assert not torch.equal(before, fingerprint(other))
    assert not torch.equal(fingerprint(values.bfloat16()), fingerprint(-values.bfloat16()))
