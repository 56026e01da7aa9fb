"""Parts of the page on estimates: the output of its first command, by today's code, and the fields of its JSON."""

from __future__ import annotations

import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

from zerobench.commands.estimate.row import EstimateRow, LargeTensor
from zerobench.records.describe import meanings_of

ROOT = Path(__file__).resolve().parents[2]

EXAMPLE = "estimate model=gpt2_124m precision=bf16 sequence=1024 strategy=ddp,zero1,zero2,zero3,fsdp2 --tensors 2"
"""The command, as the page has it; a test compares."""


def example() -> str:
    """Runs the example. Raises CalledProcessError where it fails."""
    command = [sys.executable, "-m", "zerobench", *shlex.split(EXAMPLE)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return f"```text\n{done.stdout.rstrip()}\n```"


def schema() -> str:
    """Tables of the fields of an estimate and of its tensors."""
    return "\n\n".join(
        f"{words}\n\n| field | meaning |\n| --- | --- |\n"
        + "\n".join(f"| `{one.name}` | {meanings_of(row)[one.name]} |" for one in fields(row))
        for words, row in (("An estimate:", EstimateRow), ("One of its `tensors`:", LargeTensor))
    )
