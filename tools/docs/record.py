"""Makes the newest runs of an experiment its committed tables: parquet, markdown, and the digest of the engine.

python -m tools.docs.record results/runs/reference/stages results/reference/cpu/stages
"""

from __future__ import annotations

import sys
from pathlib import Path

from tools.docs.engine_code import CODE, engine_code
from zerobench.commands.export.command import export
from zerobench.results.tables import load


def record(runs: str, tables: str) -> int:
    """Writes the tables of `runs` to the folder `tables`. Returns the first exit code that is not 0."""
    newest = ["--latest", "--format"]
    wanted = [[*newest, "parquet", "--out", tables], [*newest, "markdown", "--out", f"{tables}/runs.md"]]
    if len(load(runs).searches):
        wanted.append(["--table", "searches", "--format", "markdown", "--out", f"{tables}/searches.md"])
    for arguments in wanted:
        if code := export([runs, *arguments]):
            return code
    (Path(tables) / CODE).write_text(engine_code() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(record(*sys.argv[1:]))
