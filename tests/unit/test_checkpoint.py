"""A checkpoint's folder, and weights from files of others: refusals, what a kill leaves, and nothing is unpickled."""

import json
import os
import pickle
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from threading import Event
from typing import Any

import psutil
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

import zerobench
from tests import zoo
from zerobench.zero import STAGES
from zerobench.zero.checkpoint import storage
from zerobench.zero.checkpoint.storage import StoredChunk, StoredTensor, bytes_of, layout, read_header, row_major


def engine_of(model: nn.Module, optimizer: str = "adamw", strategy: str = "zero2"):
    return zerobench.initialize(model, zoo.OPTIMIZERS[optimizer](model.parameters()), strategy, bucket_bytes=1024)


def net(width: int = 7, bias: bool = True) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, width, bias=bias), nn.BatchNorm1d(width), nn.Linear(width, 3))


def step(engine, number: int = 0) -> None:
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(number))
    engine.backward(engine(x).square().mean())
    engine.step()


def state_of(engine) -> dict[str, torch.Tensor]:
    states = engine.optimizer.state_dict()["state"]
    flat = {f"{i} {key}": value.clone() for i, state in states.items() for key, value in state.items()}
    return {**engine.full_state_dict(), **flat}


def same(here: dict[str, torch.Tensor], there: dict[str, torch.Tensor]) -> bool:
    return here.keys() == there.keys() and all(torch.equal(here[key], there[key]) for key in here)


def saved_in(folder: Path) -> Path:
    engine = engine_of(net())
    step(engine)
    engine.save(folder / "good")
    return folder / "good"


def data_file(folder: Path) -> Path:
    return next(folder.glob("rank0-*.safetensors"))


def frozen() -> nn.Module:
    model = net()
    model[0].bias.requires_grad_(False)
    return model


def grouped(module: nn.Module, first: int) -> torch.optim.Optimizer:
    parameters = list(module.parameters())
    return torch.optim.AdamW([{"params": parameters[:first]}, {"params": parameters[first:]}], lr=0.1)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (lambda: engine_of(net(width=8)), r"0\.weight: its shape is \[7, 5\] in the checkpoint, \[8, 5\] here"),
        (lambda: engine_of(net(bias=False)), r"0\.bias: the checkpoint has this parameter, the model has not"),
        (lambda: engine_of(nn.Sequential(*net(), nn.Linear(3, 1))), r"3\.weight: the model has this parameter, the"),
        (lambda: engine_of(nn.Sequential(net()[0], nn.LayerNorm(7), net()[2])), "running_mean: the checkpoint has"),
        (lambda: engine_of(frozen()), r"0\.bias: it is trainable in the checkpoint, frozen here"),
        (lambda: engine_of(net().double()), r"updates it in float32 in the checkpoint, in float64 here"),
        (lambda: engine_of(net(), "sgd"), "optimizer: AdamW in the checkpoint, SGD here"),
        (lambda: zerobench.initialize(m := net(), grouped(m, 2)), "1 parameter groups in the checkpoint, 2 here"),
    ],
)
def test_a_checkpoint_of_something_else_is_refused(tmp_path: Path, other: Callable[[], object], words: str) -> None:
    engine = other()
    before = state_of(engine)
    with pytest.raises(ValueError, match=words):
        engine.load(saved_in(tmp_path))
    assert same(state_of(engine), before)


def test_groups_keep_their_options_and_their_members(tmp_path: Path) -> None:
    model = net()
    engine = zerobench.initialize(model, grouped(model, 2), "zero1")
    scheduler = torch.optim.lr_scheduler.StepLR(engine.optimizer, 1, 0.5)
    step(engine)
    scheduler.step()
    engine.save(tmp_path / "a", user_state={"scheduler": scheduler.state_dict(), "epoch": 3, "at": [1, None, 0.1]})
    model = net()
    fresh = zerobench.initialize(model, grouped(model, 2), "zero3")
    back = torch.optim.lr_scheduler.StepLR(fresh.optimizer, 1, 0.5)
    fresh.optimizer.param_groups[0]["lr"] = 1  # an int, as in SGD(lr=1)
    user = fresh.load(tmp_path / "a")
    assert (user["epoch"], user["at"]) == (3, [1, None, 0.1])
    back.load_state_dict(user["scheduler"])
    assert [group["lr"] for group in fresh.optimizer.param_groups] == [0.05, 0.05]
    assert fresh.optimizer.param_groups[0]["betas"] == (0.9, 0.999)
    for one in (engine, fresh):
        step(one, 1)
    scheduler.step()
    back.step()
    assert same(state_of(engine), state_of(fresh))
    assert fresh.optimizer.param_groups[0]["lr"] == engine.optimizer.param_groups[0]["lr"] == 0.025
    model = net()
    with pytest.raises(ValueError, match=r"0\.bias is in group 0 in the checkpoint, in group 1 here"):
        zerobench.initialize(model, grouped(model, 1), "zero1").load(tmp_path / "a")


def test_the_states_are_those_of_the_plain_optimizer(tmp_path: Path) -> None:
    """Read from the file with safetensors itself, and beside a plain module that took the same steps."""
    plain, engine = net(), engine_of(net())
    oracle = zoo.OPTIMIZERS["adamw"](plain.parameters())
    for number in range(3):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(number))
        plain(x).square().mean().backward()
        oracle.step()
        oracle.zero_grad()
        step(engine, number)
    engine.save(tmp_path / "a")
    found: dict[str, dict[int, torch.Tensor]] = {}
    with safe_open(data_file(tmp_path / "a"), "pt") as file:
        for key in file.keys():  # noqa: SIM118  it is no dict
            name, start = key.rstrip(":]").split("[")
            found.setdefault(name, {})[int(start)] = file.get_tensor(key)
    whole = {name: torch.cat([chunks[start] for start in sorted(chunks)]) for name, chunks in found.items()}
    for name, parameter in plain.named_parameters():
        assert torch.equal(whole[f"master.{name}"], parameter.detach().reshape(-1))
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(whole[f"optimizer.{name}.{key}"], oracle.state[parameter][key].reshape(-1))
    for name, buffer in plain.named_buffers():
        assert torch.equal(whole[f"buffer.{name}"], buffer.reshape(-1))
    assert all(torch.equal(engine.full_state_dict()[name], value) for name, value in plain.state_dict().items())


@pytest.mark.parametrize(
    ("user", "words"),
    [
        ({"milestones": {30: 1}}, r"user_state\['milestones'\]: its key 30 is not a string"),
        ({"rng": torch.zeros(2)}, r"user_state\['rng'\]: it is a Tensor; use JSON's"),
        ({"a": [{"b": {1, 2}}]}, r"user_state\['a'\]\[0\]\['b'\]: it is a set"),
    ],
)
def test_user_state_that_would_come_back_as_something_else(tmp_path: Path, user: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        engine_of(net()).save(tmp_path / "a", user_state=user)
    assert not list(tmp_path.iterdir())


def test_an_asynchronous_save_keeps_the_user_state_of_its_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, changed, write = engine_of(net()), Event(), storage.write
    monkeypatch.setattr(storage, "write", lambda *arguments: changed.wait(60) and write(*arguments))
    user = {"losses": [1.0], "scheduler": {"step": 1}}
    handle = engine.save(tmp_path / "a", asynchronous=True, user_state=user)
    user["losses"].append(2.0)
    user["scheduler"]["step"] = 2
    changed.set()
    handle.wait()
    assert engine.load(tmp_path / "a") == {"losses": [1.0], "scheduler": {"step": 1}}


def test_partial_folder_of_another_save_in_progress_stays(tmp_path: Path) -> None:
    engine, path = engine_of(net()), tmp_path / "good"
    with ExitStack() as held:
        other = Path(storage.begin(path, held))
        engine.save(path)
        assert other.is_dir()
    assert other.is_dir()
    engine.save(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["good"]


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    engine = engine_of(net())
    engine.backward(engine(torch.ones(4, 5)).square().mean())
    with pytest.raises(ValueError, match=r"save after step\(\)"):
        engine.save(tmp_path / "a")
    engine.step()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("42")
    for path in (tmp_path / "mine", tmp_path / "mine" / "thesis.txt"):
        with pytest.raises(RuntimeError, match="the path exists and is not a checkpoint"):
            engine.save(path)
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "42"
    engine.module.register_module("odd", WithExtraState())
    with pytest.raises(ValueError, match=r"odd\._extra_state: a checkpoint does not hold"):
        engine.save(tmp_path / "a")


class WithExtraState(nn.Module):
    def get_extra_state(self):
        return {"x": 1}


def test_buffers_of_any_strides(tmp_path: Path) -> None:
    def build(values: torch.Tensor):
        model = net()
        model.register_buffer("every_second", values[::2])
        model.register_buffer("transposed", values.clone().view(4, 2).t())
        return engine_of(model)

    build(torch.arange(8.0)).save(tmp_path / "a")
    fresh = build(torch.zeros(8))
    fresh.load(tmp_path / "a")
    assert fresh.module.every_second.tolist() == [0, 2, 4, 6]
    assert fresh.module.transposed.tolist() == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_the_loss_scale_goes_on(tmp_path: Path) -> None:
    def scaled(strategy: str, policy: zerobench.zero.LossScaling | None):
        model = net().half()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        return zerobench.initialize(model, optimizer, strategy, loss_scaling=policy)

    engine = scaled("zero1", zerobench.zero.LossScaling(initial=2.0**40))
    for _ in range(2):
        engine.backward(engine(torch.ones(4, 5).half()).float().square().mean())
        engine.step()
        assert engine.skipped
    engine.save(tmp_path / "a")
    fresh, unscaled = scaled("zero3", zerobench.zero.LossScaling()), scaled("zero3", None)
    fresh.load(tmp_path / "a")
    unscaled.load(tmp_path / "a")
    assert (engine.loss_scale, fresh.loss_scale, unscaled.loss_scale) == (2.0**38, 2.0**38, 1.0)


def test_dtypes_the_format_knows(tmp_path: Path) -> None:
    tensors = {
        str(dtype): torch.arange(5).to(dtype)
        for dtype in (torch.bool, torch.bfloat16, torch.int16, torch.float64, torch.uint32)
    }
    tensors |= {"scalar": torch.tensor(1.5), "empty": torch.empty(0, 3), "strided": torch.arange(6.0).view(2, 3).t()}
    head, begins = layout(tensors)
    (tmp_path / "x").write_bytes(head + b"".join(bytes_of(tensors[name]) for name in begins))
    with safe_open(tmp_path / "x", "pt") as file:
        for name, tensor in tensors.items():
            assert torch.equal(file.get_tensor(name), tensor)
            assert begins[name] % tensor.element_size() == 0
    with pytest.raises(ValueError, match=r"x: its dtype is torch\.complex128, which safetensors does not know"):
        layout({"x": torch.zeros(1, dtype=torch.complex128)})


def test_a_file_that_becomes_shorter_is_an_error(tmp_path: Path) -> None:
    save_file({"w": torch.arange(12.0)}, tmp_path / "x")
    stored = read_header(tmp_path / "x")["w"]
    os.truncate(tmp_path / "x", 100)
    with pytest.raises(ValueError, match="x: it has become shorter"):
        stored.part(row_major(12), 0, 12)


def test_an_error_of_the_disk_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.symlink_to("/proc/self/mem")  # its first page cannot be read
    with pytest.raises(OSError, match=r"Input/output error: .*x'"):
        read_header(path)
    with pytest.raises(OSError, match=r"Input/output error: .*x'"):
        StoredTensor(row_major(2), torch.float32, (StoredChunk(0, 2, path, 0),)).part(row_major(2), 0, 2)


def test_a_file_may_be_larger_than_the_memory(tmp_path: Path) -> None:
    n = 2 * (psutil.virtual_memory().total + psutil.swap_memory().total)
    header = json.dumps({"w": {"dtype": "U8", "shape": [n], "data_offsets": [0, n]}}).encode()
    (tmp_path / "x").write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(tmp_path / "x", 8 + len(header) + n)  # the rest is a hole, which needs no disk
    assert read_header(tmp_path / "x")["w"].part(row_major(n), n - 2, n).tolist() == [0, 0]


def sgd_engine(stage: str = "zero3", model: nn.Module | None = None):
    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    return zerobench.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), stage)


def random_state(engine) -> dict[str, torch.Tensor]:
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
        sgd_engine().load_weights(path)


def test_paths_that_are_none(tmp_path: Path) -> None:
    engine = sgd_engine()
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
    engine = sgd_engine(stage)
    state = random_state(engine)
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
