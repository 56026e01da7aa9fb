"""Imports run downwards only, and the engine depends on torch alone."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "zerobench"

LAYERS = [
    {
        "records",
        "theory",
        "zero",
        "units",
        "calibration",
        "disk_calibration",
        "plain",
        "board",
        "fork_server",
        "signals",
        "conditions",
    },
    {
        "baselines",
        "gradient_norm",
        "step_values",
        "models",
        "registry",
        "meanings",
        "contract",
        "data",
        "probes",
        "environment",
        "optimizers",
        "config",
        "training",
        "precision",
        "ranges",
        "peers",
        "job",
        "world",
        "systems",
        "grouping",
        "policies",
        "composition",
        "offloading",
    },
    {
        "worker",
        "construction",
        "own_activations",
        "microbenchmarks",
        "disk_benchmark",
        "disk_update",
        "tables",
        "attempts",
        "row_checks",
        "arguments",
        "safe_yaml",
        "streams",
        "table_cache",
        "flat",
        "rank_process",
        "resolve",
        "provenance",
        "keys",
        "hydra_keys",
        "overrides",
        "flags",
    },
    {
        "launch",
        "join",
        "join_theory",
        "residuals",
        "coded",
        "naming",
        "summary",
        "folders",
        "selection",
        "rescue",
        "estimate",
        "flops",
        "compose",
        "parity",
    },
    {"joined", "console", "completion", "help"},
    {"cell"},
    {"parity_check"},
    {"sweep"},
    {"live", "pace", "search"},
    {"runner", "suite"},
    {"verbs"},
    {"cli", "__init__", "__main__"},
]
"""From the bottom up. A module may import its own layer's and those below."""


def imports_of(path: Path) -> set[str]:
    """Top-level names: "torch", or "zerobench.records" for the package's own."""
    depth = len(path.relative_to(PACKAGE).parts)
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            home = path.relative_to(PACKAGE).parts[: depth - node.level] if node.level else None
            if home is None:
                found.add((node.module or "").split(".")[0])
                continue
            inner = [*home, *((node.module or "").split(".") if node.module else [])]
            names = [inner[0]] if inner else [alias.name for alias in node.names]
            found |= {f"zerobench.{name}" for name in names}
    return found


def level(name: str) -> int:
    return next(i for i, layer in enumerate(LAYERS) if name in layer)


def test_every_module_has_a_layer_and_looks_down_only() -> None:
    for path in PACKAGE.rglob("*.py"):
        me = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for name in imports_of(path):
            if name.startswith("zerobench."):
                other = name.removeprefix("zerobench.")
                assert level(other) <= level(me), f"{path.name} imports {other} from above"


def test_the_bottom_layer_knows_nobody() -> None:
    for name in ("records", "theory", "zero"):
        where = PACKAGE / name
        for path in [where] if where.is_file() else where.rglob("*.py"):
            allowed = set(sys.stdlib_module_names) | {f"zerobench.{name.removesuffix('.py')}"}
            if name == "zero":
                allowed |= {"torch"}
            assert imports_of(path) <= allowed, path


def test_analysis_stands_on_tables_alone() -> None:
    for path in (PACKAGE.parent / "analysis").glob("*.py"):
        text = path.read_text()
        for forbidden in ("zerobench.zero", "zerobench.worker", "zerobench.launch", "zerobench.probes"):
            assert forbidden not in text, f"{path.name} imports {forbidden}"
