"""The table of the four strategies in README and "Which stage?": memory, traffic, largest model (see blocks.py).

From the committed rows of `make table1` and the plans of `make largest-model`; volumes by the closed form.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pandas as pd

from analysis.largest_model import Largest, read
from tools.docs.blocks_systems import pipes
from validation.table1 import CELLS, GB
from zerobench.strategies import spec_of
from zerobench.theory.closed_forms import volume_formula
from zerobench.theory.shapes import ParameterShape, Schedule
from zerobench.theory.strategy import StrategyShape

NAMES = ("ddp", "zero1", "zero2", "zero3")
SIZE, RANKS = "7.5B", 64
"""Figure 1 of the paper."""
GPUS, DEVICE_GIB = 8, 80


def strategies(root: Path) -> str:
    """States per rank by the paper and as simulated, traffic of a step, the largest model that fits."""
    cells = pd.read_csv(root.parent.parent / "table1" / CELLS, keep_default_na=False, dtype={"printed_gb": str})
    cells = cells[(cells["size"] == SIZE) & (cells["ranks"] == RANKS) & (cells["variant"] == "")].set_index("strategy")
    plans = {one.strategy: one for one in read(root.parent.parent / "largest_model") if _is_shown(one)}
    lines = [
        f"| strategy | states per rank, {SIZE} on {RANKS} ranks: the paper | simulated | sent per step "
        f"| with m micro-batches | largest model on {GPUS} × {DEVICE_GIB} GiB |",
        "| --- | --: | --: | --: | --: | --: |",
    ]
    for name in NAMES:
        cell, plan = cells.loc[name], plans[name]
        sizes = [f"{cell['printed_gb']} GB", f"{_three_digits(cell['executed_bytes'] / GB)} GB"]
        lines.append(pipes([spec_of(name).label, *sizes, volume(name, 1), volume(name, None), f"{plan.billions:.1f}B"]))
    return "\n".join(lines)


def volume(name: str, micro_batches: int | None) -> str:
    """Elements that a rank moves in a step over ψ, by the strategy's default policy; None: as a formula in m."""
    if micro_batches is not None:
        return f"{_volume(name, micro_batches)}ψ"
    first, second = _volume(name, 1), _volume(name, 2)
    slope, rest = second - first, 2 * first - second
    if not slope:
        return f"{first}ψ"
    factor = "m" if slope == 1 else f"{slope}m"
    return f"({factor} + {rest})ψ" if rest else f"{factor}ψ"


def _volume(name: str, micro_batches: int) -> int:
    spec = spec_of(name)
    assert spec.theory is not None
    shape = StrategyShape.of(spec.theory, {"accumulate": spec.options().accumulate})
    one = ParameterShape(numel=1, element_bytes=2, trainable=True, unit="block")
    return volume_formula(shape, Schedule.sequential([one], micro_batches), RANKS).value


def _is_shown(plan: Largest) -> bool:
    return plan.gpus == GPUS and plan.device_bytes == DEVICE_GIB * 2**30 and plan.offload == "none"


def _three_digits(gigabytes: float) -> str:
    return f"{gigabytes:.0f}" if gigabytes >= 100 else f"{gigabytes:.1f}" if gigabytes >= 10 else f"{gigabytes:.2f}"


BLOCKS: dict[str, Callable[[Path], str]] = {"strategies": strategies}
"""Block -> what makes it."""
