"""Certificates of loops in one process: honest loops get no accusation, and each planted failure is named.

Loops that put values elsewhere, or replace what they train, are followed, or the certificate says that they are not.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerobench
from tests.unit.test_watch import alone, patched  # noqa: F401  `alone`: for each test
from validation.certificates.command import RESULTS, CertificateOfLoop, Work, run_one
from validation.certificates.honest import HONEST
from validation.store import read
from zerobench import ExpectedTraining
from zerobench.records import CertificateRow
from zerobench.watching import Certificate, CertificateError, observed
from zerobench.watching.held_tensors import leave_out

STEPS = 3
RECORDED = read(Path(__file__).parents[2] / RESULTS / "planted.csv", CertificateOfLoop)
"""The rows of planted failures, as `make certificates` wrote them, all of one seed."""
SEED = RECORDED[0].seed

pytestmark = pytest.mark.slow


class Training:
    """A loop of plain torch over one model. `micro`: micro-batches of a batch; `compute`: the dtype of autocast."""

    def __init__(self, micro: int = 1, compute: Any = None) -> None:
        torch.manual_seed(0)
        self.model: Any = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.LayerNorm(32), nn.Linear(32, 8))
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.micro, self.compute = micro, compute

    def loss(self, step: int, number: int) -> torch.Tensor:
        x = torch.randn(12, 16, generator=torch.Generator().manual_seed(step)).chunk(self.micro)[number]
        with torch.autocast("cpu", self.compute, enabled=self.compute is not None):
            return self.model(x).float().square().mean() / self.micro

    def step(self, step: int) -> None:
        for number in range(self.micro):
            self.loss(step, number).backward()
        self.update()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def certificate(self, expected: Any = True, optimizers: Any = None, **how: Any) -> Certificate:
        with zerobench.watch(self.model, optimizers or self.optimizer, verify=expected, **how) as watch:
            for step in range(STEPS):
                self.step(step)
        return watch.certificate


def lines(rows: list[CertificateRow]) -> list[str]:
    return [f"{row.check}: {row.subject}: {row.found}" for row in rows]


def different(certificate: Certificate) -> list[str]:
    return lines(certificate.different)


def named(certificate: Certificate) -> list[str]:
    return lines(certificate.different + certificate.unusual)


def masked(training: Training) -> None:
    """The gradients of the first layer are set to 0 before the update, and nothing decays."""
    training.optimizer = torch.optim.SGD(training.model.parameters(), lr=1e-2)
    training.update = lambda: (training.model[0].weight.grad.zero_(), Training.update(training))  # type: ignore


class ByAssignment(torch.optim.Optimizer):
    """The update of a tutorial, which gives each parameter another tensor."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.data = parameter.data - 0.1 * parameter.grad


class Outer(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class OfLoss(torch.optim.SGD):
    """Its step gets the loss."""

    def step(self, loss: Any = None) -> Any:
        assert loss is None or loss.detach().isfinite()
        return super().step()


def by_assignment(training: Training) -> None:
    training.optimizer = ByAssignment(training.model.parameters(), lr=0.1)


def outer(training: Training) -> None:
    torch.optim.AdamW([torch.zeros(1, requires_grad=True)])  # torch hooks the step of each class that was made
    training.optimizer = Outer(training.model.parameters(), lr=1e-2)


def with_loss(training: Training) -> None:
    training.optimizer = OfLoss(training.model.parameters(), lr=1e-2)
    training.update = lambda: [training.optimizer.step(torch.ones(())), training.optimizer.zero_grad()]  # type: ignore


def projected(training: Training) -> None:
    training.update = lambda: [Training.update(training), projection(training.model[3])]  # type: ignore


def projection(layer: Any) -> None:
    layer.weight.data = nn.functional.normalize(layer.weight.data)


def catches_up(training: Training) -> None:
    """A scheduler takes the steps of an earlier run before the first backward."""
    schedule, left = torch.optim.lr_scheduler.StepLR(training.optimizer, 100), [1, 1, 1]

    def resume(*_: Any) -> None:
        while left:
            left.pop()
            schedule.step()

    training.model[0].register_forward_pre_hook(resume)


def changed(change: Callable[[Training], None]) -> Training:
    training = Training()
    change(training)
    return training


OF_THE_CORPUS = (
    "plain again", "four micro-batches", "clipped", "never clipped", "autocast", "masters", "zero1", "zero2", "zero3",
    "compiled model", "groups", "warm-up from zero", "frozen backbone", "tied", "dropout", "closure",
    "epochs of six micro-batches", "reentrant checkpoint", "sparse embedding", "trainer that accumulates",
)  # fmt: skip
"""Loops of validation/certificates; `make certificates` runs all of them."""

SHOWN = ("four micro-batches", "clipped", "masters", "zero3", "trainer that accumulates")
"""Those of every run; the others, of which each is another loop of the same checks, wait for `make test-all`."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of references, with that of the plain loop."""
    folder = tmp_path_factory.mktemp("corpus")
    run_one(Work("plain"), SEED, folder)
    return folder


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SHOWN else pytest.mark.thorough) for name in OF_THE_CORPUS]
)
def test_an_honest_loop_gets_no_accusation(name: str, corpus: Path) -> None:
    """Alone, and beside the loop that does the same training, or beside its own first run."""
    if name.startswith("trainer"):
        pytest.importorskip("accelerate")
    for reference in ("", HONEST[name].reference or name):
        row = run_one(Work(name, reference), SEED, corpus)
        assert row.kind in ("clean", "unusual"), row.rows
        assert row.same


ODD: dict[str, tuple[Callable[[Training], None], dict[str, Any]]] = {
    "masked gradients": (masked, {}),
    "update by assignment": (by_assignment, {"accumulation": 1}),
    "subclass of an optimizer": (outer, {"masters": torch.float32, "optimizer": Outer}),
    "step with a loss": (with_loss, {"accumulation": 1}),
    "projected weights": (projected, {"accumulation": 1}),
    "scheduler that catches up": (catches_up, {"accumulation": 1}),
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the plain loop's certificate."""
    folder = tmp_path_factory.mktemp("reference")
    Training().certificate(to=folder)
    return folder


@pytest.mark.shown(2)
@pytest.mark.parametrize("name", ODD)
@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step")
def test_an_odd_loop_gets_no_accusation(name: str) -> None:
    change, declared = ODD[name]
    certificate = changed(change).certificate(ExpectedTraining(reference=changed(change).certificate(), **declared))
    compared = {row.subject for row in certificate.rows if row.check == "reference" and row.verdict == "same"}
    assert different(certificate) == []
    assert "parameters after update 3" in compared
    certificate.check()


@pytest.mark.parametrize("seed", [pytest.param(6, marks=pytest.mark.thorough), 7])
def test_bf16_beside_an_fp32_transformer_gets_no_accusation(seed: int) -> None:
    """Rounding turns the sign of some small gradients, and Adam moves those elements the other way."""
    certificate: Any = True
    for compute in (None, torch.bfloat16):
        training = Training(compute=compute)
        torch.manual_seed(seed)
        training.model = nn.Sequential(nn.TransformerEncoderLayer(16, 2, 32, 0.0, norm_first=True), nn.Linear(16, 40))
        training.optimizer = torch.optim.AdamW(training.model.parameters(), lr=1e-3)
        certificate = training.certificate(certificate)
    assert different(certificate) == []


# -- planted failures -------------------------------------------------------------------------------------


PLANTED = (
    "masters that are not copied back", "moments in bf16", "update in each micro batch", "loss not divided",
    "masters in bf16", "some masters in bf16", "adamw in place of muon", "optimizer of a copy",
    "head replaced after the optimizer was made", "clipping left out", "activation detached",
)  # fmt: skip
"""Loops of validation/certificates, which says by which rows each is named."""


@pytest.mark.shown(4)
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_failure_is_named(name: str, corpus: Path) -> None:
    """By as many rows as when the corpus was recorded, and as surely: alone, and beside the loop that was meant."""
    for recorded in [row for row in RECORDED if row.loop == name]:
        if recorded.reference and not (corpus / "references" / recorded.reference).is_dir():
            run_one(Work(recorded.reference), SEED, corpus)
        row = run_one(Work(name, recorded.reference), SEED, corpus)
        assert row.wrongly_same == ""
        for figure in ("kind", "named_by", "different", "unusual"):
            assert getattr(row, figure) == getattr(recorded, figure), (figure, row.rows)
    assert name != "loss not divided" or "the factor is the number of micro-batches" in row.rows


def test_a_check_raises_for_what_differs_and_a_strict_one_for_what_is_unusual() -> None:
    training = Training()
    training.model[1].register_forward_hook(lambda _module, _inputs, output: output.detach())
    unusual, contradicted = training.certificate(), Training().certificate(ExpectedTraining(clip=0.05))
    assert named(unusual) == ["update: updates of 0.weight, 0.bias: no gradient"]
    unusual.check()
    with pytest.raises(CertificateError, match="different or unusual in 1"):
        unusual.check(strict=True)
    assert different(contradicted)[0].startswith("norm: after backward → at the update: ")
    with pytest.raises(CertificateError, match="differs in"):
        contradicted.check()


def test_a_parameter_that_two_optimizers_update_is_named() -> None:
    training = Training()
    other = torch.optim.SGD(training.model[3].parameters(), lr=1e-2)
    training.update = lambda: [other.step(), Training.update(training)]  # type: ignore
    certificate = training.certificate(optimizers=[other, training.optimizer])
    assert named(certificate) == ["update: updates of 3.weight, 3.bias: 2 updates with the same gradient"]


def test_updates_that_differ_in_one_parameter_name_it(reference: Path) -> None:
    training = Training()
    groups = [list(training.model.parameters())[:-1], [training.model[3].bias]]
    training.optimizer = torch.optim.AdamW([{"params": groups[0]}, {"params": groups[1], "lr": 2e-2}], lr=1e-2)
    found = different(training.certificate(reference))
    words = "reference: parameters after update 1: 3.bias: off by at most 1.0e+00 of the movement"
    assert any(line.startswith(words) for line in found), found


def test_an_option_that_changed_nothing_is_named() -> None:
    first = Training().certificate()
    ignored = Training().certificate(ExpectedTraining(unlike=first))
    words = "this option changed nothing: equal dtypes, bytes, collectives and losses"
    assert different(ignored) == [f"knob: effect of the option, against Sequential: {words}"]
    changed = Training(compute=torch.bfloat16).certificate(ExpectedTraining(unlike=first))
    assert changed.rows[-1].found.startswith("it changed dtypes that compute, ")
    assert different(changed) == []


# -- the certificate itself -------------------------------------------------------------------------------


def test_the_page_shows_a_real_certificate(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs/how-to/verify.md").read_text()
    script, printed = (page.split(f"```{kind}\n")[1].split("```")[0] for kind in ("python", "text"))
    exec(compile(script, "train.py", "exec"), {})
    assert capsys.readouterr().out == printed


def test_a_certificate_is_kept_and_changes_no_table_and_leaves_nothing(tmp_path: Path) -> None:
    before, plain, training = patched(), Training(), Training()
    with leave_out():
        certificate = training.certificate(to=tmp_path / "with", name="./" + "名" * 90)
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
    Training().certificate(tmp_path / "with", to=tmp_path / "with")  # newer, and without updates
    for name in ("updates.pt", "certificate.json"):
        for path in (tmp_path / "with").glob(f"*/{name}"):
            path.write_text("{}")
        with pytest.raises(ValueError, match=f"{name}: it is no certificate of this version"):
            zerobench.watch(plain.model, plain.optimizer, verify=tmp_path / "with")


def test_values_that_the_loop_has_put_elsewhere_are_checked() -> None:
    training = Training()
    calls = iter(range(10))

    def update() -> None:
        Training.update(training)
        weight = training.model[0].weight
        weight.data = weight.data * (float("nan") if next(calls) == 1 else 1.0)

    training.update = update  # type: ignore[method-assign]
    (line,) = different(training.certificate())
    assert line.startswith("finite: losses, gradients and parameters: not finite: parameters after step 3")


@pytest.mark.parametrize("layer", [0, pytest.param(3, marks=pytest.mark.thorough)])
def test_a_gradient_that_is_scaled_before_the_update_is_named_beside_a_reference(layer: int) -> None:
    """Adam hides it in the parameters."""
    first, scaled = Training().certificate(), Training()

    def update() -> None:
        scaled.model[layer].weight.grad.mul_(0.5)
        Training.update(scaled)

    scaled.update = update  # type: ignore[method-assign]
    rows = [line for line in different(scaled.certificate(first)) if line.startswith("reference: norms of gradients")]
    assert "at the update" in rows[0]
    assert f"{layer}.weight" in rows[0]


def test_a_parameter_that_is_replaced_is_unusual() -> None:
    training = Training()
    calls = iter(range(10))

    def update() -> None:
        Training.update(training)
        if next(calls) == 0:
            training.model.load_state_dict(training.model.state_dict(), assign=True)

    training.update = update  # type: ignore[method-assign]
    assert "another parameter has its name" in str(named(training.certificate()))


def test_an_error_of_an_observation_reaches_no_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: torch.Tensor) -> int:
        raise ValueError("no bits")

    monkeypatch.setattr(observed, "checksum", fails)
    training = Training()
    assert lines(training.certificate().rows) == ["watch: the loop: not followed to its end"]


def test_a_model_that_has_no_hooks_or_no_shapes_is_refused() -> None:
    with pytest.raises(ValueError, match="a ScriptModule, which has no hooks"):
        zerobench.watch(torch.jit.script(nn.Linear(2, 2)))
    with pytest.raises(ValueError, match="parameter weight of a lazy module has no shape yet"):
        zerobench.watch(nn.LazyLinear(2))
    with pytest.raises(ValueError, match="gradients='fp32' is no dtype"):
        ExpectedTraining(gradients="fp32")
