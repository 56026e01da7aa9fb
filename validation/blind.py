"""The blind test: 30 cells are drawn by a seed, predicted, and committed before the runs that they predict.

The first call predicts by execution on fake tensors what the fullest rank of each holds and sends. The predictions are
to be committed; the same command then runs the cells in real worlds and compares. Cells are of three kinds of model,
every strategy that a CPU has, two to four ranks, options mixed.

    python -m validation blind --seed 3
"""

from __future__ import annotations

import argparse
import random
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cells import MODELS, cell
from zerobench.config import schema, schema_memory, schema_training
from zerobench.config.cell import CellConfig
from zerobench.config.schema import Measure
from zerobench.fake_execution import Execution
from zerobench.rank_record import RankRecord
from zerobench.strategies import spec_of, specs

from .runner import execute_cells, on_cpu, progress, run_real
from .store import Store

FOLDER = Path("results/blind")

MOST_PEAK = 0.01
"""Largest relative error of a predicted peak."""

CELLS = 30

STRATEGIES = [name for name, spec in specs().items() if spec.requires is None and not spec.of_user]

KINDS = ("gpt", "mlp", "transformers")

TRIES = 200

FOR_DTENSORS = ("sgd", "adam", "adamw", "asgd", "rmsprop", "adadelta")
"""Optimizers whose operators torch has for DTensors: a cell of FSDP2 with Rprop fails, in a run as well."""


@dataclass(frozen=True)
class BlindCell:
    """`words`: the choices as on a command line, for people."""

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
        n = chance.randint(2, 4)
        if options.pop("nodes", False) and n == 4:
            options |= {"node_size": 2}
        MODELS["blind"] = model.pop("schema")
        one = cell(strategy, n, "blind", measure=Measure(1, 2, passes="accounted"), **model, **dict(options))
        if not one.problems:
            return BlindCell(number, _words(strategy, n, MODELS["blind"], {**model, **options}), one.config)
    raise AssertionError(f"{strategy}: no cell that makes sense in {TRIES} draws: {one.problems}")


def _model(chance: random.Random, kind: str) -> dict[str, Any]:
    heads = chance.choice((1, 2, 4))
    layers, hidden = chance.randint(1, 4), heads * chance.choice((8, 12, 18, 24))
    vocabulary = chance.choice((256, 301, 777, 2000))
    if kind == "mlp":
        return {
            "schema": schema.Mlp(layers=layers + 1, hidden=chance.choice((33, 70, 128, 190)), vocabulary=vocabulary)
        }
    if kind == "gpt":
        tied, checkpointing = chance.random() < 0.5, chance.random() < 0.2
        return {
            "schema": schema.Gpt(
                layers=layers, hidden=hidden, heads=heads, vocabulary=vocabulary, tied=tied, checkpointing=checkpointing
            )
        }
    architecture = chance.choice(("gpt2", "llama", "gpt_neox", "opt"))
    shape = schema.Huggingface(architecture, layers, hidden, heads, vocabulary)
    return {"schema": schema.HuggingfaceModel(), "huggingface": shape}


def _options(chance: random.Random, strategy: str) -> dict[str, Any]:
    spec = spec_of(strategy)
    precisions: list[schema_training.Precision] = [schema_training.Fp32(), schema_training.Bf16()]
    shards = strategy.startswith("fsdp2")
    optimizers = [one for name, one in schema_training.OPTIMIZERS.items() if not shards or name in FOR_DTENSORS]
    options: dict[str, Any] = {
        "precision": chance.choice([*precisions, schema_training.Fp16(initial_scale=256.0)]),
        "optimizer": chance.choice(optimizers)(),
        "accumulation": chance.randint(1, 3),
        "micro_batch": chance.randint(1, 3),
        "sequence": chance.choice((8, 16, 24, 32)),
        "clip": chance.choice((None, None, 1.0)),
        "bucket_bytes": chance.choice((4096, 65536, 1 << 20)),
        "activation": chance.choice(
            (
                schema_memory.Activation(), schema_memory.Activation(), schema_memory.CheckpointActivations(),
                schema_memory.OffloadActivations(least_bytes=2048),
                schema_memory.CheckpointOffloadActivations(least_bytes=2048),
            )
        ),
    }  # fmt: skip
    if shards and options["optimizer"].name == "sgd":
        options["optimizer"] = schema_training.Sgd(implementation="loop")  # torch's fused one is not for DTensors
    if spec.tuning:
        options["tuned"] = chance.random() < 0.5
    return options | (_of_ours(chance, strategy) if spec.composes.arena else {})


def _of_ours(chance: random.Random, strategy: str) -> dict[str, Any]:
    section: dict[str, Any] = {
        "mode": chance.choice(("own", "paper", "vendor")),
        "accumulate": chance.choice(("last", "every")),
        "construct": chance.choice(("plain", "plain", "meta")),
    }
    if strategy == "zero3":
        section |= {"prefetch": chance.randrange(3), "persistence_numel": chance.choice((0, 100))}
    kind = chance.choice(("none", "arena", "fused", "nodes", "cpu", "delayed", "nvme"))
    kinds: dict[str, dict[str, Any]] = {
        "none": {},
        "arena": {"arena": True},
        "fused": {"buffers": schema_memory.FusedBuffers()},
        "nodes": {"nodes": True} | ({"zeropp": schema_memory.AllOfZeropp()} if strategy == "zero3" else {}),
        "cpu": {"offload": schema_memory.CpuOffload(fraction=chance.choice((1.0, 0.5)))},
        "delayed": {"offload": schema_memory.CpuOffload(delayed=True, delayed_after=1)},
        "nvme": {"offload": schema_memory.NvmeOffloadConfig(block_bytes=64 * 1024)},
    }
    return {"strategy": section} | kinds[kind]


def _words(strategy: str, n: int, model: Any, options: dict[str, Any]) -> str:
    """Returns the choices that are not the defaults' as words."""
    told = [f"strategy={strategy}", f"world_size={n}", f"model={_told(model)}"]
    return " ".join([*told, *(f"{key}={_told(value)}" for key, value in options.items() if value is not None)])


def _told(value: Any) -> str:
    if isinstance(value, dict):
        return "(" + " ".join(f"{key}={_told(one)}" for key, one in value.items() if one is not None) + ")"
    if not hasattr(value, "values"):
        return str(value).lower() if isinstance(value, bool) else str(value)
    default = type(value)()
    name = getattr(value, "name", None) or getattr(value, "kind", None) or getattr(value, "architecture", "")
    other = {key: one for key, one in vars(value).items() if one != getattr(default, key) and key[0] != "_"}
    return f"{name}{_told(other) if other else ''}"


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
    changed = _git("status", "--porcelain", "--", str(file))
    last = _git("log", "-1", "--format=%h", "--", str(file))
    if changed or not last:
        raise ValueError(f"{file}: commit it first, so that the predictions are there before the runs")
    return last


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True).stdout.strip()


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
        executed = execute_cells("predictions", on_cpu([one.config for one in cells]))
        store.put([predicted(drawn, one) for drawn, one in zip(cells, executed, strict=True)])
        print(f"{file}: commit it, then call this again")
        return 0
    commit, before = committed(file), store.rows
    measured = Store(folder / "measured.csv", Figures, lambda row: row.number)
    with tempfile.TemporaryDirectory() as scratch, progress("runs", len(cells), "cells") as show:
        for drawn, one in zip(cells, before, strict=True):
            if chosen.rerun or drawn.number not in measured.found:
                measured.put([measure(drawn, one, Path(scratch) / str(drawn.number))])
            show(drawn.number + 1)
    told = summary(chosen.seed, commit, before, measured.rows)
    (folder / "summary.md").write_text(told)
    verdict = next(line for line in told.splitlines() if " cells: " in line)
    print(f"{verdict} {folder}")
    return 0 if verdict.startswith(f"{len(cells)} of") else 1
