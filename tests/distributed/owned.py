"""Trains with Muon, or another optimizer of whole matrices, on this rank: for test_owned.py."""

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn, optim
from torch.nn import functional as F

from zerobench.probes.newton_schulz import NewtonSchulz
from zerobench.strategies.ddp import DdpEngine
from zerobench.strategies.ddp_masters import MasterDdpEngine
from zerobench.zero import AdafactorWithAdamW, MuonWithAdamW, Offload, initialize
from zerobench.zero.optim.muon import split

STEPS = 3


class Columns(nn.Module):
    """A matrix with its columns in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(16, 24).t())
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():  # in one order of elements, whatever memory they are in
            self.weight.copy_(torch.randn(24, 16, device=self.weight.device) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight.t()) @ self.weight


class Model(nn.Module):
    """Matrices of several shapes, and parameters that are none."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.layers = nn.ModuleList([nn.Linear(16, 48), nn.Linear(48, 16), nn.Linear(16, 16, bias=False)])
        self.columns = Columns()
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 32)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        x = x + self.layers[1](torch.tanh(self.layers[0](x)))
        x = x + torch.tanh(self.layers[2](x)) + self.columns(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


MATRICES = 4


class Normalized(optim.Optimizer):
    """A user's own: each matrix's gradient over its norm, which needs all of it; plain SGD elsewhere."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / p.grad.norm() if group["owned"] else p.grad, alpha=0.05)


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    matrices, rest = split(model, ["not_2d", "embeddings", "head"])
    return [{"params": matrices, "owned": True}, {"params": rest, "owned": False}]


def optimizer_of(model: nn.Module, kind: str = "muon") -> optim.Optimizer:
    matrices, rest = groups_of(model)
    if kind == "own":
        return Normalized([matrices, rest], {})
    if kind == "adafactor":
        return AdafactorWithAdamW([{**matrices, "lr": 0.02}, {**rest, "lr": 1e-3}])
    return MuonWithAdamW([{**matrices, "lr": 0.02}, {**rest, "lr": 1e-3, "fused": True}])


def model_of(dtype: torch.dtype = torch.float32, device: str = "cpu") -> nn.Module:
    torch.manual_seed(3)
    with torch.device(device):
        return Model().to(dtype)


def batch(rank: int, step: int, micro: int) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.randint(0, 32, (2, 9), generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank))
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


class Outcome(NamedTuple):
    losses: list[float]
    state: dict[str, torch.Tensor]
    calls: list[int]
    """Calls of Newton-Schulz on this rank in each step."""
    kept: dict[str, list[str]]
    """Name of a parameter -> the optimizer's states of it on this rank."""


class Case(NamedTuple):
    strategy: str
    micro_batches: int = 1
    clip: float | None = None
    kind: str = "muon"
    dtype: torch.dtype = torch.float32
    meta: bool = False
    options: tuple[tuple[str, Any], ...] = ()


def engine_of(case: Case) -> Any:
    model = model_of(case.dtype, "meta" if case.meta else "cpu")
    if case.strategy != "ddp":
        options = {"bucket_bytes": 2048, **dict(case.options)}
        return initialize(model, optimizer_of(model, case.kind), case.strategy, **options)
    kind = DdpEngine if case.dtype == torch.float32 else MasterDdpEngine
    return kind(model, optimizer_of(model, case.kind))


def take_steps(engine: Any, rank: int, case: Case, steps: range) -> tuple[list[float], list[int]]:
    losses, calls = [], []
    with NewtonSchulz() as counted:
        for step in steps:
            counted.begin()
            for micro in range(case.micro_batches):
                waits = case.strategy in ("ddp", "zero1", "megatron") and micro < case.micro_batches - 1
                with engine.no_sync() if waits else nullcontext():
                    loss = engine(*batch(rank, step, micro))
                    engine.backward(loss / case.micro_batches)
            if case.clip is not None:
                engine.clip_grad_norm_(case.clip)
            engine.step()
            losses.append(loss.item())
            calls.append(counted.calls)
    return losses, calls


def train(rank: int, n: int, case: Case) -> Outcome:
    engine = engine_of(case)
    losses, calls = take_steps(engine, rank, case, range(STEPS))
    if case.strategy == "ddp":
        state = {name: value.detach().clone() for name, value in engine.module.state_dict().items()}
        return Outcome(losses, state, calls, {})
    kept = {engine.names[s.segment.parameter]: sorted(engine.optimizer.state[s.tensor]) for s in engine.segments}
    return Outcome(losses, engine.full_state_dict(), calls, kept)


def train_all(rank: int, n: int, cases: list[Case]) -> list[Outcome]:
    return [train(rank, n, case) for case in cases]


def in_one_process(n: int, micro_batches: int = 1) -> dict[str, torch.Tensor]:
    """torch.optim.Muon and torch.optim.AdamW, each its own, over the mean gradient of n ranks' batches."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as a rank has: sums in a LayerNorm's backward depend on it
    try:
        return _in_one_process(n, micro_batches)
    finally:
        torch.set_num_threads(threads)


def _in_one_process(n: int, micro_batches: int) -> dict[str, torch.Tensor]:
    model = model_of()
    (matrices, rest), names = (one["params"] for one in groups_of(model)), dict(model.named_parameters())
    optimizers = [optim.Muon(matrices, lr=0.02), optim.AdamW(rest, lr=1e-3, fused=True)]
    for step in range(STEPS):
        means: dict[str, torch.Tensor] = {}
        for rank in range(n):
            for micro in range(micro_batches):
                (model(*batch(rank, step, micro)) / micro_batches).backward()
            for name, p in names.items():
                part = p.grad / n
                means[name] = means[name] + part if name in means else part
                p.grad = None
        for name, p in names.items():
            p.grad = means[name]
        for one in optimizers:
            one.step()
            one.zero_grad()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def save(rank: int, n: int, strategy: str, folder: str) -> dict[str, torch.Tensor]:
    engine = engine_of(Case(strategy))
    take_steps(engine, rank, Case(strategy), range(2))
    engine.save(Path(folder))
    return engine.full_state_dict()


def load(rank: int, n: int, strategy: str, folder: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(the weights, the momentum of the matrices that this rank owns) after the checkpoint is loaded."""
    engine = engine_of(Case(strategy))
    engine.load(Path(folder))
    return engine.full_state_dict(), dict(momenta(engine))


def momenta(engine: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for one in engine.segments:
        if "momentum_buffer" in (state := engine.optimizer.state[one.tensor]):
            yield engine.names[one.segment.parameter], state["momentum_buffer"].clone()


HOST = (("offload", Offload()),)
LATE = (("offload", Offload(delayed_after=1)),)
