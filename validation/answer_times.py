"""How long commands take to answer, before and after a change: medians of interleaved runs, ratios to `import torch`.

Each round runs every command once with the package of each revision. Measure on an idle machine.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pandas as pd

from zerobench.host.revisions import full_hash, worktree
from zerobench.host.terminal import progress_bar

ROOT = Path(__file__).parents[1]

CELLS = "-m model=gpt_tiny strategy=ddp,zero1,zero2,zero3,fsdp2 world_size=1,2,4,8 micro_batch=1,2 accumulation=1,2,4"

COMMANDS = {
    "estimate, gpt_tiny": "estimate strategy=zero3 model=gpt_tiny",
    "estimate, 124M, 5 strategies": "estimate model=gpt2_124m precision=bf16 sequence=1024",
    "estimate, 1.5B": "estimate strategy=zero3 model=gpt2_1_5b precision=bf16 sequence=1024 world_size=8",
    "plan, README": "plan --device-memory 80GiB --gpus 8 model=zero_4b sequence=1024",
    "plan, fastest": "plan --goal fastest --cluster h100-3200 --device-memory 80GiB --gpus 64 model=gpt_7b "
    "precision=bf16 sequence=1024",
    "predict, 1.5B": "predict --cluster h100-3200 model=gpt2_1_5b precision=bf16",
    "estimate, 1T": "estimate strategy=zero3 model=zero_1t world_size=1024 precision=bf16 sequence=1024",
    "dry run, 120 cells": f"{CELLS} --dry-run",
    "dry run, 960 cells": f"{CELLS} clip=null,1.0 seed=0,1,2,3 --dry-run",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("--before", metavar="REV", help="a revision to measure beside this checkout")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each command (default: %(default)s)")


def run(chosen: argparse.Namespace) -> int:
    """Measures, and writes a row per command and revision. Returns the exit code."""
    with ExitStack() as stack:
        codes = {full_hash(ROOT, "HEAD")[:8]: ROOT}
        if chosen.before:
            codes[full_hash(ROOT, chosen.before)[:8]] = stack.enter_context(worktree(ROOT, chosen.before))
        work = [("import torch", "", ["-c", "import torch"])]
        work += [(what, code, ["-m", "zerobench", *COMMANDS[what].split()]) for what in COMMANDS for code in codes]
        seconds: list[tuple[str, str, float]] = []
        with progress_bar("answer times", chosen.rounds * len(work), "runs") as advance:
            for _ in range(chosen.rounds):
                for what, code, words in work:
                    environment = os.environ | {"PYTHONPATH": str(codes.get(code, ROOT))}
                    begun = time.perf_counter()
                    subprocess.run([sys.executable, "-P", *words], env=environment, capture_output=True, check=True)
                    seconds.append((what, code, time.perf_counter() - begun))
                    advance()
    frame = pd.DataFrame(seconds, columns=["command", "code", "s"]).groupby(["command", "code"], sort=False)["s"]
    table = frame.agg(["median", "min", "max", "count"]).round(2).reset_index()
    table["of_import_torch"] = (table["median"] / table["median"].iloc[0]).round(2)
    table.to_csv(ROOT / "results/answer_times.csv", index=False)
    print(table.to_string(index=False))
    return 0
