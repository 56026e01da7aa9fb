"""Committed runs: their tables, their cells as rows, their date and commit, and the code that recorded them.

    python -m tools.docs.recorded results/runs/reference/stages results/reference/cpu/stages
    python -m tools.docs.recorded results/replay
    python -m tools.docs.recorded targets
    python -m tools.docs.recorded

The first makes the newest runs of an experiment its committed tables: parquet and Markdown. It and the second write the
digest of the code that the tables depend on (RECORDED) to results/code.yaml. The last, which `make docs` and `make
pages` end with, lists the tables that other code than today's recorded; a test allows none of README's. The third
prints the make targets that record these again, which is all that `make results` does.
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
from zerobench.results.options import Parser
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
COMMANDS = "plan", "estimate.py", "predict.py", "dry_run.py", "simulated.py", "reserved.py"
ASKED = (*SIMULATED, *(f"commands/{name}" for name in COMMANDS))
"""With the commands that answer before a run."""

RECORDED = {
    "reference/cpu/stages": ("record-stages", ENGINE),
    "answer_times.csv": ("answer-times", ASKED),
    "largest_model": ("largest-model", (*SIMULATED, "commands/plan/candidates.py", "commands/plan/search.py")),
    "predicted_runs": ("predicted-runs", SIMULATED),
    "predicted_maps": ("predicted-maps", SIMULATED),
    "table1": ("table1 TABLE1=--rerun", SIMULATED),
    "published/published.csv": ("published", SIMULATED),
    "published/questions": ("questions", ASKED),
    "published_runs": ("published-runs", SIMULATED),
    "h100": ("gpu-runs", SIMULATED),
    "replay": ("replay", ENGINE),
    "compare/cpu": ("compare", ENGINE),
    "reference/cpu/*": ("record-{name}", ENGINE),
    "update_traffic.csv": ("update-traffic", ("zero/optim", "fake/as_gpu")),
    "kernel_ulps.csv": ("kernel-ulps", ("zero/optim",)),
    "certificates": ("certificates", ("watching",)),
    "watch_cost.csv": ("watch-cost", ("watching",)),
    "fake_equality": ("fake-equality EQUALITY=", SIMULATED),
}
"""Files and folders of results/, in the order of prominence -> the make target that records them, and what of the
package they depend on. Budgets are held by `make budget` instead; of results/h100 the estimates beside the measured
runs.
"""

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


def today() -> dict[str, tuple[str, str]]:
    """Returns every recorded table, in the order of prominence -> its make target, and the digest of today's code."""
    tables: dict[str, tuple[str, str]] = {}
    for pattern, (target, parts) in RECORDED.items():
        for path in sorted(RESULTS.glob(pattern)):
            if path.name != "figures":
                tables.setdefault(str(path.relative_to(RESULTS)), (target.format(name=path.name), code(parts)))
    return tables


def older() -> dict[str, str]:
    """Returns the tables that other code than today's recorded -> their make targets."""
    signed = yaml.safe_load(CODE.read_text())
    return {table: target for table, (target, digest) in today().items() if signed.get(table) != digest}


def list_older() -> None:
    """Prints the tables that other code recorded."""
    if tables := older():
        print(f"recorded by older code, so that today's figures may differ: {', '.join(tables)}")


def sign(to: str) -> None:
    """Writes today's digest for a table that was recorded now. Raises KeyError if RECORDED has no such table."""
    table = str(Path(to).resolve().relative_to(RESULTS))
    signed = yaml.safe_load(CODE.read_text()) | {table: today()[table][1]}
    CODE.write_text(yaml.safe_dump(signed))


@cache
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
    parser = Parser("python -m tools.docs.recorded", __doc__)
    parser.add_argument("tables", nargs="?", help="recorded now; or the runs that they are made of; or `targets`")
    parser.add_argument("to", nargs="?", help="folder of the tables that are made of runs")
    chosen = parser.parse_args()
    if chosen.to:
        sys.exit(record(chosen.tables, chosen.to))
    elif chosen.tables == "targets":
        print(*dict.fromkeys(older().values()), sep="\n")
    elif chosen.tables:
        sign(chosen.tables)
    else:
        list_older()
