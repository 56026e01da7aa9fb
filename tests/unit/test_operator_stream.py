"""The stream of operators of an executed step: what computes is there once, with its FLOPs, bytes and stream."""

import math
from typing import Any

import pytest
import torch

from zerobench.commands.estimate.command import ask
from zerobench.commands.predict import costs_of
from zerobench.fake_execution import Execution
from zerobench.fake_execution.execute import execute
from zerobench.predict.flops import step_flops
from zerobench.probes.operator_stream import FORMULAS, GROUPED, _sizes
from zerobench.records import EventRow
from zerobench.timing import prediction
from zerobench.timing.costs import numbers

MODEL = ("model=gpt", "model.layers=2", "model.hidden=64", "model.heads=2", "model.vocabulary=128", "sequence=32")


def executed(strategy: str, *words: str, device: str = "cuda") -> Execution:
    attention = "flash" if device == "cuda" else None
    question = ask([*MODEL, f"strategy={strategy}", "precision=bf16", "world_size=4", *words], device, attention)
    found = execute(question.cells[0].config, target=question.target, operators=True)
    assert not found.problem
    return found


SCORES_AGAIN = 2 * (2 * 4 * 2 * 32 * 32 * 32)
"""FLOPs of the scores that flash attention computes again in backward, in two blocks; the model's count has none."""


def computed(found: Execution) -> list[EventRow]:
    return [event for event in found.known.events if event.kind == "compute"]


@pytest.mark.parametrize(("strategy", "device"), [("ddp", "cuda"), ("zero3", "cuda"), ("ddp", "cpu")])
def test_flops_of_the_operators_are_those_of_the_model(strategy: str, device: str) -> None:
    found = executed(strategy, device=device)
    flops = step_flops(found.config)
    assert sum(event.flops for event in computed(found)) == flops.model + SCORES_AGAIN


def test_experts_have_the_flops_of_the_rows_that_they_are_given() -> None:
    shape = ("layers=1", "hidden=64", "heads=2", "vocabulary=128")
    words = ["model=huggingface", "huggingface.architecture=mixtral", *(f"huggingface.{one}" for one in shape)]
    question = ask([*words, "strategy=ddp", "precision=bf16", "world_size=4", "sequence=32"], "cuda")
    found = execute(question.cells[0].config, target=question.target, operators=True)
    products = [event for event in computed(found) if event.operator == "_grouped_mm"]
    rows, weights = 4 * 32 * 2, 3 * 64 * 256  # two of 8 experts a token, three matrices an expert
    assert sum(event.flops for event in products) == 3 * 2 * rows * weights, "forward, and both factors in backward"
    assert products[0].sizes == f"8x{rows // 8}x512x64"
    assert products[0].dtype == "bfloat16"


@pytest.mark.parametrize(
    ("left", "right", "made", "sizes"),
    [
        ((24, 5), (3, 5, 7), (24, 7), "3x8x7x5"),
        ((3, 4, 5), (5, 24), (4, 24), "3x4x8x5"),
        ((4, 24), (24, 7), (3, 4, 7), "3x4x7x8"),
        ((3, 4, 5), (3, 5, 7), (3, 4, 7), "3x4x7x5"),
    ],
)
@pytest.mark.parametrize("packet", GROUPED)
def test_a_grouped_product_is_as_many_products(packet: Any, left: Any, right: Any, made: Any, sizes: str) -> None:
    *factors, out = (torch.empty(shape, device="meta") for shape in (left, right, made))
    assert _sizes(packet, factors, out) == sizes
    assert FORMULAS[packet](left, right, offs=None, out_shape=made) == 2 * math.prod(numbers(sizes))


def test_recomputing_is_in_the_stream() -> None:
    found = executed("zero3", "activation=checkpoint")
    flops = step_flops(found.config)
    assert flops.hardware > flops.model
    assert sum(event.flops for event in computed(found)) == flops.hardware + SCORES_AGAIN


def test_a_product_has_its_shape_and_reads_its_factors_once() -> None:
    tokens = 4 * 32
    found = [event for event in computed(executed("ddp")) if event.sizes == f"1x{tokens}x256x64"]
    forward = [event for event in found if event.phase == "forward"]
    assert len(forward) == 2, "one in each block"
    assert forward[0].flops == 2 * tokens * 256 * 64
    assert forward[0].bytes == 2 * (tokens * 64 + 64 * 256 + tokens * 256 + 256)


def test_collectives_are_on_streams_of_their_own_and_wait_for_what_they_send() -> None:
    events = executed("zero3").known.events
    launches = [event for event in events if event.kind == "launch" and not event.control]
    assert all(launch.stream for launch in launches)
    order = [event for event in events if event.kind == "order" and event.operator == "wait"]
    waiting = {event.stream for event in order if event.elements == 0}
    assert {launch.stream for launch in launches} <= waiting, "each waits for the model's stream"


def test_the_stream_changes_no_byte() -> None:
    question = ask([*MODEL, "strategy=zero2", "precision=bf16", "world_size=4"], "cuda", "flash")
    config = question.cells[0].config
    plain, streamed = (execute(config, target=question.target, operators=one) for one in (False, True))
    assert plain.at_peak == streamed.at_peak
    assert plain.wire_bytes == streamed.wire_bytes
    assert not plain.known.events


def test_what_stands_for_other_ranks_is_no_work() -> None:
    names = [event.operator for event in computed(executed("zero3")) if event.phase == "forward"]
    assert "zero_" not in names, "a simulated gather fills the others' slices"


def test_the_reducer_of_ddp_waits_at_the_end_of_the_backward() -> None:
    events = executed("ddp").known.events
    assert any(event.kind == "launch" and event.operator == "allreduce_" for event in events)
    assert not any(event.kind == "wait" for event in events), "C++ waits, at the end"


def whole_and_reduced(monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[float, float]:
    """Seconds of a step that is executed whole, and of the same that is executed in part."""
    question = ask([*MODEL, "precision=bf16", "world_size=8", *words], "cuda", "flash")
    config = question.cells[0].config
    costs = costs_of("a100-80gb-1600", None)
    part = prediction.reduced(config)
    monkeypatch.setattr(prediction, "MODEL_LAYERS", (4, 64))
    monkeypatch.setattr(prediction, "MOST_MICRO_BATCHES", 64)
    whole = prediction.reduced(config)
    assert whole.configs == (config,) != part.configs
    schedules = prediction.execute_schedules("schedules", [whole, part], question.target, 1)
    both = [prediction.step_time(schedule, costs) for schedule in schedules]
    assert both[0].exposed_s == pytest.approx(both[1].exposed_s, rel=0.01, abs=1e-6)
    assert both[0].compute_s == pytest.approx(both[1].compute_s, rel=0.01)
    return both[0].step_s, both[1].step_s


@pytest.mark.shown(2)
@pytest.mark.parametrize(
    "words",
    [
        ("strategy=zero3", "model.layers=11", "accumulation=4"),
        ("strategy=zero1", "model.layers=14", "model.hidden=1024", "model.heads=8", "world_size=64"),
        ("strategy=zero2", "model.layers=14", "model.hidden=1024", "model.heads=8", "world_size=64"),
    ],
)
def test_a_step_that_is_executed_in_part_takes_as_long(monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]) -> None:
    whole, part = whole_and_reduced(monkeypatch, *words)
    assert part == pytest.approx(whole, rel=0.01)
