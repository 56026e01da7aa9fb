"""Refusals of `initialize`, by name and with the reason; and an engine without references is collected."""

import copy
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.distributed.tensor import distribute_tensor
from torch.nn.parameter import is_lazy

import zerobench
from zerobench.predict.build import shapes_of
from zerobench.zero import STAGES, NvmeOffload, Offload


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), fused=True)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda m: torch.optim.LBFGS(m.parameters()), "LBFGS cannot be sharded: its line search"),
        (lambda m: torch.optim.Adafactor(m.parameters()), "Adafactor cannot be sharded: it factors"),
        (lambda m: torch.optim.SparseAdam(list(m.parameters())), "SparseAdam cannot be sharded: it takes sparse"),
        (lambda m: torch.optim.Muon([m.weight]), "Muon cannot be sharded: it orthogonalizes"),
        (lambda m: torch.optim.SGD([*m.parameters(), nn.Parameter(torch.ones(2))], lr=0.1), "1 trainable tensors"),
        (lambda m: None, r"^optimizer: it is None; for inference only, freeze the model .* such as torch\.optim\.SGD"),
        (lambda m: [adam(m)], "^optimizer: it is a list; give one torch.optim optimizer .* with a parameter group for"),
        (lambda m: torch.optim.AdamW, r"^optimizer: it is a class; give an optimizer of it, such as AdamW\(model\.par"),
        (lambda m: torch.optim.lr_scheduler.ConstantLR(adam(m)), "^optimizer: it is a ConstantLR; give one torch.opt"),
        (lambda m: adam, "^optimizer: it is a function; call it yourself"),
    ],
)
def test_anything_but_one_optimizer_that_can_be_sharded_is_named(make, words: str) -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(ValueError, match=words):
        zerobench.initialize(model, make(model), "zero3")


def test_ranks_without_a_process_group_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(4, 4)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match=r"^initialize: WORLD_SIZE=2, but .* call torch\.distributed\.init_pro"):
        zerobench.initialize(model, adam(model), "zero2")
    monkeypatch.setenv("WORLD_SIZE", "1")
    zerobench.initialize(model, adam(model), "zero2")


def test_module_without_trainable_parameters_takes_an_optimizer_over_frozen_ones() -> None:
    for strategy in STAGES:
        model = nn.Sequential(nn.Linear(4, 4)).requires_grad_(False)
        expected = model(torch.ones(4))
        engine = zerobench.initialize(model, torch.optim.SGD(model.parameters()), strategy)
        assert torch.equal(engine(torch.ones(4)), expected)


@pytest.mark.parametrize(
    ("strategy", "options", "words"),
    [
        ("zero4", {}, "'zero4' is unknown; did you mean zero"),
        ("zero2", {"bucket_byte": 5}, "bucket_byte: no such option; did you mean bucket_bytes"),
        ("zero2", {"bucket_bytes": 5}, "bucket_bytes: 5 is invalid"),
        ("zero3", {"prefetch": -1}, "prefetch: -1 is invalid"),
        ("zero2", {"bucket_bytes": 25e6}, "bucket_bytes: 25000000.0 is invalid"),
        ("zero3", {"units": (nn.Linear(1, 1),)}, "Linear is not a submodule"),
        ("zero3", {"reshard_after_forward": 2}, 'after_forward: 2 is invalid; .* zeropp="hpz" with node_size=2'),
        ("zero3", {"reshard_after_forward": None}, "after_forward: None is invalid; use True or False$"),
        ("zero2", {"broadcast_buffers": "no"}, "broadcast_buffers: 'no' is invalid; use True or False$"),
    ],
)
def test_options(strategy: str, options: dict, words: str) -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(ValueError, match=words):
        zerobench.initialize(model, adam(model), strategy, **options)


def test_precisions_and_sparse_gradients() -> None:
    half = nn.Linear(4, 4, dtype=torch.complex64)
    with pytest.raises(ValueError, match=r"weight: its dtype is torch.complex64"):
        zerobench.initialize(half, torch.optim.SGD(half.parameters(), lr=0.1))
    sparse = nn.Sequential(nn.Embedding(4, 4, sparse=True))
    with pytest.raises(ValueError, match="0: it asks for sparse gradients"):
        zerobench.initialize(sparse, torch.optim.SGD(sparse.parameters(), lr=0.1))


def test_codes_are_not_drawn_on_meta() -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 4)
        model.codes = nn.Parameter(torch.zeros(3, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(ValueError, match=r"codes: no initializer draws torch\.uint8; build the model on a device"):
        zerobench.initialize(model, adam(model), "zero3")


def test_the_british_name_of_a_models_initializers_is_still_read() -> None:
    """A model written for an older release, built on meta, gets the values that its own steps give it."""

    class Model(nn.Linear):
        def initialisers(self) -> Iterator[tuple[nn.Module, Callable[[nn.Module], Any]]]:
            yield self, lambda module: nn.init.constant_(module.weight, 3.0)

    with torch.device("meta"):
        model = Model(2, 2)
    engine = zerobench.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), "zero1")
    assert (engine.full_state_dict()["weight"] == 3.0).all()


def changed(change: Callable[[nn.Sequential], Any]) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    return change(model) or model


def stray_gradient(model: nn.Module) -> None:
    model(torch.ones(4)).sum().backward()


def step_in_backward(model: nn.Module) -> None:
    _apply_optimizer_in_backward(torch.optim.SGD, [model[2].weight], {"lr": 0.1})  # type: ignore[index]


MODULES: dict[str, tuple[Callable[[nn.Sequential], Any], str]] = {
    "lazy parameters": (
        lambda m: m.append(nn.LazyLinear(2)), r"3\.weight: LazyLinear has not made it yet; call the model once"
    ),
    "lazy buffers": (
        lambda m: m.append(nn.LazyBatchNorm1d(affine=False)), r"3\.running_mean: LazyBatchNorm1d has not made it yet"
    ),
    "a script": (torch.jit.script, "model: it is a ScriptModule, which takes no hooks; give initialize"),
    "a script inside": (lambda m: m.append(torch.jit.script(nn.Linear(1, 1))), "3: it is a ScriptModule"),
    "a gradient": (stray_gradient, r"0\.weight: it has a gradient in \.grad.* call optimizer\.zero_grad\(\) before"),
    "an optimizer in backward": (
        step_in_backward, r"2\.weight: _apply_optimizer_in_backward gave it an optimizer .* give initialize\(\) the one"
    ),
    "an expanded buffer": (
        lambda m: m.register_buffer("mask", torch.zeros(1).expand(5)),
        r"mask: this buffer of shape \(5,\) is expanded.* register buffer\.contiguous\(\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
@pytest.mark.parametrize("what", MODULES)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_modules_that_cannot_be_taken_are_named_and_left_alone(what: str, strategy: str) -> None:
    change, words = MODULES[what]
    model = changed(change)
    before = [(type(p), None if is_lazy(p) else p.data_ptr()) for p in model.parameters()]
    with pytest.raises(ValueError, match=words):
        zerobench.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy)
    assert before == [(type(p), None if is_lazy(p) else p.data_ptr()) for p in model.parameters()]


class Wrapper(torch.Tensor):
    """A weight as a quantized one is stored: without elements of its own."""

    @classmethod
    def __torch_dispatch__(cls, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return NotImplemented if function.overloadpacket.__name__ != "detach" else args[0]


def wrapper() -> torch.Tensor:
    return torch.Tensor._make_wrapper_subclass(Wrapper, (4, 4))


def dtensor() -> torch.Tensor:
    return distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (1,)))


@pytest.fixture
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("strategy", STAGES)
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: torch.eye(4).to_sparse(), "of layout torch.sparse_coo, not dense"),
        (wrapper, "a Wrapper, a tensor subclass that wraps others"),
        (dtensor, "a DTensor"),
    ],
)
def test_parameters_and_buffers_that_are_not_dense_are_named(make, words: str, strategy: str, group_of_one) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    first = model[0].weight.data_ptr()
    model.register_parameter("strange", nn.Parameter(make(), requires_grad=False))
    with pytest.raises(ValueError, match=f"^strange: it is {words}"):
        zerobench.initialize(model, adam(model), strategy)
    del model.strange
    model.register_buffer("strange", make())
    with pytest.raises(ValueError, match=f"^strange: this buffer is {words}"):
        zerobench.initialize(model, adam(model), strategy)
    assert model[0].weight.data_ptr() == first


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_a_parameter_has_one_engine(strategy: str) -> None:
    """Actor and critic share an encoder; a part of a model is under an engine. Frozen ones are shared where whole."""
    encoder = nn.Linear(4, 8)
    actor, critic = nn.Sequential(encoder, nn.Linear(8, 3)), nn.Sequential(nn.Tanh(), encoder)
    engine = zerobench.initialize(actor, adam(actor), strategy)
    for other in (actor, actor[1], critic):
        with pytest.raises(ValueError, match=rf"weight: it is under an engine already \({strategy}\).*deepcopy"):
            zerobench.initialize(other, adam(other), strategy)
    alone = copy.deepcopy(critic)
    zerobench.initialize(alone, adam(alone), strategy)
    engine.backward(engine(torch.ones(2, 4)).sum())
    engine.step()
    frozen = nn.Linear(4, 4).requires_grad_(False)
    first, second = nn.Sequential(frozen, nn.Linear(4, 1)), nn.Sequential(frozen, nn.Linear(4, 1))
    zerobench.initialize(first, adam(first), strategy)
    with (
        pytest.raises(ValueError, match=r"under an engine already \(zero3\)") if strategy == "zero3" else nullcontext()
    ):
        zerobench.initialize(second, adam(second), strategy)


def test_torchs_join_is_not_for_an_engine() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(AttributeError, match=r"Join is for unequal numbers of batches.*drop_last=True"):
        Join([zerobench.initialize(model, adam(model))])


class Shares(nn.Module):
    """A weight whose memory another tensor of the model has."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.head = nn.Linear(8, 16, bias=False)
        if how == "tied by .data":
            self.head.weight.data = self.embedding.weight.data
        elif how == "a buffer":
            self.head.register_buffer("kept", self.embedding.weight.data)
        elif how == "a view in an attribute":
            self.head.kept = self.embedding.weight.t()
        elif how == "rows in a list":
            self.rows = [self.embedding.weight.detach()[3:5]]


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3", "megatron"])
@pytest.mark.parametrize("how", ["tied by .data", "a buffer", "a view in an attribute", "rows in a list"])
def test_memory_that_is_shared_is_refused(how: str, strategy: str) -> None:
    model = Shares(how)
    with pytest.raises(ValueError, match=r"it shares memory with embedding\.weight.*tie modules by one Parameter"):
        zerobench.initialize(model, adam(model), strategy)


def test_memory_that_is_shared_without_harm_is_accepted() -> None:
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tied[1].weight = tied[0].weight
    frozen = Shares("a buffer")
    frozen.embedding.requires_grad_(False)
    flat = torch.zeros(20)
    parts = nn.Linear(4, 4)
    parts.weight.data, parts.bias.data = flat[:16].view(4, 4), flat[16:]
    spectral = nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 4)))
    for model in (tied, frozen, parts, spectral, nn.GRU(4, 4)):
        assert zerobench.initialize(model, adam(model), "zero2").module is model


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)
        self.two.weight = self.one.weight

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(values).relu())


def train(strategy: str, offload: Offload | None) -> list[weakref.ref]:
    """An engine's life; returns what must be gone after it."""
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    engine = zerobench.initialize(model, optimizer, strategy=strategy, offload=offload)
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 8)).sum())
        engine.step()
    return [weakref.ref(one) for one in (engine, model, optimizer, model.one.weight)]


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "tier"), [("zero3", "device"), ("zero3", "files"), ("zero2", "host")])
def test_an_engine_that_nobody_holds_is_collected(strategy: str, tier: str, tmp_path: Path) -> None:
    gc.collect()  # what other tests have left
    threads = threading.active_count()
    path = str(tmp_path)
    offload = {"device": None, "host": Offload(), "files": NvmeOffload(path=path, block_bytes=4096)}[tier]
    left = train(strategy, offload)
    gc.collect()
    assert [one() for one in left] == [None] * len(left)
    assert list(tmp_path.iterdir()) == [], "files go with it"
    assert threading.active_count() == threads, "and so do threads"


def test_looking_at_a_model_leaves_no_circle_that_keeps_its_parameters() -> None:
    model = Tied()
    left = [weakref.ref(parameter) for parameter in model.parameters()]
    gc.collect()
    gc.disable()  # a cycle would be collected some time, and count in the memory of a run until then
    try:
        assert len(shapes_of(model)) == len(left)
        del model
        assert [one() for one in left] == [None] * len(left)
    finally:
        gc.enable()
