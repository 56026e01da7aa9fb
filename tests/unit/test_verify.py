"""Certificates of loops in one process: honest loops get no accusation, and each planted failure is named.

Loops that put values elsewhere, or replace what they train, are followed, or the certificate says that they are not.
"""

from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint

import zerobench
from tests.unit.test_watch import Loop, Tokens, alone, nothing, patched, tiny  # noqa: F401  `alone`: for each test
from zerobench import ExpectedTraining
from zerobench.records import CertificateRow
from zerobench.watching import Certificate, CertificateError, observed
from zerobench.watching.held_tensors import leave_out

STEPS = 3
pytestmark = pytest.mark.slow


class Training:
    """A loop of plain torch over one model, and its variants: `micro`: micro-batches of a batch; `stage`: of our
    engine; `masters`: the model is in bf16, and the optimizer updates fp32 copies, which are rounded into it.
    """

    def __init__(
        self, micro: int = 1, clip: float | None = None, compute: Any = None, stage: str = "", masters: bool = False,
        compiles: bool = False,
    ) -> None:  # fmt: skip
        torch.manual_seed(0)
        self.model: Any = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.LayerNorm(32), nn.Linear(32, 8))
        self.masters = [p.detach().clone().requires_grad_() for p in self.model.parameters() if masters]
        self.model = self.model.bfloat16() if masters else self.model
        self.optimizer: Any = torch.optim.AdamW(self.masters or self.model.parameters(), lr=1e-2)
        if compiles:
            self.model.compile(backend="aot_eager")
        if stage:
            self.model = self.optimizer = zerobench.initialize(self.model, self.optimizer, strategy=stage)
        self.micro, self.clip, self.compute = micro, clip, torch.bfloat16 if masters else compute

    def loss(self, step: int, number: int) -> torch.Tensor:
        x = torch.randn(12, 16, generator=torch.Generator().manual_seed(step)).chunk(self.micro)[number]
        with torch.autocast("cpu", self.compute, enabled=self.compute is not None):
            return self.model(x).float().square().mean() / self.micro

    def step(self, step: int) -> None:
        for number in range(self.micro):
            (self.model if self.model is self.optimizer else torch.autograd).backward(self.loss(step, number))
        if self.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.update()

    def update(self) -> None:
        for master, parameter in zip(self.masters, self.model.parameters(), strict=bool(self.masters)):
            master.grad, parameter.grad = parameter.grad.float(), None
        self.optimizer.step()
        self.optimizer.zero_grad()
        for master, parameter in zip(self.masters, self.model.parameters(), strict=bool(self.masters)):
            parameter.data.copy_(master)

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


def groups(training: Training) -> None:
    """Weight decay of matrices alone, as most recipes have it, and a schedule that begins at a learning rate of 0."""
    sides = [[p for p in training.model.parameters() if (p.dim() > 1) == decays] for decays in (True, False)]
    both = [{"params": sides[0], "weight_decay": 0.1}, {"params": sides[1], "weight_decay": 0.0}]
    training.optimizer = torch.optim.AdamW(both, lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(training.optimizer, lambda step: step / 3)
    training.update = lambda: (Training.update(training), schedule.step())  # type: ignore[method-assign, assignment]


def frozen_and_tied(training: Training) -> None:
    """The first layer is frozen, and a further one has the last layer's matrix."""
    training.model[0].requires_grad_(False)
    training.model.extend([nn.Tanh(), nn.Linear(8, 32, bias=False), nn.Linear(32, 8)])
    training.model[6].weight = training.model[3].weight
    training.optimizer = torch.optim.AdamW(training.model.parameters(), lr=1e-2)


def dropout(training: Training) -> None:
    training.model.insert(2, nn.Dropout(0.3))
    training.model.register_forward_pre_hook(lambda *_: torch.manual_seed(1) and None)


def end_of_epoch(training: Training) -> None:
    """The second update has one micro-batch of fewer samples."""
    training.micro = 3
    usual = partial(Training.step, training)
    training.step = lambda step: usual(step) if step != 1 else (training.loss(9, 2).backward(), training.update())  # type: ignore


def closure(training: Training) -> None:
    """The optimizer calls what makes gradients, and clips them."""

    def step(number: int) -> None:
        def again() -> torch.Tensor:
            training.optimizer.zero_grad()
            (loss := training.loss(number, 0)).backward()
            torch.nn.utils.clip_grad_norm_(training.model.parameters(), 0.05)
            return loss

        training.optimizer.step(again)

    training.step = step  # type: ignore[method-assign]


def masked(training: Training) -> None:
    """The gradients of the first layer are set to 0 before the update, and nothing decays."""
    training.optimizer = torch.optim.SGD(training.model.parameters(), lr=1e-2)
    training.update = lambda: (training.model[0].weight.grad.zero_(), Training.update(training))  # type: ignore


def reentrant(training: Training) -> None:
    """Backward contains another backward."""
    model = training.model.forward
    training.model.forward = lambda x: checkpoint(model, x.requires_grad_(), use_reentrant=True)


def sparse(training: Training) -> None:
    training.model[0].table = nn.Embedding(8, 32, sparse=True)
    training.model[0].register_forward_hook(lambda layer, _, out: out + layer.table(torch.arange(len(out)) % 8))
    training.optimizer = torch.optim.SGD(training.model.parameters(), lr=1e-2)


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


HONEST: dict[str, tuple[Callable[[], Training], dict[str, Any]]] = {
    "plain": (Training, {"accumulation": 1}),
    "accumulation": (lambda: Training(micro=3), {"accumulation": 3}),
    "clipping": (lambda: Training(clip=0.05), {"clip": 0.05}),
    "no clipping needed": (lambda: Training(clip=50.0), {"clip": 50.0}),
    "autocast": (lambda: Training(compute=torch.bfloat16), {"computes": "bfloat16"}),
    "masters": (lambda: Training(masters=True), {"masters": "float32", "computes": "bfloat16"}),
    **{stage: (partial(Training, stage=stage), {"optimizer": "AdamW"}) for stage in ("zero1", "zero2", "zero3")},
    "compile": (lambda: Training(compiles=True), {}),
    "groups and schedule": (partial(changed, groups), {"optimizer": "AdamW"}),
    "frozen and tied": (partial(changed, frozen_and_tied), {}),
    "dropout": (partial(changed, dropout), {}),
    "end of an epoch": (partial(changed, end_of_epoch), {"accumulation": 3}),
    "closure": (partial(changed, closure), {"clip": 0.05, "accumulation": 1}),
    "masked gradients": (partial(changed, masked), {}),
    "reentrant checkpoint": (partial(changed, reentrant), {"accumulation": 1}),
    "sparse gradients": (partial(changed, sparse), {}),
    "update by assignment": (partial(changed, by_assignment), {"accumulation": 1}),
    "subclass of an optimizer": (partial(changed, outer), {"accumulation": 1}),
    "step with a loss": (partial(changed, with_loss), {"accumulation": 1}),
    "projected weights": (partial(changed, projected), {"accumulation": 1}),
    "scheduler that catches up": (partial(changed, catches_up), {"accumulation": 1}),
}


ONLY_IN_ALL = (
    "zero1", "zero2", "compile", "no clipping needed", "dropout", "masked gradients", "sparse gradients",
    "update by assignment", "subclass of an optimizer", "step with a loss",
)  # fmt: skip
"""Honest loops that only `make test-all` runs."""


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the plain loop's certificate."""
    folder = tmp_path_factory.mktemp("reference")
    Training().certificate(to=folder)
    return folder


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.thorough if name in ONLY_IN_ALL else ()) for name in HONEST]
)
@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step")
def test_an_honest_loop_gets_no_accusation(name: str, reference: Path) -> None:
    build, declared = HONEST[name]
    training = build()
    is_other = training.clip or getattr(build, "func", None) is changed  # another training, of plain torch, too
    theirs = training.certificate() if is_other else reference
    certificate = build().certificate(ExpectedTraining(reference=theirs, **declared))
    compared = {row.subject for row in certificate.rows if row.check == "reference" and row.verdict == "same"}
    assert different(certificate) == []
    assert "parameters after update 3" in compared
    certificate.check()


@pytest.mark.parametrize("seed", [6, 7])
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


def no_upcast(training: Training, first: int = 0) -> None:
    """Layers from the first on were loaded in bf16, and the upcast that should follow does nothing."""
    training.model[first:].bfloat16()
    training.model[first].register_forward_pre_hook(lambda _module, inputs: inputs[0].bfloat16())


def low_moments(training: Training) -> None:
    """The optimizer's states are stored in bf16, whatever the parameters are."""

    def cast(optimizer: Any, *_: object) -> None:
        for state in optimizer.state.values():
            state["momentum_buffer"] = state["momentum_buffer"].bfloat16()

    training.optimizer = torch.optim.SGD(training.model.parameters(), lr=1e-2, momentum=0.9, foreach=False)
    training.optimizer.register_step_post_hook(cast)


def update_per_micro_batch(training: Training) -> None:
    training.micro = 3
    training.step = lambda step: [(training.loss(step, n).backward(), training.update()) for n in range(3)]  # type: ignore


def loss_not_divided(training: Training) -> None:
    training.micro = 3
    training.loss = lambda step, n: 3 * Training.loss(training, step, n)  # type: ignore[method-assign]


def cut_graph(training: Training) -> None:
    """An activation is detached: the first layer is never trained."""
    training.model[1].register_forward_hook(lambda _module, _inputs, output: output.detach())


ALL = "all 6 parameters"
PLANTED: dict[str, tuple[Callable[[Training], Any], dict[str, Any], list[str]]] = {
    "no upcast": (no_upcast, {}, [f"dtypes: masters of {ALL}: bfloat16", f"dtypes: moments of {ALL}: bfloat16"]),
    "no upcast, declared": (no_upcast, {"masters": "float32"}, [f"dtypes: masters of {ALL}: bfloat16"]),
    "some masters": (
        partial(no_upcast, first=3), {},
        ["dtypes: masters of 3.weight, 3.bias: bfloat16", "dtypes: moments of 3.weight, 3.bias: bfloat16"],
    ),
    "low moments": (low_moments, {}, [f"dtypes: moments of {ALL}: bfloat16"]),
    "AdamW for Muon": (
        lambda _: None, {"optimizer": {"?.weight": "Muon", "*": "AdamW"}},
        ["update: class of the optimizer of 0.weight, 2.weight, 3.weight: AdamW"],
    ),
    "optimizer of a copy": (
        lambda one: setattr(one, "optimizer", torch.optim.AdamW(deepcopy(one.model).parameters(), lr=1e-2)), {},
        [f"update: updates of {ALL}: no gradient in the optimizer"],
    ),
    "replaced head": (
        lambda one: one.model.__setitem__(3, nn.Linear(32, 8)), {},
        ["update: updates of 3.weight, 3.bias: no gradient in the optimizer"],
    ),
    "an update per micro-batch": (
        update_per_micro_batch, {"accumulation": 3}, ["accumulation: micro-batches per update: 1"]
    ),
    "no clipping": (lambda _: None, {"clip": 0.05}, ["norm: after backward → at the update: "]),
    "loss not divided": (loss_not_divided, {}, ["reference: losses of 3 steps: "]),
    "cut graph": (cut_graph, {}, ["update: updates of 0.weight, 0.bias: no gradient"]),
}  # fmt: skip
BY_REFERENCE = ("loss not divided", "cut graph")
CONTRADICTIONS = ("optimizer of a copy", "replaced head")
"""Failures that contradict an invariant, without a declaration or a reference."""


@pytest.mark.shown(7)
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_failure_is_named(name: str, reference: Path) -> None:
    plant, declared, expected = PLANTED[name]
    training, by_reference = Training(), {"reference": reference} if name in BY_REFERENCE else {}
    plant(training)
    certificate = training.certificate(ExpectedTraining(**declared, **by_reference))
    found, contradicts = named(certificate), bool(certificate.different)
    assert contradicts == bool(declared or by_reference or name in CONTRADICTIONS)
    assert all(line.startswith(beginning) for line, beginning in zip(found, expected, strict=False)), found
    with pytest.raises(CertificateError, match=f"different or unusual in {len(found)}"):
        certificate.check(strict=True)
    with pytest.raises(CertificateError, match="differs in") if contradicts else nullcontext():
        certificate.check()
    if plant is loss_not_divided:
        assert "the factor is the number of micro-batches" in certificate.different[0].why


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


@pytest.mark.filterwarnings("default")  # of transformers
def test_a_trainer_gets_no_accusation(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    expected = ExpectedTraining(accumulation=2, clip=1.0, optimizer="AdamW")
    callback = zerobench.trainer_callback(verify=expected)
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, max_steps=3, gradient_accumulation_steps=2, report_to=[],
        per_device_train_batch_size=2, save_strategy="no", logging_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    transformers.Trainer(tiny(), arguments, train_dataset=Tokens(), callbacks=[callback]).train()
    assert different(callback.watch.certificate) == []
    assert "clipping acted in 1 of 3 steps" in str(callback.watch.certificate)


def test_the_page_shows_a_real_certificate(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs/how-to/verify.md").read_text()
    script, printed = (page.split(f"```{kind}\n")[1].split("```")[0] for kind in ("python", "text"))
    exec(compile(script, "train.py", "exec"), {})
    assert capsys.readouterr().out == printed


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


@pytest.mark.parametrize("layer", [0, 3])
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
