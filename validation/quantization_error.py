"""The error of ZeRO++'s quantization in weights and gradients, tensor by tensor, after some steps of training.

Signal-to-noise and bias of qwZ's weights as N ranks use them and of qgZ's mean gradients, in one process. Nothing is
communicated: the arithmetic is that of zero/comm/zeropp.py, block by block and in its order, which a test compares bit
for bit with a real exchange.

    python -m validation codes --steps 50 model=gpt_tiny precision=bf16
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from zerobench import strategies
from zerobench.config.cell import CellConfig
from zerobench.config.compose import RefusedError, compose_cells
from zerobench.config.schema_memory import PartsOfZeropp
from zerobench.data import build_batches
from zerobench.host.environment import seed_everything
from zerobench.host.terminal import stdout_console
from zerobench.models.contract import loss_of
from zerobench.predict.build import build_model
from zerobench.results.grid import Grid
from zerobench.zero.comm.quantize import Codec

from .store import write

CELL = ("strategy=zero3", "zeropp=all", "world_size=4", "node_size=2", "device=cpu")


@dataclass(frozen=True)
class QuantizationError:
    """The quantization error of one tensor.

    `snr_db`: 10 · log10(sum of x² / sum of errors²), infinite without errors. `bias`: the mean error over the mean of
    |x|. `largest`: the largest error over the largest |x|.
    """

    snr_db: float
    bias: float
    largest: float

    @staticmethod
    def of(exact: torch.Tensor, coded: torch.Tensor) -> QuantizationError:
        """Compares two tensors of one shape; sums in fp64."""
        x, off = exact.double(), coded.double() - exact.double()
        signal, noise = x.square().sum().item(), off.square().sum().item()
        snr = math.inf if noise == 0 else 10 * math.log10(signal / noise) if signal else -math.inf
        most, mean = x.abs().max().item(), x.abs().mean().item()
        return QuantizationError(
            snr, off.mean().item() / mean if mean else 0.0, off.abs().max().item() / most if most else 0.0
        )


def through(codec: Codec, slices: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Quantizes `slices`, (rows, numel), and returns them dequantized to `dtype`."""
    payloads = slices.new_empty(len(slices), codec.payload_bytes(slices.shape[1]), dtype=torch.uint8)
    codec.encode(slices, payloads)
    decoded = torch.empty_like(slices, dtype=dtype)
    codec.decode(payloads, decoded)
    return decoded


def gathered(full: torch.Tensor, ranks: int, codec: Codec) -> torch.Tensor:
    """Returns `full`, (N · shard_numel,), after qwZ's quantized gather."""
    return through(codec, full.view(ranks, -1), full.dtype).view(-1)


def exchanged(brought: torch.Tensor, node_size: int, codec: Codec) -> torch.Tensor:
    """Returns qgZ's reduce-scatter of N ranks' gradients, (N, numel): the sum, (numel,), in their dtype."""
    ranks = len(brought)
    sums = torch.stack([_hop(node, codec) for node in brought.view(ranks // node_size, node_size, -1)])
    if node_size == 1:
        sums = brought
    if ranks > node_size:  # local rank l's block, in which each node has a slice
        blocks = sums.view(ranks // node_size, node_size, -1).unbind(1)
        sums = torch.stack([_hop(block, codec) for block in blocks])
    return sums.reshape(-1).to(brought.dtype)


def _hop(rows: torch.Tensor, codec: Codec) -> torch.Tensor:
    """Sums `rows`, (n, numel), over n ranks: part j of every other row reaches rank j quantized; fp32, (numel,)."""
    n = len(rows)
    parts = rows.view(n, n, -1)
    sums = []
    for here in range(n):
        total = parts[here, here].float()
        for peer in (peer for peer in range(n) if peer != here):
            total = total + through(codec, parts[peer, here][None], torch.float32)[0]
        sums.append(total)
    return torch.cat(sums)


@dataclass(frozen=True)
class CodeRow:
    """One tensor. `what`: weights (int8, gathered) or gradients (int4, exchanged); the rest is QuantizationError's."""

    what: str
    name: str
    numel: int
    snr_db: float
    bias: float
    largest: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=f"of the cell; before them {' '.join(CELL)}")
    parser.add_argument("--steps", type=int, default=20, help="of training before (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="a csv file")


def run(chosen: argparse.Namespace) -> int:
    """Trains, and prints a row for each tensor."""
    cells = compose_cells([*CELL, *chosen.overrides])
    problems = [problem for cell in cells for problem in cell.problems]
    if problems or len(cells) != 1 or chosen.steps < 1:
        raise RefusedError(problems or ["it needs one cell, and at least one step"])
    rows = measure_codes(cells[0].config, chosen.steps)
    if chosen.out is not None:
        write(chosen.out, CodeRow, rows)
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
        error = QuantizationError.of(exact[there], coded[there])
        yield CodeRow(what, engine.names[piece.parameter], piece.numel, **asdict(error))
