"""Writes to parameters beside the optimizer, on real ranks: they count, or are refused in a sentence. So do gradients
that are read and changed between backward and step.

The oracle: such an engine over a model that had the values before `initialize`. Under SGD both train alike, to the bit.
"""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.nn.utils import vector_to_parameters

from tests import zoo
from tests.distributed.training import assert_equal, assert_same, take_steps, train_on
from tests.ranks import on_ranks
from zerobench.zero import STAGES, LossScaling, NvmeOffload, Offload, initialize
from zerobench.zero.bucket import Heap
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


def kinds(n: int, folder: Path, every: int = 1) -> list[tuple[str, str, torch.dtype, dict[str, Any]]]:
    files = [
        (stage, model, dtype, {"offload": NvmeOffload(path=str(folder), block_bytes=4096, buffers=24, **options)})
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


@on_ranks(2, 1, 3)
def test_what_is_written_is_trained(rank: int, n: int, tmp_path: Path, thorough: bool) -> None:
    """Trained, overwritten, trained: as if it had started there. In every run, as below, of some engines."""
    for number, (stage, name, dtype, options) in enumerate(kinds(n, tmp_path, 1 if thorough else 2)):
        state = other_state(name, dtype)
        fresh = zoo.build(name).to(dtype)
        fresh.load_state_dict(state)
        oracle = engine_of(stage, fresh, options)
        losses, expected = take_steps(oracle, rank, n, range(3, 5)), oracle.full_state_dict()
        every = 3 if n <= 2 and thorough else 6
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


@on_ranks(2)
def test_what_is_not_written_stays(rank: int, n: int, tmp_path: Path, thorough: bool) -> None:
    """Reading full parameters, or writing to one of them, leaves every bit of the other masters; and writing reaches
    what a checkpoint would hold.
    """
    halves = [kind for kind in kinds(n, tmp_path) if kind[2] == HALF]  # elsewhere masters and parameters are one
    for stage, name, dtype, options in halves[:: 1 if thorough else 3]:
        results = []
        for reads in (False, True):
            engine = engine_of(stage, zoo.build(name).to(dtype), options)
            take_steps(engine, rank, n, range(2))
            if reads:
                with engine.full_parameters() as module:
                    sum(p.sum() for p in module.parameters())
                engine.full_state_dict()
            results.append((take_steps(engine, rank, n, range(2, 5)), engine.state_dict()["tensors"]))
        assert_same(results[1], results[0], stage, options)
        tensors = results[0][1]
        with engine.full_parameters() as module, torch.no_grad():
            module.embedding.weight[0].fill_(0.25)
        written = engine.state_dict()["tensors"]
        changed = sum(int((value != written[key]).sum()) for key, value in tensors.items())
        assert changed <= 2 * zoo.WIDTH, f"{stage} {options}: {changed} elements changed"
        assert (engine.full_state_dict()["embedding.weight"][0] == 0.25).all()


def write_files(folder: Path, name: str) -> None:
    """Pretrained fp32 weights: one file, and transformers' shards with an index."""
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


@pytest.mark.thorough
@on_ranks(1, 2, 3)
def test_weights_from_the_disk_become_masters_and_parameters(rank: int, n: int, tmp_path: Path) -> None:
    """Every master is the file's value, in fp32, and every parameter that value rounded; then it trains."""
    paths = {name: tmp_path / f"weights {name}" for name in ("tied", "unused")}
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
    for number, (stage, name, dtype, options) in enumerate(kinds(n, tmp_path)):
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
        assert_equal(engine.full_state_dict(), {key: value.to(dtype) for key, value in state.items()}, case)
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


@on_ranks(2)
def test_writes_inside_the_forward_count_in_every_stage(rank: int, n: int) -> None:
    for dtype in (torch.float32, HALF):
        outcomes = []
        for stage in STAGES:
            model = Clamped().to(dtype)
            for block in model.blocks:
                block.register_forward_pre_hook(clamp)
            engine = engine_of(stage, model, {"gradient_dtype": dtype} if stage == "megatron" else {})
            losses = train_on(engine, [(torch.full((2, zoo.WIDTH), 1.0 + rank, dtype=dtype),)] * 3)
            outcomes.append((losses, engine.full_state_dict()))
            assert_same(outcomes[-1], outcomes[0], stage, dtype)
        assert max(value.abs().max() for name, value in outcomes[0][1].items() if "weight" in name) < 0.2


@on_ranks(2)
def test_writes_to_param_groups_are_refused_until_all_ranks_take_them(
    rank: int, n: int, tmp_path: Path, thorough: bool
) -> None:
    for stage, name, dtype, options in kinds(n, tmp_path, 1 if thorough else 3):
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


@on_ranks(2)
def test_parameters_in_parts_are_not_written_to_in_silence(rank: int, n: int) -> None:
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


@on_ranks(2)
def test_unequal_writes_in_full_parameters_raise_on_all_ranks(rank: int, n: int) -> None:
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
                assert_equal(engine.full_state_dict(), before)
        with engine.full_parameters() as whole, torch.no_grad():  # equal writes heal it
            for key, p in whole.named_parameters():
                p.copy_(before[key] * 2)
        assert torch.equal(engine.full_state_dict()[wide], before[wide] * 2)
        with pytest.raises(ZeroDivisionError), engine.full_parameters():  # does not wait for a comparison
            raise ZeroDivisionError
        take_steps(engine, rank, n, range(1))


# -- gradients that are read and changed between backward and step --------------------------------------------------

LR = 0.1


def gradient_kinds(n: int, folder: Path) -> list[tuple[str, str, torch.dtype, dict[str, Any]]]:
    options = {"loss_scaling": LossScaling(initial=256.0)}
    all_kinds = [*kinds(n, folder), *((stage, "tied", torch.float16, options) for stage in ("zero2", "zero3"))]
    return all_kinds if n < 3 else all_kinds[::4]


def means(module: torch.nn.Module, rank: int, n: int, micros: range) -> dict[str, torch.Tensor]:
    """Returns the mean gradients of the sum over the micro-batches, in fp64, by autograd alone, by parameter name."""
    found = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in module.named_parameters()}
    for number in micros:
        for parameter in module.parameters():
            parameter.grad = None
        module(*zoo.tokens(rank, n, number)).float().backward()
        for name, parameter in module.named_parameters():
            if parameter.grad is not None:
                found[name] += parameter.grad.double() / n
    if n > 1:
        for value in found.values():
            dist.all_reduce(value)
    return {name: value for name, value in found.items() if bool(value.any())}


def backwards(engine: Any, rank: int, n: int, micros: range) -> None:
    for number in micros:
        last = number == micros[-1]
        loss = engine(*zoo.tokens(rank, n, number)).float()
        if last:
            engine.backward(loss)
        else:
            with engine.no_sync():
                engine.backward(loss)
            if n > 1:
                with pytest.raises(RuntimeError, match="the last backward was under no_sync"):
                    engine.full_gradient(engine.names[0])


@on_ranks(3, 1, 2)
def test_gradients_are_the_mean_and_edits_of_them_count(rank: int, n: int, tmp_path: Path) -> None:
    for number, (stage, name, dtype, options) in enumerate(gradient_kinds(n, tmp_path)):
        module, plain = (zoo.build(name).to(dtype) for _ in range(2))
        engine = engine_of(stage, module, options)
        micros = range(1 + number % 2 if dtype == torch.float32 else 1)
        expected = means(plain, rank, n, micros)
        backwards(engine, rank, n, micros)
        case = f"{stage} {name} {dtype} {options}"
        tolerance = 1e-5 if dtype == torch.float32 else 3e-2
        found = {name: engine.full_gradient(name) for name in engine.names}
        assert {name for name, value in found.items() if value is not None and value.any()} == set(expected), case
        check_norms(engine, found, case)
        for key, value in expected.items():
            assert found[key].dtype == torch.float32, case
            gap = (found[key].double() - value).norm()
            assert gap <= tolerance * value.norm() + 1e-9, f"{case} {key}: {gap} of {value.norm()}"
        check_edits(engine, found, case)
        check_refusals(engine)


def check_norms(engine: Any, found: dict[str, Any], case: str) -> None:
    for norm_type in (2.0, float("inf")):
        norms = engine.gradient_norms(norm_type)
        assert set(norms) == {name for name, value in found.items() if value is not None}
        for name, norm in norms.items():
            assert norm.dtype == torch.float64
            expected = torch.linalg.vector_norm(found[name].double(), norm_type)
            assert norm.item() == pytest.approx(expected.item(), rel=1e-6, abs=1e-12), f"{case} {name}"


def check_edits(engine: Any, found: dict[str, Any], case: str) -> None:
    """Half of every gradient, a mask of the embedding's, one replaced: the optimizer gets that, to the bit."""
    mask = torch.zeros(zoo.WORDS, zoo.WIDTH)
    mask[::3] = 1
    covered: dict[str, int] = {}
    for segment in engine.gradient_segments():
        segment.gradient.mul_(0.5)
        if segment.name == "embedding.weight":
            segment.gradient.mul_(segment.part_of(mask).to(segment.gradient.dtype))
        covered[segment.name] = covered.get(segment.name, 0) + segment.stop - segment.start
    replaced = torch.linspace(-1, 1, zoo.WIDTH).to(torch.bfloat16).float()
    engine.set_full_gradient("blocks.0.norm.weight", replaced)
    edited = {name: engine.full_gradient(name) for name in engine.names}
    assert torch.equal(edited["blocks.0.norm.weight"], replaced), case
    half = found["embedding.weight"] * 0.5 * mask
    torch.testing.assert_close(edited["embedding.weight"], half, rtol=1e-2, atol=1e-7)
    norm = engine.clip_grad_norm_(0.25)
    whole = torch.stack([v.double().norm() for v in edited.values() if v is not None]).norm()
    assert norm.item() == pytest.approx(whole.item(), rel=1e-5), case
    clipped = {name: engine.full_gradient(name) for name in engine.names}
    before = masters(engine)
    engine.step()
    if engine.update.pending_gradients():
        engine.settle()
    for segment, old, new in zip(engine.segments, before, masters(engine), strict=True):
        name, span = engine.names[segment.span.parameter], segment.span
        if clipped[name] is None:
            assert torch.equal(old, new)
        else:
            gradient = engine.orders[engine.module.get_parameter(name)].flatten(clipped[name])[span.start : span.stop]
            torch.testing.assert_close(new, old - LR * gradient, rtol=1e-6, atol=1e-8)


def masters(engine: Any) -> list[torch.Tensor]:
    with engine.placement.in_memory(write_back=False):
        return [segment.tensor.detach().clone() for segment in engine.segments]


def check_refusals(engine: Any) -> None:
    with pytest.raises(ValueError, match=r"'embedding.weigth': the module has no such parameter; did you mean embed"):
        engine.full_gradient("embedding.weigth")
    with pytest.raises(ValueError, match=r"the value's shape is \(2,\), but the parameter's is \(37, 19\)"):
        engine.set_full_gradient("embedding.weight", torch.ones(2))
    with pytest.raises(RuntimeError, match=r"embedding\.weight has no gradient; run a backward"):
        engine.set_full_gradient("embedding.weight", torch.ones(zoo.WORDS, zoo.WIDTH))
    assert engine.full_gradient("embedding.weight") is None
    assert engine.gradient_norms() == {}
    assert list(engine.gradient_segments()) == []


RATE = 0.5


class Branches(nn.Module):
    """Rank r runs branch r; a third is run by no rank, and a shared layer by all."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shared = nn.Linear(15, 15)
        self.branches = nn.ModuleList(nn.Linear(15, 15) for _ in range(3))

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        return self.branches[rank](self.shared(x)).square().mean()


def poisoned(make: Any) -> Any:
    def made(heap: Heap, *args: Any) -> Any:
        found = make(heap, *args)
        (args[0] if found is None else found).fill_(torch.nan)
        return found

    return made


def inputs(rank: int) -> torch.Tensor:
    return torch.randn(5, 15, generator=torch.Generator().manual_seed(rank))


def expected(n: int) -> dict[str, torch.Tensor]:
    """By hand: the mean of all ranks' gradients; what no rank has used stays as it is."""
    module = Branches()
    sum(module(inputs(rank), rank) for rank in range(n)).backward()
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad /= n
    torch.optim.SGD(module.parameters(), lr=RATE, weight_decay=0.1).step()
    return module.state_dict()


@on_ranks(2)
def test_what_a_rank_did_not_use_counts_as_zero_there_and_what_none_used_stays(rank: int, n: int) -> None:
    """Weight decay would move whatever is updated."""
    for stage in ("zero1", "zero2"):
        module = Branches()
        optimizer = torch.optim.SGD(module.parameters(), lr=RATE, weight_decay=0.1)
        with mock.patch.multiple(Heap, take=poisoned(Heap.take), restore=poisoned(Heap.restore)):
            engine = initialize(module, optimizer, stage, bucket_bytes=1024)
            engine.backward(engine(inputs(rank), rank))
            engine.step()
        torch.testing.assert_close(engine.full_state_dict(), dict(expected(n)), msg=stage)
