"""One step of an optimizer is one step: its counts and hooks know nothing of tiles, tiers and delays."""

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim.optimizer import _global_optimizer_post_hooks, register_optimizer_step_post_hook

from tests.ranks import on_ranks
from zerobench.strategies.ddp import MasterDdpEngine
from zerobench.zero import NvmeOffload, Offload, initialize
from zerobench.zero.optim.step_by_tiles import raw_step

WIDTH, STEPS = 24, 4


class ByParameter(optim.Optimizer):
    """Adam whose count is each parameter's own. The others differ in where they keep it."""

    def __init__(self, parameters: Any, lr: float = 1e-2) -> None:
        super().__init__(parameters, {"lr": lr})

    def count(self, group: dict[str, Any], p: torch.Tensor) -> float:
        self.state[p]["count"] = self.state[p].get("count", 0) + 1
        return self.state[p]["count"]

    def begin(self) -> None:
        pass

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.begin()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                t, state = self.count(group, p), self.state[p]
                if p.ndim == p.dim() == len(p.shape) == p.grad.ndim == 2:  # matrices decay, in segments too
                    p.mul_(1 - 0.1 * group["lr"])
                if "m" not in state:
                    state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
                state["m"].lerp_(p.grad, 0.1)
                state["v"].mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
                root = (state["v"] / (1 - 0.99**t)).sqrt_().add_(1e-8)
                p.addcdiv_(state["m"], root, value=-group["lr"] / (1 - 0.9**t))


class ByGroup(ByParameter):
    def begin(self) -> None:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1

    def count(self, group: dict[str, Any], p: torch.Tensor) -> float:
        return group["count"]


class ByTensor(ByGroup):
    """In place, as apex does where steps are captured in a graph."""

    def __init__(self, parameters: Any, lr: float = 1e-2) -> None:
        super().__init__(parameters, lr)
        for group in self.param_groups:
            group["count"] = torch.zeros(())

    def begin(self) -> None:
        for group in self.param_groups:
            group["count"].add_(1)

    def count(self, group: dict[str, Any], p: torch.Tensor) -> float:
        return int(group["count"])


class ByAttribute(ByParameter):
    taken = 0

    def begin(self) -> None:
        self.taken += 1

    def count(self, group: dict[str, Any], p: torch.Tensor) -> float:
        return self.taken


class ByState(ByParameter):
    def begin(self) -> None:
        self.state["taken"] = self.state.get("taken", 0) + 1

    def count(self, group: dict[str, Any], p: torch.Tensor) -> float:
        return self.state["taken"]


class OfAdam(optim.AdamW):
    """Its step calls its parent's, in which torch has hooks run once more."""

    def __init__(self, parameters: Any, lr: float = 1e-2) -> None:
        super().__init__(parameters, lr=lr)
        self.taken = 0

    def step(self, closure: Any = None) -> Any:
        self.taken += 1
        return super().step(closure)


KINDS = [ByGroup, ByTensor, ByAttribute, ByState]
CUT: dict[str, Any] = {"tile_bytes": 1024}
WAYS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "in tiles": CUT,
    "half on the host": CUT | {"offload": Offload(fraction=0.5)},
    "in one tile a tier": {"tile_bytes": None, "offload": Offload(fraction=0.5)},
    "in files": CUT | {"offload": NvmeOffload(block_bytes=4096, buffers=12)},
    "late": CUT | {"offload": Offload(delayed_after=1)},
}


def options_of(way: str, folder: Path) -> dict[str, Any]:
    """WAYS[way], with its files in `folder`."""
    offload = WAYS[way].get("offload")
    return WAYS[way] | ({"offload": replace(offload, path=str(folder))} if isinstance(offload, NvmeOffload) else {})


def count_of(optimizer: optim.Optimizer) -> int:
    if isinstance(optimizer, ByGroup):
        return int(optimizer.param_groups[0]["count"])
    return optimizer.taken if isinstance(optimizer, ByAttribute) else optimizer.state["taken"]


def built(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))).to(dtype)


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """The second group learns at another rate."""
    return [{"params": list(model[:2].parameters())}, {"params": list(model[2:].parameters()), "lr": 3e-3}]


def batch(step: int, rank: int = 0) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def plain(kind: type[optim.Optimizer]) -> list[torch.Tensor]:
    model = built()
    optimizer = kind(groups_of(model))
    for step in range(STEPS):
        model(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


def train(kind: type[optim.Optimizer], dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """(weights, what is counted) after some steps and whatever was late; hooks and a scheduler look on."""
    model = built(dtype)
    engine = initialize(model, kind(groups_of(model)), "zero2", elementwise=True, **options)
    called = {"before": 0, "after": 0, "anywhere": 0}

    def call(name: str) -> Any:
        return lambda *_: called.update({name: called[name] + 1})

    engine.optimizer.register_step_pre_hook(call("before"))
    engine.optimizer.register_step_post_hook(call("after"))
    everywhere = register_optimizer_step_post_hook(call("anywhere"))
    scheduler = optim.lr_scheduler.LambdaLR(engine.optimizer, lambda _: 1.0)
    try:
        for step in range(STEPS):
            engine.backward(engine(batch(step).to(dtype)).float().square().mean())
            engine.step()
            scheduler.step()
            assert set(called.values()) == {step + 1}
    finally:
        everywhere.remove()
    late = engine.options.delayed_after is not None and engine.update.complete()
    if late:
        engine.placement.round_masters()
    with engine.placement.in_memory(write_back=False):
        weights = torch.cat([segment.tensor.detach().flatten().clone() for segment in engine.segments])
    return weights, engine.optimizer, [p.detach() for p in model.parameters()], late


def steps(engine: Any, numbers: range) -> dict[str, torch.Tensor]:
    for step in numbers:
        engine.backward(engine(batch(step)).square().mean())
        engine.step()
    return engine.full_state_dict()


@pytest.mark.parametrize("way", WAYS)
def test_counts_and_hooks_know_nothing_of_tiles(way: str, tmp_path: Path) -> None:
    options = options_of(way, tmp_path)
    oracle = train(ByParameter, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a scheduler's, of a step that was not called
        for kind in KINDS:
            weights, optimizer, parameters, late = train(kind, **options)
            assert torch.equal(weights, oracle[0]), kind.__name__
            assert count_of(optimizer) == STEPS
            assert late is (way == "late")
            if way != "late":
                assert all(torch.equal(a, b) for a, b in zip(parameters, plain(kind), strict=True)), kind.__name__


def test_in_half_precision_and_of_a_parents_step() -> None:
    for options in ({}, CUT, {"offload": Offload(delayed_after=0)}):
        oracle = train(ByParameter, torch.bfloat16, **options)
        for kind in KINDS:
            weights, optimizer, *_ = train(kind, torch.bfloat16, **options)
            assert torch.equal(weights, oracle[0])
            assert count_of(optimizer) == STEPS
    optim.AdamW([nn.Parameter(torch.ones(1))])  # from now on AdamW.step runs hooks by itself
    for way in ("in tiles", "half on the host"):
        model = built()
        engine = initialize(model, OfAdam(groups_of(model)), "zero2", elementwise=True, **WAYS[way])
        steps(engine, range(STEPS))
        assert engine.optimizer.taken == STEPS
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain(OfAdam), strict=True))


@pytest.mark.parametrize("way", ["in tiles", "late", "in files"])
def test_an_optimizer_that_is_not_torchs_goes_on_from_a_checkpoint(way: str, tmp_path: Path) -> None:
    """Its segments have dimensions, and a checkpoint knows elements alone: they are cut again, in any tier."""

    def engine_of(options: dict[str, Any]) -> Any:
        model = built()
        return initialize(model, ByParameter(groups_of(model)), "zero2", elementwise=True, **options)

    first = engine_of(options_of(way, tmp_path))
    steps(first, range(2))
    first.save(tmp_path / "saved")
    wanted = steps(first, range(2, 4))
    for options in ({}, options_of(way, tmp_path)):
        engine = engine_of(options)
        engine.load(tmp_path / "saved")
        found = steps(engine, range(2, 4))
        late_elsewhere = way == "late" and not options  # there the update that was pending is made at once
        assert late_elsewhere or all(torch.equal(found[name], value) for name, value in wanted.items())
        engine.load_weights(tmp_path / "saved")


class Mixing(ByParameter):
    """A step size that all parameters have made."""

    def begin(self) -> None:
        gradients = [p.grad.abs().mean() for group in self.param_groups for p in group["params"] if p.grad is not None]
        self.param_groups[0]["size"] = sum(g.item() for g in gradients)


class Undefined(ByParameter):
    """A fact that is not a number yet."""

    def begin(self) -> None:
        self.param_groups[0]["best"] = float("nan")
        self.best = torch.tensor(float("nan"))


def test_facts_that_are_not_numbers_agree() -> None:
    *_, parameters, _ = train(Undefined, **CUT)
    assert all(torch.equal(a, b) for a, b in zip(parameters, plain(Undefined), strict=True))


def test_an_optimizer_that_mixes_parameters_is_found_out() -> None:
    with pytest.raises(RuntimeError, match=r"Mixing changed 'size' to .* an update that mixes parameters cannot be"):
        train(Mixing, **CUT)


def test_one_tile_for_an_optimizer_that_is_not_torchs() -> None:
    for kind, most in ((ByGroup, 1), (OfAdam, 1), (optim.AdamW, 3)):
        model = nn.Sequential(*(nn.Linear(1100, 1100) for _ in range(2)))
        engine = initialize(model, kind(model.parameters()), "zero2", elementwise=True)
        assert (len(engine.update.tiles) >= most) if most > 1 else (len(engine.update.tiles) == 1)


@on_ranks(2)
def test_all_ranks_count_alike(rank: int, n: int) -> None:
    """One whose shard is empty, too, and DDP with masters."""
    for strategy in ("zero1", "zero2", "zero3", "megatron"):
        model = nn.Linear(2, 1, bias=False)
        engine = initialize(model, ByGroup(model.parameters()), strategy, elementwise=True, **CUT)
        called: list[int] = []
        engine.optimizer.register_step_post_hook(lambda *_, called=called: called.append(1))
        for _ in range(STEPS):
            engine.backward(engine(torch.ones(3, 2)).sum())
            engine.step()
        assert count_of(engine.optimizer) == len(called) == STEPS
    model = built(torch.bfloat16)
    masters = MasterDdpEngine(model, ByGroup(model.parameters()), tile_bytes=1024)
    for step in range(STEPS):
        masters.backward(masters(batch(step, rank).bfloat16()).float().square().mean())
        masters.step()
    assert count_of(masters.optimizer) == STEPS
    held = masters.optimizer.param_groups[0]["params"]
    masters.optimizer.register_step_post_hook(lambda *_: [p.data.fill_(0.5) for p in held])
    masters.backward(masters(batch(0, rank).bfloat16()).float().square().mean())
    masters.step()
    assert all(bool((p == 0.5).all()) for p in model.parameters())  # what a hook writes to masters is rounded, too


def test_torch_has_the_private_names_of_steps() -> None:
    called: list[str] = []
    optimizer = optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    everywhere = register_optimizer_step_post_hook(lambda *_: called.append("anywhere"))
    p = optimizer.param_groups[0]["params"][0]
    p.grad = torch.ones(1)
    try:
        raw_step(optimizer)
        assert (called, p.item()) == ([], 0.0)
        optimizer.step()
        assert called == ["before", "after", "anywhere"]
    finally:
        everywhere.remove()
    assert _global_optimizer_post_hooks == {}
