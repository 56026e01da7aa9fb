"""Weights from files of others: what does not fit is refused in a sentence, and nothing is unpickled."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import zerobench
from zerobench.zero import STAGES


def engine_of(stage: str = "zero3", model: nn.Module | None = None):
    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    return zerobench.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), stage)


def state_of(engine) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {
        name: torch.rand_like(value) if value.is_floating_point() else value + 3
        for name, value in engine.full_state_dict().items()
    }


def safetensors(path: Path, entries: Any, data: bytes = bytes(16)) -> Path:
    header = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    return path


class Harm:
    def __reduce__(self):
        return exec, ("raise SystemExit('unpickled')",)


def tensor(**changes: Any) -> dict[str, Any]:
    return {"w": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16], **changes}}


DAMAGED = {
    "no header": b"",
    "a dtype that torch lacks": tensor(dtype="F6_E2M3", shape=[64], data_offsets=[0, 48]),
    "not JSON": b"{" * 5000,
    "dtype": tensor(dtype="F33"),
    "negative": tensor(data_offsets=[-16, 0]),
    "beyond": tensor(data_offsets=[16, 32]),
    "shape": tensor(shape=[2, 3]),
    "text": tensor(shape="22"),
    "twice": b'{"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "w": {"dtype": "F32"}}',
    "overlaps": tensor() | {"v": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}},
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_files(name: str, tmp_path: Path) -> None:
    path = safetensors(tmp_path / "m.safetensors", DAMAGED[name])
    with pytest.raises(
        ValueError, match=r"m\.safetensors: it is (not a safetensors file|damaged: (its entry of w|w and v overlap))"
    ):
        engine_of().load_weights(path)


def test_paths_that_are_none(tmp_path: Path) -> None:
    engine = engine_of()
    for name in ("pytorch_model.bin", "model.pt"):
        (tmp_path / name).write_bytes(pickle.dumps(Harm()))
        with pytest.raises(ValueError, match=r"is a pickle, which can run code and is not opened; .*save_file"):
            engine.load_weights(tmp_path / name)
    for path, words in [
        (tmp_path / "none", "there is no such file or folder; weights are read from"),
        (tmp_path, "there are no weights in it; weights are read from"),
        (safetensors(tmp_path / "x.json", b"{}"), "it is not an index of safetensors files"),
    ]:
        with pytest.raises(ValueError, match=words):
            engine.load_weights(path)
    for names, words in [
        ({"w": "../m.safetensors"}, "names '../m.safetensors', which is not a file of its folder"),
        ({"w": 3}, "names 3, which is not a file"),
        ([1], "it is not an index of safetensors files"),
        ({"v": "m.safetensors"}, "says that v is in m.safetensors, which does not have it"),
    ]:
        safetensors(tmp_path / "m.safetensors", tensor())
        (tmp_path / "index.json").write_text(json.dumps({"weight_map": names}))
        with pytest.raises(ValueError, match=words):
            engine.load_weights(tmp_path / "index.json")
    safetensors(tmp_path / "n.safetensors", tensor())
    with pytest.raises(ValueError, match=r"it has 2 of \*\.safetensors, m\.safetensors and others; name one"):
        engine.load_weights(tmp_path)


@pytest.mark.parametrize("stage", STAGES)
def test_names_and_shapes_as_torch_has_them(stage: str, tmp_path: Path) -> None:
    engine = engine_of(stage)
    state = state_of(engine)
    before = engine.full_state_dict()

    def written(changed: dict[str, torch.Tensor]) -> Path:
        save_file(changed, tmp_path / "m.safetensors")
        return tmp_path / "m.safetensors"

    less = {name: value for name, value in state.items() if not name.startswith("2.")}
    with pytest.raises(ValueError, match=r"it lacks 2\.weight \(and 1 more\), which the module has; strict=False"):
        engine.load_weights(written(less))
    with pytest.raises(ValueError, match=r"it has other, which the module lacks; strict=False"):
        engine.load_weights(written(state | {"other": torch.ones(2)}))
    with pytest.raises(ValueError, match=r"0\.bias has shape \[3\] there, \[8\] here"):
        engine.load_weights(written(state | {"0.bias": torch.ones(3)}), strict=False)
    with pytest.raises(ValueError, match=r"1\.num_batches_tracked has dtype torch\.float32 there, torch\.int64 here"):
        engine.load_weights(written(state | {"1.num_batches_tracked": torch.tensor(3.0)}))
    after = engine.full_state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    keys = engine.load_weights(written(less | {"other": torch.ones(2)}), strict=False)
    assert keys.missing_keys == ["2.weight", "2.bias"]
    assert keys.unexpected_keys == ["other"]
    after = engine.full_state_dict()
    assert all(torch.equal(after[name], less.get(name, before[name])) for name in before)


def test_any_order_of_elements(tmp_path: Path) -> None:
    """Channels-last convolutions get row-major files, and files' orders."""
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Conv2d(5, 2, 3)).to(memory_format=torch.channels_last)
    engine = engine_of("zero2", model)
    state = state_of(engine)
    save_file({name: value.contiguous() for name, value in state.items()}, tmp_path / "m.safetensors")
    engine.load_weights(tmp_path)
    assert all(torch.equal(value, state[name]) for name, value in engine.full_state_dict().items())
    engine.save(tmp_path / "checkpoint")
    for other in (nn.Sequential(nn.Conv2d(3, 5, 3), nn.Conv2d(5, 2, 3)), model):
        if other is not model:
            fresh = engine_of("zero3", other)
            fresh.load(tmp_path / "checkpoint", weights_only=True)
            assert all(torch.equal(value, state[name]) for name, value in fresh.full_state_dict().items())


def test_a_checkpoint_of_another_optimizer_gives_its_weights(tmp_path: Path) -> None:
    """And its masters to a model in bf16; frozen or not. Optimizer states stay."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    first = zerobench.initialize(model, torch.optim.AdamW(model.parameters()), "zero1")
    first.backward(first(torch.ones(2, 4)).sum())
    first.step()
    first.save(tmp_path / "checkpoint", user_state={"epoch": 1})
    other = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)).bfloat16()
    other[0].requires_grad_(False)
    second = zerobench.initialize(other, torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9), "zero3")
    second.backward(second(torch.ones(2, 4, dtype=torch.bfloat16)).float().sum())
    second.step()
    momentum = [state["momentum_buffer"].clone() for state in second.optimizer.state.values()]
    with pytest.raises(ValueError, match="trainable in the checkpoint"):
        second.load(tmp_path / "checkpoint")
    assert second.load(tmp_path / "checkpoint", weights_only=True) == {"epoch": 1}
    weights = second.full_state_dict()
    assert all(torch.equal(value.bfloat16(), weights[name]) for name, value in first.full_state_dict().items())
    kept = [state["momentum_buffer"] for state in second.optimizer.state.values()]
    assert all(torch.equal(old, new) for old, new in zip(momentum, kept, strict=True))
    assert torch.equal(second.segments[0].tensor.view(4, 8), first.full_state_dict()["1.weight"])
    (tmp_path / "checkpoint" / "checkpoint.json").write_text("{}")
    with pytest.raises(ValueError, match="it is not the index of a checkpoint"):
        second.load_weights(tmp_path / "checkpoint")
