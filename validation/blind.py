"""The blind test: 30 cells are drawn by a seed, predicted, and committed before the runs that they predict.

The first call predicts by execution on fake tensors what the fullest rank of each holds and sends. The predictions are
to be committed; the same command then runs the cells in real worlds and compares. Cells are of three kinds of model,
every strategy that a CPU has, two to four ranks, options mixed.

    python -m validation blind --seed 3
"""

from __future__ import annotations

import argparse
import random
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerobench.config.cell import CellConfig
from zerobench.config.compose import compose_cells
from zerobench.config.schema_training import OPTIMIZERS
from zerobench.fake_execution import CPU, Execution
from zerobench.host.revisions import git
from zerobench.host.terminal import progress_bar
from zerobench.rank_record import RankRecord
from zerobench.strategies import spec_of, specs

from .runner import execute_cells, run_real
from .store import Store

FOLDER = Path("results/blind")

MOST_PEAK = 0.01
"""Largest relative error of a predicted peak."""

CELLS = 30

STRATEGIES = [name for name, spec in specs().items() if spec.requires is None and not spec.of_user]

KINDS = ("gpt", "mlp", "transformers")

TRIES = 200

ACTIVATIONS = (
    "", "", "activation=checkpoint", "activation=offload activation.least_bytes=2048",
    "activation=checkpoint_offload activation.least_bytes=2048",
)  # fmt: skip

NODES = ("node_size", "zeropp")
"""Keys that need four ranks."""

COMMON = (
    "device=cpu", "data=text", "launch.threads=1", "measure.warmup=2", "measure.steps=1", "measure.passes=accounted",
)  # fmt: skip

FOR_DTENSORS = ("sgd", "adam", "adamw", "asgd", "rmsprop", "adadelta")
"""Optimizers whose operators torch has for DTensors: a cell of FSDP2 with Rprop fails, in a run as well."""


@dataclass(frozen=True)
class BlindCell:
    """`words`: the cell's command line."""

    number: int
    words: str
    config: CellConfig


def draw(seed: int, cells: int = CELLS) -> list[BlindCell]:
    """Returns the cells of a seed, always the same: each strategy and kind of model in turn, all else by chance."""
    chance = random.Random(f"blind {seed}")
    strategies = [STRATEGIES[number % len(STRATEGIES)] for number in range(cells)]
    chance.shuffle(strategies)
    return [_cell(chance, number, strategies[number], KINDS[number % len(KINDS)]) for number in range(cells)]


def _cell(chance: random.Random, number: int, strategy: str, kind: str) -> BlindCell:
    for _ in range(TRIES):
        model, options = _model(chance, kind), _options(chance, strategy)
        ranks = chance.randint(2, 4)
        if ranks < 4:
            options = [word for word in options if not word.startswith(NODES)]
        words = [f"strategy={strategy}", f"world_size={ranks}", *model, *options]
        cell = compose_cells([*words, *COMMON])[0]
        if not cell.problems:
            return BlindCell(number, " ".join(words), cell.config)
    raise AssertionError(f"{strategy}: no cell that makes sense in {TRIES} draws: {cell.problems}")


def _model(chance: random.Random, kind: str) -> list[str]:
    heads = chance.choice((1, 2, 4))
    layers, hidden = chance.randint(1, 4), heads * chance.choice((8, 12, 18, 24))
    vocabulary = chance.choice((256, 301, 777, 2000))
    if kind == "mlp":
        sizes = {"layers": layers + 1, "hidden": chance.choice((33, 70, 128, 190)), "vocabulary": vocabulary}
        return ["model=mlp", *(f"model.{name}={size}" for name, size in sizes.items())]
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "vocabulary": vocabulary}
    if kind == "gpt":
        flags = {"tied": chance.random() < 0.5, "checkpointing": chance.random() < 0.2}
        flags_words = [f"model.{name}={str(value).lower()}" for name, value in flags.items()]
        return ["model=gpt", *(f"model.{name}={size}" for name, size in sizes.items()), *flags_words]
    architecture = chance.choice(("gpt2", "llama", "gpt_neox", "opt"))
    words = [f"huggingface.{name}={size}" for name, size in sizes.items()]
    return ["model=huggingface", f"huggingface.architecture={architecture}", *words]


def _options(chance: random.Random, strategy: str) -> list[str]:
    spec = spec_of(strategy)
    shards = strategy.startswith("fsdp2")
    optimizers = [name for name in OPTIMIZERS if not shards or name in FOR_DTENSORS]
    words = [
        chance.choice(("precision=fp32", "precision=bf16", "precision=fp16 precision.initial_scale=256")),
        f"optimizer={(optimizer := chance.choice(optimizers))}",
        f"accumulation={chance.randint(1, 3)}",
        f"micro_batch={chance.randint(1, 3)}",
        f"sequence={chance.choice((8, 16, 24, 32))}",
        chance.choice(("", "", "clip=1.0")),
        f"strategy.bucket_bytes={chance.choice((4096, 65536, 1 << 20))}",
        chance.choice(ACTIVATIONS),
    ]
    if not hasattr(spec.options(), "bucket_bytes"):
        words = [word for word in words if not word.startswith("strategy.bucket_bytes")]
    if shards and optimizer == "sgd":
        words.append("optimizer.implementation=loop")  # torch's fused one is not for DTensors
    if spec.tuning:
        words += ["strategy.tuned=true"] * (chance.random() < 0.5)
    if spec.composes.arena:
        words += _of_ours(chance, strategy)
    return " ".join(words).split()


def _of_ours(chance: random.Random, strategy: str) -> list[str]:
    options: dict[str, Any] = {
        "mode": chance.choice(("own", "paper", "vendor")),
        "accumulate": chance.choice(("last", "every")),
        "construct": chance.choice(("plain", "plain", "meta")),
    }
    if strategy == "zero3":
        options |= {"prefetch": chance.randrange(3), "persistence_numel": chance.choice((0, 100))}
    kind = chance.choice(("none", "arena", "fused", "nodes", "cpu", "delayed", "nvme"))
    words = {
        "none": "",
        "arena": "arena=true",
        "fused": "buffers=fused",
        "nodes": "node_size=2" + " zeropp=all" * (strategy == "zero3"),
        "cpu": f"offload=cpu offload.fraction={chance.choice((1.0, 0.5))}",
        "delayed": "offload=cpu offload.delayed=true offload.delayed_after=1",
        "nvme": "offload=nvme offload.block_bytes=65536",
    }
    return [*(f"strategy.{key}={value}" for key, value in options.items()), words[kind]]


@dataclass(frozen=True)
class Figures:
    """A prediction for the fullest rank of a cell; `wire_bytes`: of that rank in a step."""

    number: int
    cell: str
    rank: int
    states_bytes: int
    peak_bytes: int
    wire_bytes: float


def predicted(drawn: BlindCell, found: Execution) -> Figures:
    """Returns the figures of an execution of the fullest rank. Raises ValueError with its problem where it has none."""
    if found.problem:
        raise ValueError(f"{drawn.words}: {found.problem}")
    sent = round(found.wire_bytes, 3)
    return Figures(drawn.number, drawn.words, found.rank, found.states_bytes, found.peak_bytes, sent)


def measure(drawn: BlindCell, predicted: Figures, folder: Path) -> Figures:
    """Returns the figures of a real world: the largest of any rank, and what the predicted rank sent."""
    ((_, records),) = run_real({"cell": drawn.config}, folder).items()
    failed = [one for one in records.values() if isinstance(one, str)]
    if failed:
        raise ValueError(f"{drawn.words}: {failed[0]}")
    ranks: list[Any] = list(records.values())
    peaks = [_most(one, "total") for one in ranks]
    sent = sum(row.wire_bytes for row in ranks[predicted.rank].traffic if not row.control)
    states = max(_most(one, "states") for one in ranks)
    return Figures(drawn.number, drawn.words, peaks.index(max(peaks)), states, max(peaks), round(sent, 3))


def _most(record: RankRecord, category: str) -> int:
    rows = (row for row in record.memory if (row.phase, row.category, row.tier) == ("step", category, "device"))
    return next(rows).max_bytes


def committed(file: Path) -> str:
    """Returns the commit that has the file as it is now. Raises ValueError if none has."""
    changed = git(Path(), "status", "--porcelain", "--", str(file))
    last = git(Path(), "log", "-1", "--format=%h", "--", str(file))
    if changed or not last:
        raise ValueError(f"{file}: commit it first, so that the predictions are there before the runs")
    return last


def summary(seed: int, commit: str, predicted: list[Figures], measured: list[Figures]) -> str:
    """Returns the verdict, and a line per cell."""
    lines, missed = [], 0
    for before, after in zip(predicted, measured, strict=True):
        states, sent = before.states_bytes - after.states_bytes, before.wire_bytes - after.wire_bytes
        peak = before.peak_bytes / after.peak_bytes - 1
        missed += bool(states) or abs(peak) > MOST_PEAK
        figures = f"{after.states_bytes} | {states} | {after.peak_bytes} | {100 * peak:.3f} | {sent:g}"
        lines.append(f"| {before.number} | {before.cell} | {figures} |")
    head = [
        f"# Blind test, seed {seed}", "",
        f"Written by `make blind SEED={seed}`. The predictions are of commit {commit}, before any of these runs.", "",
        f"{len(predicted) - missed} of {len(predicted)} cells: states 0 bytes off and the peak within 1 %.", "",
        "| | cell | states, bytes | off by | peak, bytes | off by, % | wire off by, bytes |",
        "| --: | --- | --: | --: | --: | --: | --: |",
    ]  # fmt: skip
    return "\n".join([*head, *lines, ""])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--rerun", action="store_true", help="run also the cells that were measured already")
    parser.add_argument("--out", type=Path, default=FOLDER, metavar="FOLDER", help="default: %(default)s")


def run(chosen: argparse.Namespace) -> int:
    """Writes the predictions or, once they are committed, runs the cells. Returns 1 if a prediction was missed."""
    folder, cells = chosen.out / f"seed-{chosen.seed}", draw(chosen.seed)
    file = folder / "predictions.csv"
    store = Store(file, Figures, lambda row: row.number)
    if not store.found:
        executed = execute_cells("predictions", [(one.config, CPU) for one in cells])
        store.put([predicted(drawn, one) for drawn, one in zip(cells, executed, strict=True)])
        print(f"{file}: commit it, then call this again")
        return 0
    commit, before = committed(file), store.rows
    measured = Store(folder / "measured.csv", Figures, lambda row: row.number)
    with tempfile.TemporaryDirectory() as scratch, progress_bar("runs", len(cells), "cells") as advance:
        for drawn, one in zip(cells, before, strict=True):
            if chosen.rerun or drawn.number not in measured.found:
                measured.put([measure(drawn, one, Path(scratch) / str(drawn.number))])
            advance()
    told = summary(chosen.seed, commit, before, measured.rows)
    (folder / "summary.md").write_text(told)
    verdict = next(line for line in told.splitlines() if " cells: " in line)
    print(f"{verdict} {folder}")
    return 0 if verdict.startswith(f"{len(cells)} of") else 1
