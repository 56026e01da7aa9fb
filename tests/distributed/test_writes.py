"""Writes to parameters beside the optimizer, on real ranks: they count, or are refused in a sentence.

The oracle: an engine of the same kind over a model that had the values before `initialize`. SGD keeps no state, so both
must train alike, to the bit.
"""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.nn.utils import vector_to_parameters

from tests import zoo
from tests.distributed.training import take_steps, train_on
from tests.ranks import run_ranks
from zerobench.zero import STAGES, NvmeOffload, Offload, initialize
from zerobench.zero.parameters.access import as_they_are

HALF = torch.bfloat16
KINDS: list[tuple[str, str, torch.dtype, dict[str, Any]]] = [
    ("zero1", "tied", torch.float32, {}),
    ("zero1", "unused", HALF, {"tile_bytes": 1024}),
    ("zero2", "unused", torch.float32, {}),
    ("zero2", "tied", HALF, {"gradient_dtype": torch.float32}),
    ("zero2", "tied", torch.float32, {"offload": Offload(fraction=0.5)}),
    ("zero2", "tied", HALF, {"offload": Offload(delayed_after=100)}),
    ("zero3", "unused", torch.float32, {}),
    ("zero3", "tied", HALF, {"persistence_numel": 60}),
    ("zero3", "unused", HALF, {"offload": Offload(parameters=True)}),
    ("megatron", "tied", HALF, {}),
    ("megatron", "unused", torch.float32, {}),
]
FILES: list[tuple[str, str, torch.dtype, dict[str, Any]]] = [
    ("zero1", "tied", torch.float32, {}),
    ("zero3", "unused", HALF, {"parameters": True}),
]
"""Strategy, model, dtype, options; the second of what lies in files."""


def kinds(n: int, folder: str, every: int = 1) -> list[tuple[str, str, torch.dtype, dict[str, Any]]]:
    files = [
        (stage, model, dtype, {"offload": NvmeOffload(path=folder, block_bytes=4096, buffers=24, **options)})
        for stage, model, dtype, options in FILES
    ]
    groups = [("zero3", "tied", HALF, {"shard_group": 2}), ("zero2", "unused", HALF, {"shard_group": 2})]
    return [*KINDS, *files, *(groups if n == 4 else [])][::every]


def engine_of(stage: str, model: nn.Module, options: dict[str, Any]) -> Any:
    return initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), stage, bucket_bytes=4096, **options)


def other_state(name: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Values that no engine here starts with."""
    torch.manual_seed(99)
    return zoo.MODELS[name]().to(dtype).state_dict()


def load_inside(engine: Any, state: dict[str, torch.Tensor]) -> None:
    with engine.full_parameters() as module:
        assert module.load_state_dict(state).missing_keys == []


def data_inside(engine: Any, state: dict[str, torch.Tensor]) -> None:
    """In place, where no version tells."""
    with engine.full_parameters() as module:
        for name, tensor in module.state_dict().items():
            tensor.data.copy_(state[name])


def vector_inside(engine: Any, state: dict[str, torch.Tensor]) -> None:
    """`p.data` becomes another tensor."""
    with engine.full_parameters() as module:
        vector = torch.cat([state[name].reshape(-1) for name, _ in module.named_parameters()])
        vector_to_parameters(vector, module.parameters())


def load_plainly(engine: Any, state: dict[str, torch.Tensor]) -> None:
    with engine.full_parameters() as module:
        plain = copy.deepcopy(module)
    assert engine.module.load_state_dict(state) == plain.load_state_dict(state)


def assign_plainly(engine: Any, state: dict[str, torch.Tensor]) -> None:
    engine.module.load_state_dict({name: value.double() for name, value in state.items()}, assign=True)


def load_parts(engine: Any, state: dict[str, torch.Tensor]) -> None:
    """Submodule by submodule, and what is the module's own."""
    for name, child in engine.module.named_children():
        child.load_state_dict({k.removeprefix(f"{name}."): v for k, v in state.items() if k.startswith(f"{name}.")})
    own = {name: value for name, value in state.items() if "." not in name}
    found = engine.module.load_state_dict({**own, "none.such": torch.ones(1)}, strict=False)
    assert found.unexpected_keys == ["none.such"]
    assert len(found.missing_keys) == len(state) - len(own)


WAYS: list[Callable[[Any, dict[str, torch.Tensor]], None]] = [
    load_inside, data_inside, vector_inside, load_plainly, assign_plainly, load_parts
]  # fmt: skip


def every_way(rank: int, n: int, folder: str, each: int) -> None:
    """Trained, overwritten, trained: as if it had started there."""
    for number, (stage, name, dtype, options) in enumerate(kinds(n, folder, each)):
        state = other_state(name, dtype)
        fresh = zoo.build(name).to(dtype)
        fresh.load_state_dict(state)
        oracle = engine_of(stage, fresh, options)
        losses, expected = take_steps(oracle, rank, n, range(3, 5)), oracle.full_state_dict()
        every = 6 if n > 2 or each > 1 else 3
        for way in WAYS[number % every :: every]:
            engine = engine_of(stage, zoo.build(name).to(dtype), options)
            take_steps(engine, rank, n, range(1))
            way(engine, state)
            if hasattr(engine.module, "calls"):
                engine.module.calls = 0
            case = f"{stage} {name} {dtype} {options} {way.__name__}"
            agrees = dtype == HALF and way in (data_inside, vector_inside)  # there masters keep bits where values agree
            rtol = atol = 2e-2 if agrees else 0
            assert take_steps(engine, rank, n, range(3, 5)) == pytest.approx(losses, rel=rtol), case
            torch.testing.assert_close(engine.full_state_dict(), expected, rtol=rtol, atol=atol, msg=case)


def untouched(rank: int, n: int, folder: str, every: int) -> None:
    """Reading full parameters, or writing to one of them, leaves every bit of the other masters; and writing reaches
    what a checkpoint would hold.
    """
    halves = [one for one in kinds(n, folder) if one[2] == HALF]  # elsewhere masters and parameters are one
    for stage, name, dtype, options in halves[::every]:
        results = []
        for reads in (False, True):
            engine = engine_of(stage, zoo.build(name).to(dtype), options)
            take_steps(engine, rank, n, range(2))
            if reads:
                with engine.full_parameters() as module:
                    sum(p.sum() for p in module.parameters())
                engine.full_state_dict()
            results.append((take_steps(engine, rank, n, range(2, 5)), engine.state_dict()["tensors"]))
        (losses, tensors), (again, others) = results
        assert losses == again
        assert all(torch.equal(value, others[key]) for key, value in tensors.items())
        with engine.full_parameters() as module, torch.no_grad():
            module.embedding.weight[0].fill_(0.25)
        written = engine.state_dict()["tensors"]
        changed = sum(int((value != written[key]).sum()) for key, value in tensors.items())
        assert changed <= 2 * zoo.WIDTH, f"{stage} {options}: {changed} elements changed"
        whole = engine.full_state_dict()["embedding.weight"]
        assert bool((whole[0] == 0.25).all())


def write_files(folder: Path, name: str) -> dict[str, Path]:
    """Pretrained fp32 weights: one file, transformers' shards with an index, and a checkpoint of one rank's engine."""
    state = other_state(name, torch.float32)
    unique = {key: value.contiguous() for key, value in state.items() if key != "head.weight" or name != "tied"}
    folder.mkdir(parents=True)
    save_file(unique, folder / "model.safetensors")
    shards = folder / "shards"
    shards.mkdir()
    files = {key: f"model-0000{1 + number % 2}-of-00002.safetensors" for number, key in enumerate(unique)}
    for file in set(files.values()):
        save_file({key: value for key, value in unique.items() if files[key] == file}, shards / file)
    index = {"metadata": {"total_size": 1}, "weight_map": files}
    (shards / "model.safetensors.index.json").write_text(json.dumps(index))
    return {"file": folder / "model.safetensors", "shards": shards, "checkpoint": folder / "checkpoint"}


def weights_from_disk(rank: int, n: int, folder: str) -> None:
    """Every master is the file's value, in fp32, and every parameter that value rounded; then it trains."""
    paths = {name: Path(folder) / f"weights {name}" for name in ("tied", "unused")}
    if rank == 0:
        for name, path in paths.items():
            write_files(path, name)
    if n > 1:
        dist.barrier()
    for name, path in paths.items():
        first = engine_of("zero3", zoo.build(name), {})
        assert first.load_weights(path) == ([], [])
        take_steps(first, rank, n, range(1))  # a checkpoint of other values than the files
        first.load_weights(path / "shards")
        first.save(path / "checkpoint", user_state={"epoch": 2})
    for number, (stage, name, dtype, options) in enumerate(kinds(n, folder)):
        state = other_state(name, torch.float32)
        path = (paths[name] / "shards", paths[name] / "checkpoint", paths[name] / "model.safetensors")[number % 3]
        engine = engine_of(stage, zoo.build(name).to(dtype), options)
        take_steps(engine, rank, n, range(1))
        if number % 3 == 1:
            assert engine.load(path, weights_only=True) == {"epoch": 2}
        else:
            assert engine.load_weights(path) == ([], [])
        case = f"{stage} {name} {dtype} {options} {path}"
        with engine.placement.in_memory(write_back=False):
            for segment in engine.segments:
                where = segment.span
                expected = state[engine.names[where.parameter]].reshape(-1)[where.start : where.stop]
                assert torch.equal(segment.tensor.detach(), expected), case
        found = engine.full_state_dict()
        assert all(torch.equal(found[key], value.to(dtype)) for key, value in state.items()), case
        take_steps(engine, rank, n, range(1))


class Clamped(nn.Module):
    """Writes to its weight in every forward, as clipping layers do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(zoo.WIDTH, zoo.WIDTH) for _ in range(3))
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.scale.clamp_(0.9, 1.0)
        for block in self.blocks:
            x = block(x)
        return (x * self.scale).square().mean()


def clamp(module: nn.Module, _inputs: Any) -> None:
    with torch.no_grad():
        module.weight.clamp_(-0.12, 0.12)


def inside_forward(rank: int, n: int) -> dict[str, Any]:
    """Losses by stage, fp32 and bf16, of a model that writes to its weights as it runs."""
    found = {}
    for stage in STAGES:
        for dtype in (torch.float32, HALF):
            model = Clamped().to(dtype)
            for block in model.blocks:
                block.register_forward_pre_hook(clamp)
            engine = engine_of(stage, model, {"gradient_dtype": dtype} if stage == "megatron" else {})
            losses = train_on(engine, [(torch.full((2, zoo.WIDTH), 1.0 + rank, dtype=dtype),)] * 3)
            found[f"{stage} {dtype}"] = losses, engine.full_state_dict()
    return found


def to_param_groups(rank: int, n: int, folder: str, every: int) -> None:
    """What is written to the optimizer's tensors is refused until every rank takes it, and then it is trained."""
    for stage, name, dtype, options in kinds(n, folder, every):
        halved = zoo.build(name).to(dtype)
        with torch.no_grad():
            for p in (p for p in halved.parameters() if p.requires_grad):
                p.mul_(0.5)
        engine, oracle = engine_of(stage, zoo.build(name).to(dtype), options), engine_of(stage, halved, options)
        held = [p for group in engine.optimizer.param_groups for p in group["params"]]
        in_files = isinstance(options.get("offload"), NvmeOffload)
        with torch.no_grad():
            for p in held:
                p.fill_(0.5) if in_files else p.mul_(0.5)
        refuse_forward(engine, rank, n)
        if in_files:
            with pytest.raises(RuntimeError, match="masters lie in files"):
                engine.sync_parameters()
            assert all(p.detach().isnan().all() for p in held)
            oracle = engine_of(stage, zoo.build(name).to(dtype), options)  # as it was
        else:
            engine.sync_parameters()
        assert take_steps(engine, rank, n, range(3, 5)) == take_steps(oracle, rank, n, range(3, 5)), (stage, options)
        if in_files:
            continue
        for p in held:
            p.data.zero_()
        refuse_forward(engine, rank, n)
        engine.sync_parameters()
        state = engine.full_state_dict()
        assert not any(state[key].any() for key, p in engine.module.named_parameters() if p.requires_grad)


def refuse_forward(engine: Any, rank: int, n: int) -> None:
    """As often as it is tried."""
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"call engine\.sync_parameters\(\) on every rank"):
            engine(*zoo.tokens(rank, n, 3))


def sharded(rank: int, n: int) -> None:
    """Under zero3 a parameter that is in parts is not written to in silence."""
    engine = engine_of("zero3", zoo.build("tied"), {})
    take_steps(engine, rank, n, range(1))
    weight = engine.module.embedding.weight
    written = r"embedding\.weight: it was written to while this rank held a part of it only; write in place inside"
    for write in (
        lambda: weight.mul_(2.0),
        lambda: weight.fill_(3.0),
        lambda: nn.init.normal_(weight),
        lambda: torch._foreach_zero_([weight]),
    ):
        with torch.no_grad(), pytest.raises(RuntimeError, match=written):
            write()
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"embedding\.weight: it is read outside of the forward"):
        torch.ones(weight.shape).lerp_(weight, 0.1)
    for name in ("scale", "embedding.weight"):
        with torch.no_grad(), as_they_are():
            engine.module.get_parameter(name).fill_(3.0)  # as C++ code may
        with pytest.raises(RuntimeError, match=f"{name}: it was written to while this rank held a part of it only"):
            take_steps(engine, rank, n, range(1))
        with as_they_are():
            assert bool(engine.module.embedding.weight.isnan().all())
        take_steps(engine, rank, n, range(1))
    with pytest.raises(ValueError, match=r"not a result of engine\.state_dict\(\); a plain module's state goes into"):
        engine.load_state_dict(zoo.build("tied").state_dict())


def unequal(rank: int, n: int) -> None:
    """Rank 0 alone writes inside full_parameters(), in place or past the versions: all ranks raise alike."""
    for strategy, half in (("zero1", False), ("zero2", True), ("zero3", False), ("zero3", True)):
        model = zoo.build("tied")
        engine = engine_of(strategy, model.bfloat16() if half else model, {})
        before = engine.full_state_dict()
        wide = next(name for name, p in model.named_parameters() if p.dim() == 2 and "embedding" not in name)
        for write in (lambda p: p.data.mul_(2.0), lambda p: p[-1].fill_(0.5), lambda p: setattr(p, "data", p * 3)):
            words = rf"^{wide}: at the end of full_parameters\(\) its values differ between ranks 0 and 1, and each"
            with pytest.raises(RuntimeError, match=words), engine.full_parameters() as whole, torch.no_grad():
                (write if rank == 0 else id)(whole.get_parameter(wide))
            if strategy == "zero3":  # nothing is kept
                assert all(torch.equal(before[key], value) for key, value in engine.full_state_dict().items())
        with engine.full_parameters() as whole, torch.no_grad():  # equal writes heal it
            for key, p in whole.named_parameters():
                p.copy_(before[key] * 2)
        assert torch.equal(engine.full_state_dict()[wide], before[wide] * 2)
        with pytest.raises(ZeroDivisionError), engine.full_parameters():  # does not wait for a comparison
            raise ZeroDivisionError
        take_steps(engine, rank, n, range(1))


def test_unequal_writes_in_full_parameters_raise_on_all_ranks() -> None:
    run_ranks(2, unequal)


@pytest.mark.parametrize("n", [2, *(pytest.param(n, marks=pytest.mark.thorough) for n in (1, 3))])
def test_what_is_written_is_trained(n: int, tmp_path: Path, thorough: bool) -> None:
    """In every run, as below, of some engines."""
    run_ranks(n, every_way, str(tmp_path), 1 if thorough else 2)


def test_what_is_not_written_stays(tmp_path: Path, thorough: bool) -> None:
    run_ranks(2, untouched, str(tmp_path), 1 if thorough else 3)


@pytest.mark.thorough
@pytest.mark.parametrize("n", [1, pytest.param(2, marks=pytest.mark.thorough), 3])
def test_weights_from_the_disk_become_masters_and_parameters(n: int, tmp_path: Path) -> None:
    run_ranks(n, weights_from_disk, str(tmp_path))


def test_writes_inside_the_forward_count_in_every_stage() -> None:
    for found in run_ranks(2, inside_forward):
        for dtype in ("float32", "bfloat16"):
            (losses, state), *others = [value for name, value in found.items() if name.endswith(dtype)]
            for other, weights in others:
                assert other == losses
                assert all(torch.equal(value, weights[name]) for name, value in state.items())
                assert max(value.abs().max() for name, value in state.items() if "weight" in name) < 0.2


def test_writes_to_param_groups_are_refused_until_all_ranks_take_them(tmp_path: Path, thorough: bool) -> None:
    run_ranks(2, to_param_groups, str(tmp_path), 1 if thorough else 3)


def test_parameters_in_parts_are_not_written_to_in_silence() -> None:
    run_ranks(2, sharded)
