"""Maps of predicted steps: which strategy is fastest over model and ranks, from which network on one is ahead of
another, and how each scales.

setting     bf16, AdamW, blocks recomputed, MICRO_BATCH sequences of SEQUENCE tokens per GPU, on CLUSTER
grid        what fits: by the paper's formula states are at most USABLE of the device; activations are not counted
break-even  the network, Gbit/s per node, at which two cells take the same time; empty if there is none in NETWORKS

Writes steps.csv and break_even.csv to results/predicted_maps. Executed schedules stay in results/runs/predicted_maps.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from zerobench.commands.predict import costs_of
from zerobench.commands.simulated import ask
from zerobench.config.cell import CellConfig
from zerobench.config.schema_memory import CHOICES
from zerobench.predict.build import facts_of
from zerobench.predict.estimate import closed_form
from zerobench.simulation.execute import CUDA
from zerobench.simulation.prediction import StepTime, reduced, step_time

from .schedules import Schedules
from .store import write

OUT = Path("results/predicted_maps")
CACHE = Path("results/runs/predicted_maps")

CLUSTER = "h100-3200"
RANKS = (8, 64, 512, 4096)
MODELS = {"gpt2_1_5b": RANKS, "gpt_7b": RANKS[:3], "zero_40b": RANKS[1:3]}
"""Model -> its ranks: the schedule of a larger one on 4,096 takes minutes."""

STRATEGIES = ("ddp", "zero1", "zero2", "zero3")
MICRO_BATCH, SEQUENCE = 4, 1024
USABLE = 0.92

OPTION_MODEL, OPTION_RANKS = "gpt_7b", 64
"""The cell whose options are compared with zero3."""

ZEROPP = ("hpz", "all")

NETWORKS = (1.0, 25_600.0)


@dataclass(frozen=True)
class StepRow:
    """A predicted step."""

    model: str
    psi: int
    ranks: int
    strategy: str
    states_bytes: int
    step_s: float
    exposed_s: float
    tokens_s_gpu: float


@dataclass(frozen=True)
class BreakEvenRow:
    """`fast` is ahead of `slow` below so many Gbit/s per node; None: at no network, or `always` is 1: at every one."""

    model: str
    ranks: int
    fast: str
    slow: str
    node_gbit_s: float | None
    always: int


def run(_: argparse.Namespace) -> int:
    """Executes the cells that are not kept yet, and writes the maps."""
    words = [f"model={','.join(MODELS)}", f"strategy={','.join(STRATEGIES)}", "precision=bf16", "world_size=8"]
    words += [f"micro_batch={MICRO_BATCH}", f"sequence={SEQUENCE}", "activation=checkpoint", "optimizer=adamw"]
    asked = [cell.config for cell in ask(words, "cuda").cells]
    facts = {config.model_name: facts_of(config) for config in asked if config.strategy.name == STRATEGIES[0]}

    def states_of(config: CellConfig) -> int:
        return closed_form(config, facts[config.model_name]) or 0

    costs = costs_of(CLUSTER, None)
    of_ranks = {
        (config.model_name, ranks, config.strategy.name): replace(config, world_size=ranks, batch=MICRO_BATCH * ranks)
        for model in MODELS for ranks in MODELS[model]
        for name in STRATEGIES for config in asked if (config.model_name, config.strategy.name) == (model, name)
    }  # fmt: skip
    usable = USABLE * costs.device.memory_gib * 2**30
    grid = {key: config for key, config in of_ranks.items() if states_of(config) <= usable}

    # options of zero3 that send less between nodes
    zero3, per_node = grid[OPTION_MODEL, OPTION_RANKS, "zero3"], costs.cluster.devices_per_node
    options = {f"shard_group={per_node}": replace(zero3, shard_group=per_node)}
    options |= {f"zeropp={name}": replace(zero3, node_size=per_node, zeropp=CHOICES[name]()) for name in ZEROPP}

    schedules, everything = Schedules(CACHE), [*grid.values(), *options.values()]
    schedules.execute("maps", [(reduced(config), CUDA) for config in everything])
    laid = {config.cell_id: schedules.of(reduced(config), CUDA) for config in everything}

    def step_of(config: CellConfig, gbit_s: float | None = None) -> StepTime:
        return step_time(laid[config.cell_id], costs_of(CLUSTER, gbit_s))

    steps = []
    for (model, ranks, strategy), config in grid.items():
        step, psi = step_of(config), sum(shape.numel for shape in facts[model].shapes)
        rate = config.micro_batch * config.accumulation * config.sequence / step.step_s
        steps.append(StepRow(model, psi, ranks, strategy, states_of(config), step.step_s, step.exposed_s, rate))
    write(OUT / "steps.csv", StepRow, steps)

    pairs = [
        (model, ranks, "zero2", "zero3", config, grid[model, ranks, "zero3"])
        for (model, ranks, name), config in grid.items() if name == "zero2" and ranks > RANKS[0]
    ]  # fmt: skip
    pairs += [(OPTION_MODEL, OPTION_RANKS, option, "zero3", config, zero3) for option, config in options.items()]
    edges = [BreakEvenRow(*pair[:4], *_edge(step_of, *pair[4:])) for pair in pairs]
    write(OUT / "break_even.csv", BreakEvenRow, edges)
    print(f"{OUT}: steps.csv, break_even.csv")
    return 0


def _edge(step_of: Callable[..., StepTime], fast: CellConfig, slow: CellConfig) -> tuple[float | None, int]:
    """Returns the network at which `fast` stops being ahead, and 1 if it is ahead on all of them."""
    ahead = lambda rate: step_of(fast, rate).step_s < step_of(slow, rate).step_s  # noqa: E731
    low, high = NETWORKS
    if not ahead(low):
        return None, 0
    if ahead(high):
        return None, 1
    while high / low > 1.05:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if ahead(middle) else (low, middle)
    return high, 0
