"""Certificates of loops in one process: honest loops get no accusation, and each planted failure is named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerobench
from tests.unit.test_watch import Loop, nothing, patched
from zerobench import ExpectedTraining
from zerobench.watching import Certificate, CertificateError
from zerobench.watching.held_tensors import leave_out

STEPS = 3


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    """Tensors that other tests of this process have left are no part of a loop."""
    with leave_out():
        yield


class Training:
    """A loop of plain torch over one model, and its variants. `micro`: micro-batches into which a batch is cut."""

    def __init__(self, micro: int = 1, clip: float | None = None, compute: Any = None, lr: float = 1e-2) -> None:
        torch.manual_seed(0)
        self.model: Any = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.LayerNorm(32), nn.Linear(32, 8))
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=lr)
        self.micro, self.clip, self.compute = micro, clip, compute

    def loss(self, step: int, number: int) -> torch.Tensor:
        x = torch.randn(12, 16, generator=torch.Generator().manual_seed(step)).chunk(self.micro)[number]
        with torch.autocast("cpu", self.compute, enabled=self.compute is not None):
            return self.model(x).float().square().mean() / self.micro

    def step(self, step: int) -> None:
        for number in range(self.micro):
            self.loss(step, number).backward()
        if self.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.update()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def certificate(self, expected: Any = True, optimizers: Any = None, **how: Any) -> Certificate:
        with zerobench.watch(self.model, optimizers or self.optimizer, verify=expected, **how) as watch:
            for step in range(STEPS):
                self.step(step)
                if how.get("ends") == "step":
                    watch.step()
        assert watch.certificate is not None
        return watch.certificate


def different(certificate: Certificate) -> list[str]:
    return [f"{row.check}: {row.subject}: {row.found}" for row in certificate.different]


# -- honest loops -----------------------------------------------------------------------------------------


def low_masters() -> Training:
    """A model in bf16 whose optimizer updates fp32 copies, which are rounded into it."""

    class Masters(Training):
        def __init__(self) -> None:
            super().__init__()
            self.model.bfloat16()
            self.masters = [p.detach().float().requires_grad_() for p in self.model.parameters()]
            self.optimizer = torch.optim.AdamW(self.masters, lr=1e-2)

        def loss(self, step: int, number: int) -> torch.Tensor:
            x = torch.randn(12, 16, generator=torch.Generator().manual_seed(step))
            loss: torch.Tensor = self.model(x.bfloat16()).float().square().mean()
            return loss

        def update(self) -> None:
            for master, parameter in zip(self.masters, self.model.parameters(), strict=True):
                assert parameter.grad is not None
                master.grad, parameter.grad = parameter.grad.float(), None
            super().update()
            with torch.no_grad():
                for master, parameter in zip(self.masters, self.model.parameters(), strict=True):
                    parameter.copy_(master)

    return Masters()


def by_engine(stage: str) -> Training:
    """The loop of one of our engines, of a single rank."""

    class ByEngine(Training):
        def __init__(self) -> None:
            super().__init__()
            self.model = self.optimizer = zerobench.initialize(self.model, self.optimizer, strategy=stage)

        def step(self, step: int) -> None:
            self.model.backward(self.loss(step, 0))
            self.update()

    return ByEngine()


def compiled() -> Training:
    training = Training()
    training.model.compile(backend="aot_eager")
    return training


HONEST: dict[str, tuple[Callable[[], Training], dict[str, Any]]] = {
    "plain": (Training, {"accumulation": 1}),
    "accumulation": (lambda: Training(micro=3), {"accumulation": 3}),
    "clipping": (lambda: Training(clip=0.05), {"clip": 0.05}),
    "no clipping needed": (lambda: Training(clip=50.0), {"clip": 50.0}),
    "autocast": (lambda: Training(compute=torch.bfloat16), {"computes": "bfloat16"}),
    "masters": (low_masters, {"masters": "float32", "computes": "bfloat16"}),
    "zero1": (lambda: by_engine("zero1"), {}),
    "zero2": (lambda: by_engine("zero2"), {}),
    "zero3": (lambda: by_engine("zero3"), {"optimizer": "AdamW"}),
    "compile": (compiled, {}),
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the plain loop's certificate."""
    folder = tmp_path_factory.mktemp("reference")
    Training().certificate(to=folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", HONEST)
def test_an_honest_loop_gets_no_accusation(name: str, reference: Path) -> None:
    build, declared = HONEST[name]
    training = build()
    theirs = training.certificate() if training.clip else reference  # of plain torch, too, and clipped
    certificate = build().certificate(ExpectedTraining(reference=theirs, **declared))
    compared = {row.subject for row in certificate.rows if row.check == "reference" and row.verdict == "same"}
    if name == "masters":  # of a seed that was rounded
        certificate.rows = [row for row in certificate.rows if row.subject != "initial values"]
    assert different(certificate) == []
    assert "parameters after update 3" in compared
    certificate.check()


def test_a_skipped_update_of_a_scaler_is_shown_and_no_accusation() -> None:
    loop = Loop(scaled=True, skips=(1,))
    with zerobench.watch(loop.model, loop.optimizers[0], verify=True) as watch:
        for number in range(STEPS):
            loop.step(number, nothing)
    assert watch.certificate is not None
    shown = next(row for row in watch.certificate.rows if row.check == "scaling")
    assert shown.found == "factors 8, 8, 4; 1 of 3 updates skipped"
    assert different(watch.certificate) == []


# -- planted failures -------------------------------------------------------------------------------------


class Cast(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.bfloat16()


class LowMoments(torch.optim.Optimizer):
    """Momentum that is stored in bf16, whatever the parameters are."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            moment = self.state[p].setdefault("moment", torch.zeros_like(p, dtype=torch.bfloat16))
            moment.mul_(0.9).add_(p.grad)
            p.sub_(moment, alpha=1e-2)


def no_upcast(training: Training) -> None:
    """The model was loaded in bf16, and the upcast that should follow does nothing."""
    training.model.bfloat16()
    training.model.insert(0, Cast())


def some_masters(training: Training) -> None:
    """One layer's weights were replaced by bf16 copies."""
    training.model[3].bfloat16()
    training.model.insert(3, Cast())


def low_moments(training: Training) -> None:
    training.optimizer = LowMoments(training.model.parameters())


def another_optimizer(training: Training) -> None:
    """Matrices were meant for Muon, and fell to AdamW."""


def replaced_head(training: Training) -> None:
    """The optimizer has the parameters of the head before it was replaced."""
    training.model[3] = nn.Linear(32, 8)


def update_per_micro_batch(training: Training) -> None:
    training.micro = 3
    training.step = lambda step: [(training.loss(step, n).backward(), training.update()) for n in range(3)]  # type: ignore


def loss_not_divided(training: Training) -> None:
    training.micro = 3
    training.loss = lambda step, n: 3 * Training.loss(training, step, n)  # type: ignore[method-assign]


def no_clipping(training: Training) -> None:
    """The norm is computed, and its coefficient is never used."""


def cut_graph(training: Training) -> None:
    """An activation is detached: the first layer is never trained."""
    training.model[1].register_forward_hook(lambda _module, _inputs, output: output.detach())


ALL = "all 6 parameters"
PLANTED: dict[Callable[[Training], None], tuple[dict[str, Any], list[str]]] = {
    no_upcast: ({}, [f"dtypes: masters of {ALL}: bfloat16", f"dtypes: moments of {ALL}: bfloat16"]),
    some_masters: (
        {}, ["dtypes: masters of 4.weight, 4.bias: bfloat16", "dtypes: moments of 4.weight, 4.bias: bfloat16"]
    ),
    another_optimizer: (
        {"optimizer": {"?.weight": "Muon", "*": "AdamW"}},
        ["update: class of the optimizer of 0.weight, 2.weight, 3.weight: AdamW"],
    ),
    replaced_head: ({}, ["update: updates of 3.weight, 3.bias: in no optimizer"]),
    update_per_micro_batch: ({"accumulation": 3}, ["accumulation: micro-batches per update: 1"]),
    no_clipping: ({"clip": 0.05}, ["norm: after backward → at the update: "]),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_failure_is_named_without_a_reference(plant: Callable[[Training], None]) -> None:
    declared, expected = PLANTED[plant]
    training = Training()
    plant(training)
    found = different(training.certificate(ExpectedTraining(**declared)))
    assert len(found) == len(expected)
    assert all(line.startswith(beginning) for line, beginning in zip(found, expected, strict=True)), found


BY_REFERENCE: dict[Callable[[Training], None], str] = {
    low_moments: f"dtypes: moments of {ALL}: bfloat16",
    loss_not_divided: "reference: losses of 3 steps: ",
    cut_graph: "update: updates of 0.weight, 0.bias: no gradient",
}


@pytest.mark.slow
@pytest.mark.parametrize("plant", BY_REFERENCE, ids=lambda plant: plant.__name__)
def test_a_planted_failure_is_named_by_a_reference(plant: Callable[[Training], None], reference: Path) -> None:
    training = Training()
    plant(training)
    certificate = training.certificate(reference)
    assert different(certificate)[0].startswith(BY_REFERENCE[plant])
    with pytest.raises(CertificateError, match=f"differs in {len(certificate.different)}"):
        certificate.check()
    if plant is loss_not_divided:
        assert "the factor is the number of micro-batches" in certificate.different[0].why


@pytest.mark.slow
def test_a_parameter_that_two_optimizers_update_is_named() -> None:
    training = Training()
    other = torch.optim.SGD(training.model[3].parameters(), lr=1e-2)
    training.update = lambda: [one.step() for one in (other, training.optimizer)]  # type: ignore
    certificate = training.certificate(optimizers=[other, training.optimizer])
    assert different(certificate) == ["update: updates of 3.weight, 3.bias: 2 times per step"]


@pytest.mark.slow
def test_updates_that_differ_in_one_parameter_name_it(reference: Path) -> None:
    training = Training()
    groups = [list(training.model.parameters())[:-1], [training.model[3].bias]]
    training.optimizer = torch.optim.AdamW([{"params": groups[0]}, {"params": groups[1], "lr": 2e-2}], lr=1e-2)
    found = different(training.certificate(reference))
    words = "reference: parameters after update 1: 3.bias: off by at most 1.0e+00 of the movement"
    assert any(line.startswith(words) for line in found), found


@pytest.mark.slow
def test_an_option_that_changed_nothing_is_named() -> None:
    first = Training().certificate()
    ignored = Training().certificate(ExpectedTraining(unlike=first))
    words = "this option changed nothing: equal dtypes, bytes, collectives and losses"
    assert different(ignored) == [f"knob: effect of the option, against Sequential: {words}"]
    changed = Training(compute=torch.bfloat16).certificate(ExpectedTraining(unlike=first))
    assert changed.rows[-1].found.startswith("it changed dtypes that compute, ")
    assert different(changed) == []


# -- the certificate itself -------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_certificate_is_kept_and_changes_no_table_and_leaves_nothing(tmp_path: Path) -> None:
    before, plain, training = patched(), Training(), Training()
    with leave_out():
        certificate = training.certificate(to=tmp_path / "with")
    assert patched() == before
    with leave_out(), zerobench.watch(plain.model, plain.optimizer, to=tmp_path / "without") as watch:
        for step in range(STEPS):
            plain.step(step)
    assert watch.certificate is None
    assert all(torch.equal(*pair) for pair in zip(plain.model.parameters(), training.model.parameters(), strict=True))
    kept, other = zerobench.load(tmp_path / "with"), zerobench.load(tmp_path / "without")
    assert list(kept.certificate.found) == [row.found for row in certificate.rows]
    assert other.certificate.empty
    for name in ("peak_bytes", "growth_bytes", "max_optimizer_bytes", "max_temporary_bytes"):
        assert kept.runs[name].item() == other.runs[name].item(), name
    again = Certificate.read(tmp_path / "with")
    assert again.job == certificate.job
    assert str(certificate).startswith("same            dtypes: masters of all 6 parameters: float32; expected float32")
    with pytest.raises(FileNotFoundError, match="no certificate; watch a loop with verify=True"):
        zerobench.watch(plain.model, plain.optimizer, verify=tmp_path / "without")
    next((tmp_path / "with").glob("*/certificate.json")).write_text("{}")
    with pytest.raises(ValueError, match=r"certificate.json: it is no certificate of this version"):
        zerobench.watch(plain.model, plain.optimizer, verify=tmp_path / "with")
