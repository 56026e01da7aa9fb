"""Steps of this machine beside their predictions, which are written down before the first one is measured.

predict    from the calibrations below results/calibration/cpu: a row per cell, to --out
measure    launches of every cell, in turns, and the errors beside the predictions
reference  the calibration's own reference step, measured again in every round: its error is the machine's drift

A link joins two network namespaces, half of the ranks in each (link.py), which needs the rights of root.

    python -m validation predicted-here predict
    python -m validation predicted-here measure --rounds 3
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import yaml

from zerobench.calibrate.operators import STEP, load_operators
from zerobench.commands.estimate.command import ask
from zerobench.commands.predict import calibrated_costs
from zerobench.config.cell import CellConfig
from zerobench.config.schema import Measure
from zerobench.fake_execution.execute import CPU
from zerobench.host.files import replace_text
from zerobench.launch.start_ranks import launch
from zerobench.timing.interval import HERE
from zerobench.timing.prediction import execute_schedules, reduced, step_time
from zerobench.timing.reference import reference_step_s
from zerobench.worker import RankJob, run_rank

from .link import run_on_nodes
from .store import read, write

OUT = Path("results/predicted_here/cpu.csv")
CALIBRATIONS = Path("results/calibration/cpu")

STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "fsdp2", "megatron")
SETTINGS = (
    ("gpt_small", 2, 0.0), ("gpt_medium", 2, 0.0), ("gpt_small", 4, 0.0), ("gpt_medium", 4, 0.0),
    ("gpt_small", 2, 1.0), ("gpt_small", 4, 1.0), ("gpt_small", 2, 0.1),
)  # fmt: skip
"""(model, ranks, Gbit/s of the link; 0: loopback)."""

REFERENCE = "reference"
"""The strategy of a row that holds the calibration's reference step in place of a prediction."""

BATCH = ("micro_batch=4", "sequence=128")
MEASURED = Measure(steps=5, warmup=2, passes="timed")


@dataclass(frozen=True)
class HereRow:
    """A cell. Seconds: predicted, and the median of its launches; `error`: predicted / measured - 1."""

    model: str
    ranks: int
    link_gbit_s: float
    strategy: str
    predicted_s: float
    exposed_s: float
    measured_s: float | None = None
    lowest_s: float | None = None
    highest_s: float | None = None
    error: float | None = None

    @property
    def setting(self) -> tuple[str, int, float]:
        """Key of the rows that are compared with each other."""
        return self.model, self.ranks, self.link_gbit_s


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("what", choices=("predict", "measure"))
    parser.add_argument("--out", type=Path, default=OUT, metavar="CSV", help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="launches of each cell (default: %(default)s)")
    parser.add_argument("--timeout", type=float, default=300, help="seconds of a launch (default: %(default)s)")


def run(chosen: argparse.Namespace) -> int:
    """Predicts, or measures what was predicted."""
    if chosen.what == "predict":
        write(chosen.out, HereRow, [*references(), *predictions()])
        print(f"{chosen.out}: predicted; commit it, then: python -m validation predicted-here measure")
        return 0
    rows: list[HereRow] = []
    for rows in measured(predicted(chosen.out), chosen.rounds, chosen.timeout):
        write(chosen.out, HereRow, rows)
    show(rows)
    intervals = yaml.safe_load(VALIDATED.read_text())["intervals"]
    here = interval_of([abs(math.log(1 + error)) for error in measured_errors(rows)])
    write_validated({"intervals": intervals | {HERE: here}})
    return 0


def config_of(model: str, ranks: int, strategy: str) -> CellConfig:
    """Returns the cell of a row."""
    words = [f"model={model}", f"world_size={ranks}", f"strategy={strategy}", *BATCH, "launch.threads=1"]
    (cell,) = ask(words, "cpu").cells
    if cell.problems:
        raise ValueError("; ".join(cell.problems))
    return cell.config


# -- the predictions -------------------------------------------------------------------------------


def predictions() -> list[HereRow]:
    """Returns the rows of all settings and strategies, without measurements."""
    shapes = dict.fromkeys((model, ranks, name) for model, ranks, _ in SETTINGS for name in STRATEGIES)
    cells = [reduced(config_of(*shape)) for shape in shapes]
    schedules = dict(zip(shapes, execute_schedules("schedules", cells, CPU), strict=True))
    rows = []
    for model, ranks, link in SETTINGS:
        costs = calibrated_costs(CALIBRATIONS / f"N={ranks}", link or None)
        for name in STRATEGIES:
            step = step_time(schedules[model, ranks, name], costs)
            rows.append(HereRow(model, ranks, link, name, round(step.step_s, 5), round(step.exposed_s, 5)))
    return rows


def references() -> list[HereRow]:
    """Returns the rows of the reference step, as the calibrations have it."""
    rows = []
    for ranks in sorted({ranks for _, ranks, _ in SETTINGS}):
        known = load_operators(CALIBRATIONS / f"N={ranks}").set_index("operator")["seconds"]
        rows.append(HereRow("gpt_small", ranks, 0.0, REFERENCE, round(float(known[STEP]), 5), 0.0))
    return rows


def predicted(path: Path) -> list[HereRow]:
    """Returns the rows of a file. Raises FileNotFoundError with the command that makes it."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no predictions; python -m validation predicted-here predict --out {path}")
    return read(path, HereRow)


# -- the measurements ------------------------------------------------------------------------------


def measured(rows: Sequence[HereRow], rounds: int, timeout_s: float) -> Iterator[list[HereRow]]:
    """Yields, after each round, the rows with the steps of their cells, launched in turns."""
    steps: defaultdict[HereRow, list[float]] = defaultdict(list)
    for number in range(rounds):
        for row in rows:
            steps[row].append(step_of(row, timeout_s))
            words = f"round {number + 1}: {row.model} N={row.ranks} {row.link_gbit_s:g} {row.strategy}"
            print(f"{words}: {steps[row][-1]:.3f} s, predicted {row.predicted_s:.3f}", file=sys.stderr, flush=True)
        yield [
            replace(
                row, measured_s=round(median(of_cell), 5), lowest_s=round(min(of_cell), 5),
                highest_s=round(max(of_cell), 5), error=round(row.predicted_s / median(of_cell) - 1, 4),
            )
            for row, of_cell in steps.items()
        ]  # fmt: skip


def step_of(row: HereRow, timeout_s: float) -> float:
    """Launches a cell and returns its step: the slowest rank's median, seconds."""
    if row.strategy == REFERENCE:
        return reference_step_s(row.ranks, timeout_s)
    with tempfile.TemporaryDirectory() as folder:
        shape = row.model, row.ranks, row.strategy
        if not row.link_gbit_s:
            return _launch(*shape, range(row.ranks), folder, timeout_s)
        module = [sys.executable, "-m", "validation.predicted_here"]
        run_on_nodes([*module, *map(str, shape), folder], row.link_gbit_s, timeout_s)
        return max(float(path.read_text()) for path in Path(folder).glob("step-*"))


def _launch(model: str, n: int, strategy: str, ranks: range, folder: str, timeout_s: float) -> float:
    config = replace(config_of(model, n, strategy), backend="gloo", tensors="real", measure=MEASURED)
    jobs = [RankJob(config, "timed", rank, f"{folder}/rendezvous", folder) for rank in ranks]
    outcome = launch(run_rank, jobs, Path(folder) / f"logs-{ranks[0]}", timeout_s, first=ranks[0])
    if outcome.status != "ok":
        raise ValueError(f"{strategy}: {outcome.status}: {outcome.reason}")
    return max(float(median(step.seconds for step in rank.steps if not step.warmup)) for rank in outcome.results)


def show(rows: Sequence[HereRow]) -> None:
    """Prints the errors, and how many pairs of strategies that launches separate are in the right order."""
    errors = [abs(error) for error in measured_errors(rows)]
    right, all_ = order_of(rows)
    words = f"mean |error| {mean(errors):.1%}, largest {max(errors):.1%}"
    print(f"{words}; {right} of {all_} pairs that all launches separate are in order")


def measured_errors(rows: Sequence[HereRow]) -> list[float]:
    """Returns the errors of the predictions that were measured, without the reference."""
    return [row.error for row in rows if row.strategy != REFERENCE and row.error is not None]


APART = 1.02
"""Steps that differ by less are not distinguished by single launches."""


def order_of(rows: Sequence[HereRow]) -> tuple[int, int]:
    """Returns (pairs of strategies in the predicted order, pairs whose launches do not overlap)."""
    right, apart = 0, 0
    for one, other in combinations([row for row in rows if row.strategy != REFERENCE], 2):
        if one.setting != other.setting or one.highest_s is None or other.highest_s is None:
            continue
        first, second = sorted((one, other), key=lambda row: row.measured_s or math.inf)
        if (first.highest_s or 0.0) * APART < (second.lowest_s or 0.0):
            apart += 1
            right += first.predicted_s < second.predicted_s
    return right, apart


# -- intervals -------------------------------------------------------------------------------------

VALIDATED = Path("zerobench/hardware/validated.yaml")
COVERED = 0.9
"""Part of the errors that an interval holds."""

HEADER = "# Written by `make predicted-runs`, `make predicted-here` and `make one-gpu`: validation/ says how.\n"


def write_validated(found: dict[str, Any]) -> None:
    """Writes scales, intervals or rates in place of those of the same name."""
    found = yaml.safe_load(VALIDATED.read_text()) | found
    replace_text(VALIDATED, HEADER + yaml.safe_dump(found, sort_keys=False))


def interval_of(errors: Sequence[float]) -> dict[str, float | int]:
    """Returns the interval of a kind of run: factors on a step, and the fraction of rows that they cover in turns.
    `errors`: |log| of predicted over measured.
    """
    wide = math.exp(float(np.quantile(errors, COVERED)))
    shuffled = np.random.default_rng(0).permutation(np.array(errors))
    inside = 0
    for part in range(10):
        held = shuffled[part::10]
        rest = np.concatenate([shuffled[other::10] for other in range(10) if other != part])
        inside += int((held <= np.quantile(rest, COVERED)).sum())
    return {
        "low": round(1 / wide, 3),
        "high": round(wide, 3),
        "runs": len(errors),
        "covered": round(inside / len(errors), 3),
    }


def _node(model: str, ranks: str, strategy: str, folder: str, node: str) -> None:
    """One node of two: half of the ranks. Leaves its step in a file of the folder."""
    count = int(ranks) // 2
    of_node = range(int(node) * count, (int(node) + 1) * count)
    (Path(folder) / f"step-{node}").write_text(str(_launch(model, int(ranks), strategy, of_node, folder, 300.0)))


if __name__ == "__main__":
    _node(*sys.argv[1:])
