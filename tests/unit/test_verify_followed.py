"""Loops that put values elsewhere, replace what they train, or call what a watch has hooked: they are followed, or the
certificate says that they are not, and the loop itself goes on.
"""

import io
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

import zerobench
from tests.unit.test_verify import Training, different, lines, named
from tests.unit.test_watch import alone  # noqa: F401  for each test
from zerobench.watching import observed

pytestmark = pytest.mark.slow


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


def large_eps(training: Training) -> None:
    training.optimizer = torch.optim.AdamW(training.model.parameters(), lr=1e-6, eps=1.0, weight_decay=0.0)


def projected(training: Training) -> None:
    training.update = lambda: [Training.update(training), projection(training.model[3])]  # type: ignore


def projection(layer: Any) -> None:
    layer.weight.data = nn.functional.normalize(layer.weight.data)


def probed(training: Training) -> None:
    """A backward after the update, whose gradients are dropped."""
    training.update = lambda: [Training.update(training), training.loss(9, 0).backward(), training.model.zero_grad()]  # type: ignore


def catches_up(training: Training) -> None:
    """A scheduler takes the steps of an earlier run before the first backward."""
    schedule, left = torch.optim.lr_scheduler.StepLR(training.optimizer, 100), [1, 1, 1]

    def resume(*_: Any) -> None:
        while left:
            left.pop()
            schedule.step()

    training.model[0].register_forward_pre_hook(resume)


HONEST = [by_assignment, outer, with_loss, large_eps, projected, probed, catches_up]


@pytest.mark.parametrize("change", HONEST)
@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step")
def test_an_honest_loop_gets_no_accusation(change: Callable[[Training], None]) -> None:
    training = Training()
    change(training)
    assert named(training.certificate(zerobench.ExpectedTraining(accumulation=1))) == []


def test_a_model_is_copied_saved_and_mapped_while_it_is_watched() -> None:
    training, file = Training(), io.BytesIO()
    with zerobench.watch(training.model, training.optimizer, verify=True) as watch:
        for step in range(3):
            copied = deepcopy(training.model)
            copied(torch.ones(1, 16))
            torch.save(training.model, file := io.BytesIO())
            training.step(step)
    assert different(watch.certificate) == []
    file.seek(0)
    assert torch.load(file, weights_only=False)(torch.ones(1, 16)).shape == (1, 8)


def test_gradients_of_samples_by_vmap_are_watched() -> None:
    training = Training()
    names = dict(training.model.named_parameters())

    def loss(values: Any, x: torch.Tensor) -> torch.Tensor:
        return functional_call(training.model, values, (x[None],)).square().mean()

    training.update = lambda: [vmap(grad(loss), (None, 0))(names, torch.ones(4, 16)), Training.update(training)]  # type: ignore
    assert different(training.certificate()) == []


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


def test_rates_that_groups_have_swapped_are_named() -> None:
    def certificate(rates: tuple[float, float], reference: Any = True) -> Any:
        training = Training()
        sides = [training.model[0].parameters(), training.model[3].parameters()]
        groups = [{"params": list(side), "lr": lr} for side, lr in zip(sides, rates, strict=True)]
        training.optimizer = torch.optim.SGD([*groups, {"params": training.model[2].parameters(), "lr": 1e-2}])
        return training.certificate(reference)

    rows = different(certificate((1e-3, 1e-2), certificate((1e-2, 1e-3))))
    assert {line.rpartition(": ")[0] for line in rows if "learning rates" in line} == {
        "reference: learning rates of 0.bias, 0.weight", "reference: learning rates of 3.bias, 3.weight"
    }  # fmt: skip


def test_a_parameter_that_is_replaced_is_unusual() -> None:
    training = Training()
    calls = iter(range(10))

    def update() -> None:
        Training.update(training)
        if next(calls) == 0:
            training.model.load_state_dict(training.model.state_dict(), assign=True)

    training.update = update  # type: ignore[method-assign]
    assert "another parameter has its name" in str(named(training.certificate()))


def test_gradients_that_each_micro_batch_zeroes_do_not_count() -> None:
    training = Training(micro=4)
    loss = training.loss

    def zeroed(step: int, number: int) -> torch.Tensor:
        training.optimizer.zero_grad()
        return loss(step, number)

    training.loss = zeroed  # type: ignore[method-assign]
    (line,) = different(training.certificate(zerobench.ExpectedTraining(accumulation=4)))
    assert line == "accumulation: micro-batches per update: 1"


def test_an_error_of_an_observation_reaches_no_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: torch.Tensor) -> int:
        raise ValueError("no bits")

    monkeypatch.setattr(observed, "checksum", fails)
    training = Training()
    assert lines(training.certificate().rows) == ["watch: the loop: not followed to its end"]


def test_a_checksum_sees_rows_and_columns_that_are_swapped() -> None:
    values = torch.randn(8, observed.COLUMNS)
    swapped = values[[1, 0, *range(2, 8)]]
    turned = values[:, [1, 0, *range(2, observed.COLUMNS)]]
    assert len({observed.checksum(tensor) for tensor in (values, swapped, turned, values.clone())}) == 3
    assert observed.checksum(torch.view_as_complex(values[:, :2].contiguous()).conj()) != 0


def test_a_model_that_has_no_hooks_or_no_shapes_is_refused() -> None:
    with pytest.raises(ValueError, match="a ScriptModule, which has no hooks"):
        zerobench.watch(torch.jit.script(nn.Linear(2, 2)))
    with pytest.raises(ValueError, match="parameter weight of a lazy module has no shape yet"):
        zerobench.watch(nn.LazyLinear(2))
