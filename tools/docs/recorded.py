"""Committed runs: their tables, their cells as rows, their date and commit, and the code that recorded them.

    python -m tools.docs.recorded results/runs/reference/stages results/reference/cpu/stages
    python -m tools.docs.recorded results/lora
    python -m tools.docs.recorded

The first makes the newest runs of an experiment its committed tables: parquet and Markdown. It and the second write the
digest of the code that the tables depend on (RECORDED) to results/code.yaml. The third, which `make docs` and `make
pages` end with, lists the tables that other code than today's recorded. A test allows none of README's.
"""

from __future__ import annotations

import ast
import hashlib
import json
import math
import sys
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

from zerobench.commands.export import export
from zerobench.results import tables
from zerobench.results.summary import summarize

HERE = Path(__file__).resolve().parents[2]
RESULTS = HERE / "results"
REFERENCE = RESULTS / "reference/cpu"
COMPARED = RESULTS / "compare/cpu"

load = cache(tables.load)
"""The tables of a folder, not to be changed: many blocks are made of the same runs."""


class Section(dict[str, Any]):
    """A section of a config. A key that it lacks is an empty section."""

    def __getattr__(self, key: str) -> Any:
        return self.get(key, Section())


def cells(folder: Path, *by: str) -> list[SimpleNamespace]:
    """Returns the cells of a folder, sorted by columns: those of the summary, `config`, and `label`, the strategy as a
    sweep names it, `fsdp2_tuned` for a tuned peer.
    """
    summary = summarize(load(folder).runs)
    rows = []
    for row in (summary.sort_values(list(by), kind="stable") if by else summary).to_dict("records"):
        config = json.loads(row["config"], object_hook=Section)
        label = row["strategy"] + "_tuned" * bool(config.strategy.tuned)
        known = {name: math.nan if value is None else value for name, value in row.items()}
        rows.append(SimpleNamespace(**known | {"text": row["config"], "config": config, "label": label}))
    return rows


def beside(rows: Iterable[Any], key: Callable[[Any], Any], name: Callable[[Any], str]) -> list[SimpleNamespace]:
    """Returns a row for each key, with the rows of that key as attributes by name."""
    wide: dict[Any, SimpleNamespace] = {}
    for row in rows:
        setattr(wide.setdefault(key(row), SimpleNamespace(key=key(row))), name(row), row)
    return list(wide.values())


def recorded(experiment: str) -> str:
    """Says when and by which commit the tables of an experiment were recorded."""
    runs = load(REFERENCE / experiment).runs
    when = " to ".join(sorted({str(runs["started"].min())[:10], str(runs["started"].max())[:10]}))
    commits = ", ".join(sorted({f"`{commit[:7]}`" for commit in runs["commit"]}))
    return f"Recorded on {when} (commit {commits})."


# -- the code that recorded them -------------------------------------------------------------------

PACKAGE = HERE / "zerobench"
ENGINE = ("zero", "strategies", "probes", "models", "worker.py", "data.py")
"""Files and folders of the package that run in a rank, or measure it."""
SIMULATED = (*ENGINE, "fake", "simulation", "theory", "predict")

RECORDED = {
    "reference/cpu/*": ENGINE, "compare/cpu": ENGINE, "lora": ENGINE, "replay": ENGINE, "h100": ENGINE,
    "fake_equality": SIMULATED, "table1": SIMULATED, "published_runs": SIMULATED, "predicted_runs": SIMULATED,
    "predicted_maps": SIMULATED, "published/questions": (*SIMULATED, "commands"),
    "largest_model": (*SIMULATED, "commands/plan"), "answer_times.csv": (*SIMULATED, "commands"),
    "certificates": ("watching",), "watch_cost.csv": ("watching",),
    "kernel_ulps.csv": ("zero/optim",), "update_traffic.csv": ("zero/optim", "fake/as_gpu"),
}  # fmt: skip
"""Files and folders of results/ -> what of the package they depend on. Budgets are held by `make budget` instead."""

CODE = RESULTS / "code.yaml"
"""Table -> the digest of the code that recorded it."""

PROMINENT = ("reference/cpu/stages",)
"""Tables of cells on the first two screens of README and of the first tutorial."""


@cache
def code(parts: tuple[str, ...]) -> str:
    """Returns the digest of today's code in parts of the package: 12 hex digits."""
    digest = hashlib.sha256()
    for part in parts:
        folder = PACKAGE / part
        for path in sorted(folder.rglob("*.py")) if folder.is_dir() else [folder]:
            digest.update(f"{path.relative_to(PACKAGE)}\0{code_of(path.read_text())}\0".encode())
    return digest.hexdigest()[:12]


def today() -> dict[str, str]:
    """Returns the digest of today's code for every recorded table."""
    paths = [(path, parts) for pattern, parts in RECORDED.items() for path in sorted(RESULTS.glob(pattern))]
    return {str(path.relative_to(RESULTS)): code(parts) for path, parts in paths if path.name != "figures"}


def older() -> list[str]:
    """Returns the tables that other code than today's recorded."""
    recorded_by = yaml.safe_load(CODE.read_text())
    return [table for table, digest in today().items() if recorded_by.get(table) != digest]


def list_older() -> None:
    """Prints the tables that other code recorded."""
    if tables := older():
        print(f"recorded by older code, so that today's figures may differ: {', '.join(tables)}")


def sign(to: str) -> None:
    """Writes today's digest for a table that was recorded now. Raises KeyError if RECORDED has no such table."""
    table = str(Path(to).resolve().relative_to(RESULTS))
    signed = yaml.safe_load(CODE.read_text()) | {table: today()[table]}
    CODE.write_text(yaml.safe_dump(signed))


def code_of(text: str) -> str:
    """Returns a module's lines without docstrings, comments and blank lines."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = (line.rstrip() for number, line in enumerate(text.splitlines(), 1) if number not in docstrings)
    return "\n".join(line for line in lines if line and not line.lstrip().startswith("#"))


def record(runs: str, to: str) -> int:
    """Writes the tables of `runs` to the folder `to`. Returns the first exit code that is not 0."""
    newest = ["--latest", "--format"]
    wanted = [[*newest, "parquet", "--out", to], [*newest, "markdown", "--out", f"{to}/runs.md"]]
    if len(tables.load(runs).searches):
        wanted.append(["--table", "searches", "--format", "markdown", "--out", f"{to}/searches.md"])
    for arguments in wanted:
        if code := export([runs, *arguments]):
            return code
    sign(to)
    return 0


if __name__ == "__main__":
    sys.exit((list_older, sign, record)[len(sys.argv) - 1](*sys.argv[1:]))
