"""Cells whose states leave the device; and updates that are late, beside a loop by hand."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests import zoo
from tests.cells import cell
from tests.distributed.variants import account
from zerobench.config.cell import CellConfig
from zerobench.config.schema import Measure
from zerobench.config.schema_memory import CpuOffload
from zerobench.config.schema_training import Bf16
from zerobench.predict.estimate import training_shapes
from zerobench.strategies import shape_of
from zerobench.theory.closed_forms import floor_bytes
from zerobench.theory.replay.states import Prediction, predict_states
from zerobench.worker import RankRecord
from zerobench.zero import Offload, initialize

N = 2
HALF = Bf16(tile_bytes=16 * 1024)

CELLS: dict[str, dict[str, Any]] = {
    "zero1 cpu": {"offload": CpuOffload()},
    "zero2 cpu": {"offload": CpuOffload()},
    "zero1 gradients stay": {"offload": CpuOffload(gradients=False)},
    "zero1 gradients alone": {"offload": CpuOffload(optimizer=False)},
}
"""The paper's rows, in bf16 with fp32 masters. All tiers against theory: test_links.py."""


@dataclass
class Measured:
    """A cell, and what its ranks brought home."""

    config: CellConfig
    records: list[RankRecord]

    @property
    def prediction(self) -> Prediction:
        config, schedule = self.config, self.records[0].schedule
        tiers = config.offload.theory_shape()
        return predict_states(shape_of(config.strategy.values()), schedule, N, *training_shapes(config), tiers=tiers)

    @property
    def floor_bytes(self) -> int:
        """The closed form of the states on the device."""
        config, shapes = self.config, self.records[0].schedule.shapes
        trained, tiers = training_shapes(config), config.offload.theory_shape()
        return floor_bytes(shape_of(config.strategy.values()), shapes, config.groups, *trained, tiers)

    @property
    def psi(self) -> int:
        return sum(shape.numel for shape in self.records[0].schedule.shapes)

    def most(self, tier: str, category: str) -> int:
        """Bytes of the fullest rank in a step."""
        rows = [m for record in self.records for m in record.memory if (m.phase, m.tier) == ("step", tier)]
        return max((m.max_bytes for m in rows if m.category == category), default=0)


def measure(folder: Path, cells: dict[str, dict[str, Any]]) -> dict[str, Measured]:
    """Accounted passes of one step, in one launch of ranks."""
    configs = {}
    for name, more in cells.items():
        options = {"bucket_bytes": 64 * 1024, "micro_batch": 1, "precision": HALF, **more}
        if options["precision"] is None:
            del options["precision"]
        one = cell(name.split()[0], N, **options)
        assert not one.problems, one.problems
        configs[name] = one.changed(measure=Measure(1, 2)).config
    records = account(list(configs.values()), folder)
    return {name: Measured(config, found) for (name, config), found in zip(configs.items(), records, strict=True)}


DELAYED_AFTER, STEPS, MOST, RATE = 3, 9, 0.1, 1e-2


def rate(step: int) -> float:
    return RATE * 0.9**step


def late(rank: int, n: int, strategy: str) -> list[float]:
    """Losses under the engine, with clipping and a scheduler."""
    model = zoo.build("tied")
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    engine = initialize(
        model, optimizer, strategy, bucket_bytes=4096, tile_bytes=4096,
        offload=Offload(delayed_after=DELAYED_AFTER),
    )  # fmt: skip
    losses = []
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = rate(step)
        loss = engine(*zoo.tokens(rank, n, step))
        engine.backward(loss)
        engine.clip_grad_norm_(MOST)
        engine.step()
        losses.append(loss.item())
    return losses


def late_by_hand(rank: int, n: int, delayed_after: int = DELAYED_AFTER) -> list[float]:
    """Trains in plain torch: from `delayed_after` steps on the gradients of one step are used after the next."""
    model = zoo.build("tied")
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    parameters, waiting, losses = list(model.parameters()), None, []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(*zoo.tokens(rank, n, step))
        loss.backward()
        losses.append(loss.item())
        gradients = [p.grad / n for p in parameters]
        for gradient in gradients:
            dist.all_reduce(gradient)
        norm = sum(g.double().square().sum() for g in gradients).sqrt()
        present = [g.mul_(torch.clamp(MOST / (norm + 1e-6), max=1.0)) for g in gradients], rate(step)
        if step < delayed_after:
            due = present
        else:
            due, waiting = waiting, present
        if due is not None:
            for parameter, gradient in zip(parameters, due[0], strict=True):
                parameter.grad = gradient
            optimizer.param_groups[0]["lr"] = due[1]
            optimizer.step()
    return losses


def compare_late(rank: int, n: int) -> dict[str, list[float]]:
    found = {strategy: late(rank, n, strategy) for strategy in ("zero1", "zero2", "zero3")}
    return found | {"by hand": late_by_hand(rank, n), "never late": late_by_hand(rank, n, delayed_after=STEPS)}
