"""`zerobench codes`: what ZeRO++'s codes change of a model's weights and gradients, by tensor, in one process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from .. import strategies
from ..config.cell import CellConfig
from ..config.compose import RefusedError, compose_cells
from ..config.zeropp import PartsOfZeropp
from ..data import build_batches
from ..host.environment import seed_everything
from ..host.terminal import stdout_console
from ..models.contract import loss_of
from ..predict.build import build_model
from ..results.grid import Grid
from ..results.options import Parser
from ..sizes import printable
from ..zero.comm.quantization_error import Error, exchanged, gathered
from ..zero.comm.quantize import Codec


@dataclass(frozen=True)
class CodeRow:
    """One tensor. `what`: weights (int8, gathered) or gradients (int4, exchanged); the rest is Error's."""

    what: str
    name: str
    numel: int
    snr_db: float
    bias: float
    largest: float


def codes(arguments: list[str]) -> int:
    """The verb. Returns the exit code: 0, or 2 where the command was wrong."""
    parser = Parser(
        prog="zerobench codes",
        usage="%(prog)s [-h] [--steps STEPS] [--out OUT] [KEY=VALUE ...]",
        description="Signal-to-noise and bias of qwZ's weights and qgZ's gradients, after some steps of training.",
        epilog="KEY=VALUE: the cell, as for a run, for example model=gpt_tiny precision=bf16.",
    )
    parser.add_argument("--steps", type=int, default=20, help="of training before (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="a csv file")
    chosen, overrides = parser.parse_known_args(arguments)
    try:
        cells = compose_cells(["strategy=zero3", "zeropp=all", "world_size=4", "node_size=2", "device=cpu", *overrides])
        problems = [problem for cell in cells for problem in cell.problems]
        if problems or len(cells) != 1 or chosen.steps < 1:
            raise RefusedError(problems or ["codes: it wants one cell, and a step at least"])
    except RefusedError as refused:
        for problem in refused.problems:
            print(printable(f"zerobench: {problem}"), file=sys.stderr)
        return 2
    rows = measure_codes(cells[0].config, chosen.steps)
    if chosen.out is not None:
        chosen.out.parent.mkdir(parents=True, exist_ok=True)
        pd.DataFrame(map(asdict, rows)).to_csv(chosen.out, index=False)
    shown = [[r.what, r.name, f"{r.numel:,}", f"{r.snr_db:.1f}", f"{r.bias:+.1e}", f"{r.largest:.1e}"] for r in rows]
    header = ["what", "tensor", "elements", "signal to noise dB", "mean error / mean |x|", "largest error / largest"]
    stdout_console().print(Grid(header, shown, left=2))
    return 0


def measure_codes(config: CellConfig, steps: int) -> list[CodeRow]:
    """A row for each trainable tensor's weights, and one for its gradients, both as N ranks of the cell have them."""
    seed_everything(config.seed)
    ranks, node_size, section = config.world_size, config.node_size or config.world_size, config.zeropp
    assert isinstance(section, PartsOfZeropp)
    model = build_model(config)
    options = config.precision.engine_options(config)
    optimizer = config.optimizer.build(model.parameters())
    engine: Any = strategies.wrap(config.strategy.values(), model, optimizer, **options)
    batches = [build_batches(config.batching, rank, torch.device("cpu")) for rank in range(ranks)]
    for step in range(steps):
        for one in batches:
            engine.backward(loss_of(engine, one.batch(step, 0), config.called) / ranks)
        engine.step()
    brought: list[dict[Any, torch.Tensor]] = []
    for one in batches:
        engine.backward(loss_of(engine, one.batch(steps, 0), config.called) / ranks)
        brought.append({unit: unit.gradients.full.detach().clone() for unit in engine.units})
        engine.zero_grad()
    rows: list[CodeRow] = []
    with torch.no_grad():
        for unit in engine.units:
            layout = replace(unit.layout, world_size=ranks)  # the same pieces in the slices of N ranks
            weights = _padded(unit.full_parameters, layout.padded_numel)
            coded = gathered(weights, ranks, Codec(8, section.weight_block))
            rows += _rows("weights", engine, layout, weights, coded)
            mine = torch.stack([_padded(one[unit], layout.padded_numel).to(unit.dtypes.wire) for one in brought])
            mean = exchanged(mine, node_size, Codec(4, section.gradient_block))
            rows += _rows("gradients", engine, layout, mine.double().sum(0), mean)
    return sorted(rows, key=lambda row: row.what, reverse=True)


def _padded(flat: torch.Tensor, numel: int) -> torch.Tensor:
    """`flat` less its own padding, which N ranks may have more of, or less."""
    whole = flat.new_zeros(numel)
    kept = min(numel, flat.numel())
    whole[:kept] = flat[:kept]
    return whole


def _rows(what: str, engine: Any, layout: Any, exact: torch.Tensor, coded: torch.Tensor) -> Iterator[CodeRow]:
    for piece in layout.pieces:
        there = slice(piece.offset, piece.offset + piece.numel)
        error = Error.of(exact[there], coded[there])
        yield CodeRow(what, engine.names[piece.parameter], piece.numel, **asdict(error))
