"""Blocks of the pages on ZeRO++, groups of ranks and ZeRO-R, from the committed tables (see blocks.py).

Each function takes the folder of folders of tables, and returns the block's Markdown.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.arena import counted
from analysis.nodes import crossing_bytes
from analysis.partition import NAMES
from analysis.zeropp import losses_of
from tools.docs.committed import load
from zerobench.results.summary import summarize
from zerobench.results.tables import Results
from zerobench.sizes import show_bytes

MIB = 2**20
LAST = 20
"""Steps whose losses are averaged."""


def pipes(cells: Iterable[str]) -> str:
    """A row of a Markdown table."""
    return "| " + " | ".join(cells) + " |"


def cells_of(where: Path, *by: str) -> list[tuple[Any, dict[str, Any]]]:
    """Each cell as a row of the summary, and its config; sorted by columns."""
    cells = summarize(load(where).runs)
    cells = cells.sort_values(list(by), kind="stable") if by else cells
    return [(cell, json.loads(cell.config)) for cell in cells.itertuples()]


def nodes(root: Path) -> str:
    """Flat collectives beside those in two hops.

    Of what a flat exchange sends that part is counted as crossing which analysis/nodes.py draws so.
    """
    lines = [
        "| strategy | collectives | volume | sent by a rank | by a node to others | formula |",
        "| --- | --- | --: | --: | --: | --: |",
    ]
    cells = cells_of(root / "nodes", "strategy")
    size = next(config["node_size"] for _, config in cells if "node_size" in config)
    for cell, config in cells:
        hops = "node_size" in config
        crossing = crossing_bytes(cell, hops, size) * size / cell.psi
        formula = f"{cell.predicted_between_nodes_bytes * size / cell.psi:.3f}" if hops else "–"
        words = [cell.strategy, "in two hops" if hops else "flat", f"{cell.volume_psi:.3f} ψ"]
        lines.append(pipes([*words, f"{cell.wire_bytes / cell.psi:.3f}", f"{crossing:.3f}", formula]))
    return "\n".join(lines)


def shard_group(root: Path) -> str:
    """States and volume of zero3 by the ranks that share a shard."""
    cells = cells_of(root / "shard_group")
    found = sorted((config["shard_group"], cell) for cell, config in cells if cell.strategy == "zero3")
    sizes = [f"k = {k}: {one.states_bytes / MIB:.2f} MiB, {one.volume_psi:.2f} ψ" for k, one in found]
    return f"States and volume: {'; '.join(sizes)}."


OPTIONS = {
    "bits_within": lambda value: f"{value} bits within a node" if value != 4 else "",
    "differences": lambda value: "differences" * value,
}  # fmt: skip
"""Key of zeropp -> its words in a table, empty at the default."""
ZEROPP = f"| zeropp | between nodes | formula | states | loss | gap |\n| --- |{' --: |' * 5}"


def zeropp(root: Path) -> str:
    """Bytes between nodes, states and losses, by the parts of ZeRO++; the gap is to plain zero3's loss."""
    return "\n".join([ZEROPP, *_zeropp_rows(root, "zeropp")])


def zeropp_error(root: Path) -> str:
    """The same by the options of quantization."""
    return "\n".join([ZEROPP, *_zeropp_rows(root, "zeropp_error")])


def _zeropp_rows(root: Path, experiment: str) -> list[str]:
    plain, results = load(root / "zeropp"), load(root / experiment)
    exact = _last_loss(plain, next(cell for cell, config in cells_of(root / "zeropp") if "zeropp" not in config))
    lines = []
    for cell, config in cells_of(root / experiment):
        section = config.get("zeropp", {})
        parts = [part for part in ("secondary_shards", "quantize_weights", "quantize_gradients") if section.get(part)]
        name = f"{section.get('name', 'none')}" + " + qgz" * (section.get("name") == "hpz" and len(parts) > 1)
        words = [word for key, said in OPTIONS.items() if (word := said(section.get(key, 4 if "bits" in key else 0)))]
        sent = (cell.between_nodes_bytes, cell.predicted_between_nodes_bytes)
        each = [f"{size * config['node_size'] / cell.psi:.3f}" for size in sent]
        loss = _last_loss(results, cell)
        states = f"{cell.states_bytes / MIB:.3f} MiB"
        lines.append(pipes([", ".join([name, *words]), *each, states, f"{loss:.4f}", f"{loss - exact:+.4f}"]))
    return lines


def _last_loss(results: Results, cell: Any) -> float:
    return float(losses_of(results, cell).iloc[-LAST:].mean())


def codes(root: Path) -> str:
    """Signal to noise of matrices and vectors, by what is coded."""
    table = pd.read_csv(root / "zeropp/codes.csv")
    table["matrix"] = table["name"].str.endswith(".weight") & ~table["name"].str.contains("norm")
    weights, gradients = (table[table["what"] == what] for what in ("weights", "gradients"))
    positions = weights["name"] == "position_embedding.weight"
    others = weights[weights["matrix"] & ~positions]["snr_db"]
    apart = f"the position embedding {weights[positions]['snr_db'].iloc[0]:.1f} dB"
    sums = gradients[gradients["matrix"]]["snr_db"]
    least = [f"{one[~one['matrix']]['snr_db'].min():.1f}" for one in (weights, gradients)]
    return "\n".join(
        [
            f"- matrices: {others.min():.1f} to {others.max():.1f} dB as int8 weights, {apart}; {sums.min():.1f} to "
            f"{sums.max():.1f} dB as int4 gradients",
            f"- vectors, at worst: {least[0]} dB as weights, {least[1]} dB as gradients",
        ]
    )


def activation(root: Path) -> str:
    """Peaks by tier and step times of the policies, stage by stage."""
    lines = [
        "| policy | zero2: device | host | step ms | zero3: device | host | step ms |",
        "| --- | --: | --: | --: | --: | --: | --: |",
    ]
    policies: dict[str, list[str]] = {}
    for cell, config in cells_of(root / "activation", "strategy"):
        usual = "checkpoint" if cell.checkpointing else "none"
        shown = policies.setdefault(config.get("activation", {}).get("name", usual), [])
        step = f"{cell.step_s * 1000:.0f} ({cell.step_s_low * 1000:.0f}–{cell.step_s_high * 1000:.0f})"
        shown += [show_bytes(cell.peak_bytes), show_bytes(cell.host_peak_bytes) if cell.host_peak_bytes else "–", step]
    return "\n".join([*lines, *(pipes([name, *shown]) for name, shown in policies.items())])


def partition(root: Path) -> str:
    """C1 to C5: states and activations at the peak, host memory, volume, and bytes by axis with their prediction."""
    lines = [
        "| | states | activations | peak | activations | in host memory | volume | all-reduces | gathers |",
        f"| --- | --- | --- |{' --: |' * 6}",
    ]
    for cell, config in cells_of(root / "partition", "strategy"):
        policy = config.get("activation", {}).get("name", "checkpoint")
        sizes = cell.peak_bytes, cell.max_activations_bytes, cell.host_peak_bytes
        sent = cell.tensor_axis_all_reduce_bytes, cell.tensor_axis_all_gather_bytes
        shown = [show_bytes(size) if size else "–" for size in (*sizes, *sent)]
        shown.insert(3, f"{cell.volume_psi:.3f} ψ")
        lines.append(pipes([NAMES.get((cell.strategy, policy), "–"), cell.strategy, policy, *shown]))
    return "\n".join(lines)


def buffers(root: Path) -> str:
    """Communication at its maximum, constant and fused, as the model grows."""
    lines = ["| ψ | constant | fused | fused, bytes per parameter |", "| --: | --: | --: | --: |"]
    sizes: dict[int, dict[str, int]] = {}
    for cell, config in cells_of(root / "buffers", "psi"):
        sizes.setdefault(cell.psi, {})[config.get("buffers", {}).get("name", "constant")] = cell.max_communication_bytes
    for psi, one in sizes.items():
        shown = [show_bytes(one["constant"]), show_bytes(one["fused"]), f"{one['fused'] / psi:.2f}"]
        lines.append(pipes([f"{psi / 1e6:.2f} M", *shown]))
    return "\n".join(lines)


def tiling(root: Path) -> str:
    """Parameters that are whole at once, by tiles."""
    lines = [
        "| tiles | parameters at most | on its way at most | states | volume |",
        "| --: | --: | --: | --: | --: |",
    ]
    for cell, config in cells_of(root / "tiling"):
        sizes = cell.max_parameters_bytes, cell.max_communication_bytes, cell.states_bytes
        tiles = str(config["model"].get("tiles", 1))
        lines.append(pipes([tiles, *map(show_bytes, sizes), f"{cell.volume_psi:.3f} ψ"]))
    return "\n".join(lines)


def arena(root: Path) -> str:
    """Allocations of a step that outlive their phase, and the peak, without slots and with them."""
    lines = [
        "| | `arena` | gradients, lasting | activations, lasting | all, lasting | all | peak |",
        "| --- | --- | --: | --: | --: | --: | --: |",
    ]
    results, seen = load(root / "arena"), {}
    for run in summarize(results.runs).sort_values("strategy", kind="stable").itertuples():
        counts = counted(results, run)
        lasting, chosen = counts["lasting"], "true" if json.loads(run.config).get("arena") else "false"
        numbers = [lasting["gradients"], lasting["activations"], sum(lasting.values())]
        numbers.append(sum(counts["allocations"].values()))
        seen[run.strategy, chosen] = sum(lasting.values()), run.peak_bytes
        lines.append(pipes([run.strategy, chosen, *(f"{n:.0f}" for n in numbers), f"{run.peak_bytes / MIB:.1f} MiB"]))
    pairs = [(before, seen[name, "true"]) for (name, chosen), before in seen.items() if chosen == "false"]
    spared = sorted(before - after for (before, _), (after, _) in pairs)
    dearer = sorted(after / before - 1 for (_, before), (_, after) in pairs)
    what = f"{spared[0]:.0f} to {spared[-1]:.0f} lasting allocations per step"
    return "\n".join([*lines, "", f"It spares {what}, and costs {dearer[0]:.0%} to {dearer[-1]:.0%} of the peak."])


BLOCKS: dict[str, Callable[[Path], str]] = {
    "nodes": nodes,
    "shard_group": shard_group,
    "zeropp": zeropp,
    "zeropp_error": zeropp_error,
    "codes": codes,
    "activation": activation,
    "partition": partition,
    "buffers": buffers,
    "arena": arena,
    "tiling": tiling,
}
"""Block -> what makes it."""
