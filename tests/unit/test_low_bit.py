"""AdamW with states of fewer bits: their levels and rounding, their dtypes after a load, and all that is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerobench
from tests import zoo
from tests.cells import cell
from zerobench.config import schema_memory
from zerobench.config.schema_training import Adamw8bit, AdamwBf16
from zerobench.zero import NvmeOffload
from zerobench.zero.low_bit import LEVELS, MOMENTS, AdamW8bit, AdamWBf16, round_stochastically


def dynamic_map(signed: bool) -> list[float]:
    """As the authors of arXiv 2110.02861 make it (bitsandbytes, create_dynamic_map): means of linspace(0.1, 1)."""
    found = []
    for i in range(7):
        edges = torch.linspace(0.1, 1, (2**i if signed else 2 ** (i + 1)) + 1, dtype=torch.float64)
        found += ((edges[:-1] + edges[1:]) / 2 * 10 ** (i - 6)).tolist()
    return sorted([*found, *(-one for one in found if signed), 0.0, 1.0])


@pytest.mark.parametrize(("key", "signed"), [("exp_avg", True), ("exp_avg_sq", False)])
def test_levels_are_those_of_the_paper(key: str, signed: bool) -> None:
    assert len(LEVELS[key]) == 256
    assert LEVELS[key] == pytest.approx(dynamic_map(signed), rel=1e-9)


def trained(kind: type[torch.optim.Optimizer], steps: int = 30, **more: Any) -> tuple[nn.Parameter, Any]:
    """A parameter of 700 elements, the last block ragged, that follows fixed noisy gradients."""
    generator = torch.Generator().manual_seed(0)
    parameter = nn.Parameter(torch.randn(7, 100, generator=generator))
    optimizer = kind([parameter], lr=1e-2, **more)
    for _ in range(steps):
        parameter.grad = parameter.detach() + torch.randn(7, 100, generator=generator)
        optimizer.step()
    return parameter, optimizer


@pytest.mark.parametrize(("kind", "error"), [(AdamW8bit, 0.02), (AdamWBf16, 0.002)])
def test_updates_are_near_those_of_torch(kind: type[torch.optim.Optimizer], error: float) -> None:
    """The parameters move by about 0.3 per element; after one step, which reads no stored state, they are equal."""
    found, wanted = trained(kind)[0], trained(torch.optim.AdamW, foreach=False)[0]
    assert 0 < (found - wanted).square().mean().sqrt() < error
    assert torch.equal(trained(kind, 1)[0], trained(torch.optim.AdamW, 1, foreach=False)[0])


def test_an_element_without_gradients_for_long_is_not_thrown_out() -> None:
    """As a row of an embedding: its second moment is below the smallest level of a block with large ones."""
    parameter = nn.Parameter(torch.zeros(256))
    optimizer = AdamW8bit([parameter], lr=1e-3)
    for step in range(20):
        parameter.grad = torch.ones(256)
        parameter.grad[0] = 1e-4 if step == 0 else 0.0
        optimizer.step()
    assert parameter[0].abs() < 20 * 1e-3


def test_stochastic_rounding_has_the_value_as_its_mean() -> None:
    values = torch.tensor([1.001, -1.001, 3e-9, 0.0, float("inf"), -float("inf")])
    rounded = torch.stack([round_stochastically(values, salt) for salt in range(4000)])
    assert len(rounded[:, 0].unique()) == 2
    torch.testing.assert_close(rounded.double().mean(0)[:3], values.double()[:3], rtol=2e-4, atol=0)
    assert torch.equal(rounded[0, 3:].float(), values[3:])
    assert round_stochastically(torch.tensor([float("nan")]), 1).isnan().all()
    fractions = torch.rand(2**16, generator=torch.Generator().manual_seed(0)) + 1
    error = round_stochastically(fractions, 5).double() - fractions.double()
    assert error.mean().abs() < 4 * 2**-7 / 6**0.5 / 2**8, "four standard deviations over neighbors 2^-7 apart"


@pytest.mark.parametrize("kind", [AdamW8bit, AdamWBf16])
def test_states_keep_their_dtypes_in_a_state_dict(kind: type[Any]) -> None:
    parameter, first = trained(kind)
    second = kind([parameter], lr=1e-2)
    second.load_state_dict(first.state_dict())
    for key, dtype in kind.dtypes.items():
        assert second.state[parameter][key].dtype == dtype
        assert torch.equal(second.state[parameter][key], first.state[parameter][key])
    assert set(MOMENTS) < kind.dtypes.keys() or kind is AdamWBf16


@pytest.mark.parametrize(
    ("strategy", "more", "words"),
    [
        ("fsdp2", {"optimizer": Adamw8bit()}, "strategy=fsdp2 has no rule to cut its states; use strategy=ddp, zero1,"),
        ("zero_redundancy", {"optimizer": AdamwBf16()}, "strategy=zero_redundancy has no rule"),
        (
            "zero2",
            {"optimizer": Adamw8bit(), "offload": schema_memory.NvmeOffloadConfig()},
            "optimizer=adamw8bit: offload=nvme has files only for states of a parameter's size",
        ),
    ],
)
def test_what_cannot_keep_such_states_is_an_error_message(strategy: str, more: dict[str, Any], words: str) -> None:
    problems = cell(strategy, 2, **more).problems
    assert len(problems) == 1, problems
    assert words in problems[0]


def test_the_engine_refuses_files_and_the_optimizer_wrong_options(tmp_path: Path) -> None:
    model = zoo.build("tied")
    with pytest.raises(ValueError, match="files hold states of a parameter's size"):
        zerobench.initialize(model, AdamW8bit(model.parameters()), "zero2", offload=NvmeOffload(path=str(tmp_path)))
    for wrong in ({"lr": -1.0}, {"betas": (0.9, 1.0)}, {"foreach": True}):
        with pytest.raises(ValueError, match=f"AdamW8bit: {next(iter(wrong))} is out of range"):
            AdamW8bit(model.parameters(), **wrong)


def test_blocks_are_loaded_in_the_memory_order_that_they_were_saved_in_alone(tmp_path: Path) -> None:
    """Codes could be put in another order, but a block would then have elements of several."""

    def engine_of(order: torch.memory_format) -> Any:
        model = nn.Conv2d(4, 8, 3).to(memory_format=order)
        return zerobench.initialize(model, AdamW8bit(model.parameters()), "zero2")

    engine = engine_of(torch.channels_last)
    engine.backward(engine(torch.ones(1, 4, 3, 3)).sum())
    engine.step()
    engine.save(tmp_path / "saved")
    engine_of(torch.channels_last).load(tmp_path / "saved")
    with pytest.raises(
        (ValueError, RuntimeError), match="exp_avg_scale has blocks of elements in the parameter's memory"
    ):
        engine_of(torch.contiguous_format).load(tmp_path / "saved")
