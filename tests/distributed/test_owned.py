"""Matrices that one rank owns, under every strategy: Muon equals one process and DDP, once a step, on one rank each."""

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

from tests.distributed.training import assert_equal
from tests.ranks import on_ranks, one_thread, run_ranks
from zerobench.probes.outside_dispatch import orthogonalizations_watched
from zerobench.strategies.ddp import DdpEngine, MasterDdpEngine
from zerobench.zero import AdafactorWithAdamW, MuonWithAdamW, Offload, initialize
from zerobench.zero.optim.muon import split

STEPS = 2


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
    losses, calls, flops = [], [], list[int]()
    with orthogonalizations_watched(flops.append):
        for step in steps:
            flops.clear()
            for micro in range(case.micro_batches):
                waits = case.strategy in ("ddp", "zero1", "megatron") and micro < case.micro_batches - 1
                with engine.no_sync() if waits else nullcontext():
                    loss = engine(*batch(rank, step, micro))
                    engine.backward(loss / case.micro_batches)
            if case.clip is not None:
                engine.clip_grad_norm_(case.clip)
            engine.step()
            losses.append(loss.item())
            calls.append(len(flops))
    return losses, calls


def train(rank: int, n: int, case: Case) -> Outcome:
    engine = engine_of(case)
    losses, calls = take_steps(engine, rank, case, range(STEPS))
    if case.strategy == "ddp":
        state = {name: value.detach().clone() for name, value in engine.module.state_dict().items()}
        return Outcome(losses, state, calls, {})
    kept = {engine.names[s.span.parameter]: sorted(engine.optimizer.state[s.tensor]) for s in engine.segments}
    return Outcome(losses, engine.full_state_dict(), calls, kept)


def train_all(rank: int, n: int, cases: list[Case]) -> list[Outcome]:
    return [train(rank, n, case) for case in cases]


@one_thread()
def in_one_process(n: int, micro_batches: int = 1) -> dict[str, torch.Tensor]:
    """torch.optim.Muon and torch.optim.AdamW, each its own, over the mean gradient of n ranks' batches."""
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
            yield engine.names[one.span.parameter], state["momentum_buffer"].clone()


HOST = (("offload", Offload()), ("tile_bytes", 1024))
LATE = (("offload", Offload(delayed_after=1)),)


STRATEGIES = ("zero1", "zero2", "zero3", "megatron")

SPREAD = 0.02
"""Newton-Schulz works in bf16: where a norm or a sum of gradients is rounded otherwise, an entry of a matrix may move
by a share of what Muon moves it in all steps, 3 · 0.02 of a matrix of norm about 1 per row."""

CASES = [
    *(Case(strategy) for strategy in ("ddp", *STRATEGIES)),
    *(Case(strategy, micro_batches=2) for strategy in ("ddp", "zero1", "zero2", "zero3")),
    *(Case(strategy, clip=0.1) for strategy in ("ddp", "zero1", "zero3")),
    Case("zero2", options=HOST), Case("zero2", options=LATE), Case("zero3", meta=True),
    Case("zero3", options=(("persistence_numel", 300),)),
    *(Case(strategy, dtype=torch.bfloat16) for strategy in ("ddp", "zero1", "zero3")),
    *(Case(strategy, kind=kind) for kind in ("own", "adafactor") for strategy in ("ddp", "zero1", "zero3")),
]  # fmt: skip


@pytest.fixture(scope="module", params=[2, pytest.param(1, marks=pytest.mark.thorough)])
def ranks(request) -> int:
    return request.param


@pytest.fixture(scope="module")
def found(ranks: int) -> dict[Case, list[Outcome]]:
    """Case -> what each rank found."""
    return dict(zip(CASES, zip(*run_ranks(ranks, train_all, CASES), strict=True), strict=True))


def test_every_strategy_equals_one_process_to_the_bit(found, ranks: int) -> None:
    once, twice = in_one_process(ranks), in_one_process(ranks, micro_batches=2)
    for case, outcomes in found.items():
        for one in outcomes:
            if case.kind != "muon" or case.dtype != torch.float32 or case.clip is not None or case.options == LATE:
                continue
            if case.micro_batches == 1:
                assert_equal(one.state, once, case)
            elif case.strategy in ("ddp", "zero1", "megatron"):  # the others sum over the ranks in each micro-batch
                assert_equal(one.state, twice, case)
            else:
                assert max(float((one.state[k] - twice[k]).abs().max()) for k in twice) < SPREAD


def test_clipped_and_halved_strategies_agree_with_ddp(found) -> None:
    for case in (case for case in found if case.clip is not None or case.dtype != torch.float32 or case.kind != "muon"):
        ddp = found[case._replace(strategy="ddp")][0]
        first = found[case._replace(strategy="zero1")][0]
        for one in found[case] if case.strategy != "ddp" else ():
            assert_equal(one.state, first.state, case)
            if case.clip is None:
                assert_equal(one.state, ddp.state, case)
            assert max(float((one.state[k] - ddp.state[k]).abs().max()) for k in ddp.state) < SPREAD


def test_a_matrix_is_orthogonalized_once_a_step_by_one_rank(found, ranks: int) -> None:
    """The known faults of others: no Newton-Schulz at all under DDP, one in each micro-batch, none with offload."""
    for case, outcomes in found.items():
        if case.kind == "muon":
            each = [sum(calls) for calls in zip(*(one.calls for one in outcomes), strict=True)]
            if case.options == LATE:  # in a thread, and of the last step not at all
                assert sum(each) in (MATRICES * (STEPS - 1), MATRICES * STEPS), case
                continue
            assert each == [MATRICES * (ranks if case.strategy == "ddp" else 1)] * STEPS, case


def test_matrices_have_a_momentum_on_their_owner_and_no_state_of_adamw(found, ranks: int) -> None:
    names = [f"layers.{i}.weight" for i in range(3)] + ["columns.weight"]
    for case, outcomes in found.items():
        if case.strategy != "ddp" and case.kind == "muon":
            for name in names:
                assert [one.kept[name] for one in outcomes if name in one.kept] == [["momentum_buffer"]], (case, name)
            rest = [states for one in outcomes for name, states in one.kept.items() if name not in names]
            assert {tuple(states) for states in rest} == {("exp_avg", "exp_avg_sq", "step")}


def test_uneven_and_empty_shards_and_checkpoints_at_another_number_of_ranks(tmp_path) -> None:
    """Four matrices on five ranks: one owns none."""
    saved = run_ranks(2, save, "zero2", str(tmp_path))[0]
    loaded = run_ranks(5, load, "zero3", str(tmp_path))
    for state, _ in loaded:
        assert_equal(state, saved)
    assert sorted(len(kept) for _, kept in loaded) == [0, 1, 1, 1, 1]
    alone, whole = load(0, 1, "zero1", str(tmp_path))
    assert_equal(alone, saved)
    assert_equal({name: m for _, kept in loaded for name, m in kept.items()}, whole)
    assert whole["columns.weight"].stride() == (1, 24), "in the order of its memory"


@pytest.mark.thorough
@pytest.mark.parametrize("n", [3, 5])
def test_beyond_two_ranks_the_stages_are_equal_and_close_to_ddp(n: int) -> None:
    cases = [Case(strategy) for strategy in ("ddp", *STRATEGIES)]
    ddp, *stages = zip(*run_ranks(n, train_all, cases), strict=True)
    for outcomes in stages:
        for one in outcomes:
            assert_equal(one.state, stages[0][0].state)
        assert [sum(calls) for calls in zip(*(one.calls for one in outcomes), strict=True)] == [MATRICES] * STEPS
    assert max(float((stages[0][0].state[k] - ddp[0].state[k]).abs().max()) for k in ddp[0].state) < SPREAD


class Mixture(nn.Module):
    """Experts, all of which see all tokens: in a stack, or a matrix each."""

    def __init__(self, stacked: bool) -> None:
        super().__init__()
        for name, shape in (("up", (5, 16, 24)), ("down", (5, 24, 16))):
            stack = torch.randn(shape) / 8
            setattr(self, name, nn.Parameter(stack) if stacked else nn.ParameterList([*stack]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up, down = (p if isinstance(p, nn.Parameter) else torch.stack([*p]) for p in (self.up, self.down))
        return torch.einsum("bti,eij,ejk->btk", x, torch.tanh(up), down)


class Experts(nn.Module):
    def __init__(self, stacked: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)
        self.layers = nn.ModuleList(Mixture(stacked) for _ in range(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x).square().mean()


@on_ranks(2, 1)
def test_stacked_experts_are_updated_matrix_by_matrix(rank: int, n: int, tmp_path: Path) -> None:
    """Muon on stacks equals torch's Muon on each expert's matrix, and goes on from a checkpoint of another stage."""

    def of(model: nn.Module) -> MuonWithAdamW:
        matrices, rest = split(model, ["not_2d_or_3d", "embeddings", "head"])
        return MuonWithAdamW([{"params": matrices, "owned": True, "lr": 0.02}, {"params": rest, "owned": False}])

    def train(engine: Any, steps: range) -> dict[str, torch.Tensor]:
        for step in steps:
            tokens = torch.randint(32, (2, 6), generator=torch.Generator().manual_seed(10 * step + rank))
            engine.backward(engine(tokens))
            engine.step()
        return engine.full_state_dict()

    apart = Experts(stacked=False)
    assert {p.dim() for p in apart.parameters()} == {1, 2}
    expected = train(initialize(apart, of(apart), "zero1"), range(4))
    for strategy in ("zero1", "zero2", "zero3", "megatron"):
        model = Experts(stacked=True)
        engine = initialize(model, of(model), strategy)
        flops: list[int] = []
        with orthogonalizations_watched(flops.append):
            train(engine, range(2))
        calls = torch.tensor([len(flops)])
        engine.comm.sum(calls)
        assert calls.item() == 2 * 4 * 5, "each of 20 matrices once a step, over all ranks"
        engine.save(tmp_path / strategy)
        model = Experts(stacked=True)
        engine = initialize(model, of(model), "zero2" if strategy == "zero3" else "zero3")
        engine.load(tmp_path / strategy)
        state = train(engine, range(2, 4))
        for name, value in expected.items():
            stack, _, number = name.rpartition(".")
            mine = state[name] if name in state else state[stack][int(number)]
            assert torch.equal(mine, value), (strategy, name)
        moments = [one["momentum_buffer"].shape for one in engine.optimizer.state.values() if "momentum_buffer" in one]
        assert all(shape in ((5, 16, 24), (5, 24, 16)) for shape in moments)
